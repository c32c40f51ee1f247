"""How much of the device a launch holds, from its grid and what is known of the compiled kernel."""

from types import SimpleNamespace

import pytest

from dist_autotune.triton_api.footprint import share

H200 = SimpleNamespace(
    multi_processor_count=132,
    shared_memory_per_multiprocessor=233472,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
)


def kernel(warps=8, shared=160_000, registers=168, ctas=1):
    return SimpleNamespace(
        metadata=SimpleNamespace(num_warps=warps, shared=shared, num_ctas=ctas), n_regs=registers
    )


SMALL = {"warps": 4, "shared": 0, "registers": 32}
HELD = [*((n, {}, share) for n, share in ((132, 1000), (100, 758), (66, 500), (4096, 1000), (1, 8)))]
HELD += [(132, SMALL, 500), (66, SMALL, 250), (132 * 16, SMALL, 1000)]


@pytest.mark.parametrize(("programs", "size", "expected"), HELD)
def test_a_program_that_needs_an_sm_holds_one(programs, size, expected):
    assert share(programs, kernel(**size), H200) == expected
