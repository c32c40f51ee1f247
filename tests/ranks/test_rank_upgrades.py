"""After an upgrade ranks race the same candidates, whichever of them hold the old entry."""

from __future__ import annotations

import shutil

import pytest
import torch.distributed as dist
import triton
from kernels_for_tests import Bench, launch, numbers, only
from rank_programs import blocks_of, own_cache, tune

from ranks import assert_all_ok, run_ranks

OLD_MS = {16: 5.0, 32: 1.0, 64: 3.0, 128: 2.0, 256: 4.0}  # 32, 128 and 64 are its best
NEW_MS = {16: 0.5, 32: 5.0, 64: 3.0, 128: 4.0, 256: 0.5}
SAID = f"3 of 5 candidates, the best with Triton {triton.__version__}; raced again after an upgrade"


def tuned_on(rank, ms, version, **options):
    """Tune with a version of Triton, each run with a collective; return launches, winner and remark."""
    triton.__version__ = version
    bench, x = Bench(), numbers()
    kernel = bench.kernel(ms)

    def thunk():
        y = launch(kernel, x)
        dist.all_reduce(y)  # what a rank that makes fewer runs would leave the others in

    step = tune(bench, thunk, cache=own_cache(rank), **options)
    while not step.settled:
        step()
    return bench.blocks(), blocks_of(step)["add64"], only(step.report).again


@pytest.mark.parametrize("mode", ["replay", "online"])
@pytest.mark.parametrize("warm", [(0,), (1,), (0, 1)], ids=lambda warm: "-".join(map(str, warm)))
def test_all_ranks_race_the_best_of_an_old_entry_that_some_of_them_hold(warm, mode):
    assert_all_ok(run_ranks(lambda rank: tuned_on(rank, OLD_MS, triton.__version__), 2))
    for rank in {0, 1} - set(warm):
        shutil.rmtree(own_cache(rank))
    zero, one = assert_all_ok(run_ranks(lambda rank: tuned_on(rank, NEW_MS, "99.0", mode=mode), 2))
    assert zero[1:] == one[1:] == (64, SAID)
    assert len(zero[0]) == len(one[0])
    assert zero[0][1:] == one[0][1:]  # in its first run a rank knows of its own disk alone
    assert set((zero, one)[warm[0]][0]) == {32, 64, 128}
