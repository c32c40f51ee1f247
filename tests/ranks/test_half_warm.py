"""A cache that some ranks have and others lack: all make equally many runs, each with a collective.

One rank that skips what its peers wait for is an outage: they sit in their collective until a time-out. The
binaries' level, with Triton's compiler, is in `tests/aot/test_sharing.py`.
"""

import shutil
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from kernels_for_tests import Bench, launch, numbers
from rank_programs import blocks_of, own_cache, tune, tune_on_disk

from dist_autotune.storage import bundle
from dist_autotune.storage.winners import Winners
from ranks import assert_all_ok, run_ranks

RANKS = 3
KNOWN_MS = {16: 3.0, 32: 1.0, 64: 2.0}
OTHER_MS = {16: 1.0, 32: 3.0, 64: 2.0}  # 16 would win, were anything timed


def warm_memory(kernel, bench, x):
    """Let this rank alone tune the kernel: its `Autotuner.cache` has the key then."""
    warnings.filterwarnings("ignore", message=".*is tuned without is_dist=True")
    bench.tune(lambda: launch(kernel, x), cache=False)()
    bench.forget()


def warm_disk(warm: tuple[int, ...]) -> None:
    """Let all ranks tune, then delete what the others have."""
    assert_all_ok(run_ranks(lambda rank: tune_on_disk(rank, KNOWN_MS), RANKS))
    for rank in set(range(RANKS)) - set(warm):
        shutil.rmtree(own_cache(rank))


def warm_bundle(warm: tuple[int, ...]) -> None:
    """Ship what one job has found to the warm ranks' disks."""
    warm_disk((0,))
    bundle.write(Path("tuned.json"), list(Winners(own_cache(0)).entries()), replaces=True)
    shutil.rmtree(own_cache(0))
    for rank in warm:
        bundle.merge(Winners(own_cache(rank)), bundle.read(Path("tuned.json")), replaces=False)


@pytest.mark.parametrize("mode", ["replay", "online"])
@pytest.mark.parametrize("warm", [(0,), (1,)], ids=lambda warm: "-".join(map(str, warm)))
@pytest.mark.parametrize("level", ["memory", "disk", "bundle"])
def test_ranks_make_equal_runs_with_one_config_whatever_some_of_them_have(level, warm, mode):
    if level == "disk":
        warm_disk(warm)
    elif level == "bundle":
        warm_bundle(warm)

    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel(OTHER_MS)
        if level == "memory" and rank in warm:
            warm_memory(kernel, bench, x)

        def thunk():
            y = launch(kernel, x)
            dist.all_reduce(y)  # what a rank that skips a run would leave the others in

        step = tune(bench, thunk, cache=own_cache(rank), mode=mode)
        calls = 0
        while not step.settled:
            step()
            calls += 1
        step()
        return calls, step.report.runs, len(bench.blocks()), set(bench.blocks()[1:]), blocks_of(step)

    first, *others = assert_all_ok(run_ranks(program, RANKS))
    assert others == [first] * (RANKS - 1)
    _, _, _, blocks, winners = first
    # What ranks have not agreed on is tuned; entries are given to all, from the second run on at the latest.
    assert winners == {"add64": 16 if level == "memory" else 32}
    assert blocks == ({16, 32, 64} if level == "memory" else {32})
