"""That calls, and operations that are opened and closed, leave nothing behind: memory, threads, files."""

import gc
import os
import resource
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from dense_runs import GATHERING_ROWS
from operation_runs import on_ranks
from operations import HALF
from rank_programs import wait_for

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.exchange.flags import ARRIVED
from dist_autotune.kernels.exchange.push import RISEN
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.moe_rs import MoEReduceScatter

CALLS, WARM_UPS = 4_000, 1_000
MOST_GROWN_BYTES = (CALLS - WARM_UPS) // 3_000 * 2**20  # 350 bytes a call would show


def held() -> tuple[int, int, int]:
    """Return the bytes that this process has in memory, its threads and its open files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize(), threading.active_count(), len(os.listdir("/proc/self/fd"))


@on_ranks(2)
def test_thousands_of_calls_leave_memory_threads_and_files_as_they_were(rank):
    GATHERING_ROWS.begin(rank)
    with AllGatherGemm(8, 16, HALF) as op:
        flags = op._pusher.flags

        def wait_as_kernels_do(*call):
            wait_for(lambda: bool((flags[ARRIVED.value] > 0).all()))
            flags[RISEN] = 0

        op._launch = wait_as_kernels_do
        before = held()
        for call in range(CALLS):
            if call == WARM_UPS:
                before = held()
            rows = call % 8 + 1
            op(torch.ones(rows, 16, dtype=HALF), torch.ones(call % 5 + 1, 16, dtype=HALF))
        after = held()
        assert (op.gathered == 1).all()
    assert after[0] - before[0] < MOST_GROWN_BYTES
    assert after[1:] == before[1:]


@on_ranks(2)
def test_operations_that_are_closed_or_abandoned_leave_no_thread_and_no_file(rank):
    kinds = (AllGatherGemm, GemmReduceScatter, MoEReduceScatter)
    for round in range(12):
        if round == 2:
            before = held()
        for number, kind in enumerate(kinds):
            op = kind(8, 16, HALF, timeout_s=20.0)
            (op.close if (round + number) % 3 else op.abandon)()
        dist.barrier()
    after = held()
    assert all(now <= then for now, then in zip(after[1:], before[1:], strict=True)), (before, after)
    assert after[0] - before[0] < 3 * 2**20
