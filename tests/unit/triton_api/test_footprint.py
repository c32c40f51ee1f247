"""How much of the device a launch holds, from its grid and what is known of the compiled kernel."""

from types import SimpleNamespace

import pytest
import triton
from kernels_for_tests import add

from dist_autotune.triton_api.footprint import RecordedGrid, fill, share
from dist_autotune.triton_api.launch import Launch

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


def test_a_grid_is_evaluated_by_the_launch_alone():
    calls = []
    recorded = RecordedGrid(lambda meta: calls.append(meta) or (meta["SMS"], 2))
    assert (recorded.programs, calls) == (0, [])
    assert recorded({"SMS": 50}) == (50, 2)
    assert (recorded.programs, calls) == (100, [{"SMS": 50}])
    assert RecordedGrid((4, 5)).programs == 20
    assert RecordedGrid(None).programs == 0


@pytest.mark.parametrize(
    ("programs", "part"), [(1, 1 / 132), (66, 0.5), (132, 1.0), (133, 133 / 264), (264, 1.0)]
)
def test_the_last_wave_of_programs_may_leave_sms_idle(programs, part):
    assert fill(programs, 132) == part


def test_a_grid_tells_how_many_programs_each_config_would_launch():
    def programs_of(grid, config):
        return Launch(add_of_configs, (None, None, 100), {"grid": grid}).programs(config)

    add_of_configs = triton.autotune([], ["n"])(add)
    config = triton.Config({"BLOCK": 16})
    assert programs_of(lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]), 2), config) == 14
    assert programs_of((7,), config) == 0  # it is the same for all
    assert programs_of(lambda meta: (meta["SPLIT"],), config) == 0  # the launch itself raises that
