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


@pytest.mark.parametrize(("programs", "expected"), [(132, 1000), (100, 758), (66, 500), (4096, 1000), (1, 8)])
def test_a_program_that_needs_an_sm_holds_one(programs, expected):
    assert share(programs, kernel(), H200) == expected


def test_small_programs_hold_half_of_each_sm_until_they_are_many():
    small = kernel(warps=4, shared=0, registers=32)
    assert share(132, small, H200) == 500
    assert share(66, small, H200) == 250
    assert share(132 * 16, small, H200) == 1000
