"""Binaries that one rank finds in Triton's cache and the others compile: no rank runs ahead of the others."""

import pytest
import torch
import torch.distributed as dist
import triton
from candidates import GOOD, kernel, settle, tuned

from ranks import assert_all_ok, run_ranks


@pytest.fixture(autouse=True)
def cache_as_before():
    with triton.knobs.cache.scope():
        yield


@pytest.mark.parametrize("mode", ["replay", "online"])
@pytest.mark.parametrize("warm", [0, 1])
def test_ranks_make_equal_runs_whichever_has_the_binaries(device, compiler, tmp_path, warm, mode):
    def step_of(directory: str, **options: object):
        triton.knobs.cache.dir = str(tmp_path / directory)
        tuner, x, y = kernel(GOOD, 64, 32), torch.zeros(1, dtype=torch.float16), torch.zeros(1)

        def thunk() -> None:
            tuner[(1,)](x, y)
            if dist.is_initialized():
                dist.all_reduce(y)

        return tuned(thunk, **options)

    step_of("warm")()  # leaves the binaries there
    found = len(compiler.compilations())
    assert found == 3
    device.forget()

    def program(rank: int) -> tuple[int, dict[str, str]]:
        step = step_of("warm" if rank == warm else "cold", is_dist=True, mode=mode)
        settle(step)
        (context,) = step.report.contexts
        return step.report.runs, dict(context.banned)

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert set(compiler.compilations()[found:]) == {GOOD, 64, 32}  # the cold rank's
