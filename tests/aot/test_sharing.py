"""The ranks of a host share Triton's cache: each compiles its part, and finds what the others compile."""

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from candidates import GOOD, Compiler, Preflight, arrive, kernel, settle, tuned
from candidates import preflight as preflight_launch

from ranks import assert_all_ok, run_ranks

BLOCKS = (16, 64, 128)


def preflight(*blocks: int, **options: Any) -> Preflight:
    x, y = torch.zeros(1, dtype=torch.float16), torch.zeros(1)
    return preflight_launch(kernel(*blocks), x, y, **options)


def once_it_compiles(compiler: Compiler, block: int, action: Any) -> None:
    """Do `action` on another thread once some process compiles `block`."""

    def act() -> None:
        compiler.wait_for(block)
        action()

    threading.Thread(target=act, daemon=True).start()


@pytest.mark.parametrize("shares_cache", [True, False], ids=["one cache", "a cache each"])
def test_two_ranks_split_the_candidates_and_each_has_all(device, compiler, tmp_path, shares_cache):
    def program(rank: int) -> Preflight:
        compiler.behaves({BLOCKS[1 - rank]: "wait"})  # a rank that begins with its peer's never ends
        if not shares_cache:
            os.environ["TRITON_CACHE_DIR"] = str(tmp_path / f"cache-{rank}")
            once_it_compiles(compiler, BLOCKS[1 - rank], compiler.let_go)
        arrive(tmp_path, rank, 2)
        return preflight(*BLOCKS, local_rank=rank, local_ranks=2, jobs=1)

    for found in assert_all_ok(run_ranks(program, 2, init="none")):
        compiled = found.counts.compiled
        assert compiled + found.counts.from_peers + found.counts.cached == len(BLOCKS)
        assert compiled < len(BLOCKS) if shares_cache else compiled == len(BLOCKS)
        (reason,) = found.reasons.values()  # of 128, which is compiled and does not load
        assert reason.startswith("OutOfResources")


def test_ctrl_c_leaves_no_process(device, compiler):
    def program(rank: int) -> int:
        compiler.behaves({64: "spin"})
        once_it_compiles(compiler, 64, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            preflight(64)
        assert compiler.processes_left() == []
        compiler.behaves({})
        return preflight(64, limit_s=60.0).counts.compiled

    assert assert_all_ok(run_ranks(program, 1, init="none")) == [1]


# ---- binaries that one rank finds in the cache


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
