"""What each operation tells when ranks differ or one dies, that every wait ends, and what results are then.

Cases marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
import torch.distributed as dist
from ag_gemm_runs import GATHERING_ROWS, GatheringRows
from every_operation import EVERY, EXPERTS, OF_ONE_WAY, each
from gemm_ar_runs import REDUCING, Reducing
from gemm_rs_runs import SCATTERING_SUMS
from operation_runs import TWO, ends, hold_launch, message_of, results, values
from rank_programs import wait_for

from dist_autotune.kernels.exchange.flags import ARRIVED
from dist_autotune.kernels.exchange.operation import PeerTimeout
from dist_autotune.kernels.gemm_ar.ways import COLLECTIVE, LOW_LATENCY, ONE_SHOT, OVERLAPPED, TWO_SHOT
from ranks import assert_all_ok, assert_killed, meet

OF_KERNELS = {way: REDUCING[way] for way in (ONE_SHOT, TWO_SHOT, LOW_LATENCY)}


# ---- ranks that differ


def other_ways(rank):
    return message_of(lambda: REDUCING[(ONE_SHOT, TWO_SHOT)[rank]].open(4, 4))


def test_operations_opened_differently_raise_on_every_rank():
    for message in values(other_ways, 2):
        assert message.startswith("ValueError: the ranks pass different values of way: ")
        assert "rank 0: 'one-shot'; rank 1: 'two-shot'" in message


def rows_of_reduce(rank, peer, rows):
    return f"rank {peer} has {rows} rows, not as many as this rank. Every rank must pass as many rows."


def rows_of_scatter(rank, peer, rows):
    return f"rank {peer} has {rows} rows for each rank"


def rows_of_gather(rank, peer, rows):
    return f"rank {peer} pushed {rows} rows"


class OneSum(Reducing):
    """One call: a GPU's host may hear of the first before a second, for which its peer would wait."""

    def call(self, op, operands, out, rows, *, told=True):
        a, weight, *_ = operands
        op(a, weight, out[0])
        return out


OTHER_ROWS = {
    "AllGatherGemm": (GATHERING_ROWS, {}, rows_of_gather),
    "AllGatherGemm, cuBLAS": (GatheringRows(consumer="matmul", pieces=2), {}, rows_of_gather),
    "AllGatherGemm, by a collective": (GATHERING_ROWS, {"collective": True}, rows_of_gather),
    "GemmReduceScatter": (SCATTERING_SUMS, {}, rows_of_scatter),
    "GemmReduceScatter, by a collective": (SCATTERING_SUMS, {"collective": True}, rows_of_scatter),
    "GemmAllReduce": (OneSum(), {}, rows_of_reduce),
} | {f"GemmAllReduce, {way}": (OneSum(way), {}, rows_of_reduce) for way in OF_KERNELS}


def different_rows(rank, runs, options):
    op = runs.open(8, 16, **options)
    rows = [4 if rank == 0 else 8] * op.world_size
    operands = runs.operands(op, rows, 16)
    out = runs.new_out(op, rows, operands).zero_()
    told = ends(op, lambda: runs.call(op, operands, out, rows))
    return told, bool(out[runs.result_of_peer].isnan().all())


@pytest.mark.parametrize("case", OTHER_ROWS)
@pytest.mark.parametrize("world", TWO)
def test_different_rows_raise_on_every_rank(world, case):
    runs, options, told = OTHER_ROWS[case]
    for rank, ((message, again, at_close), is_nan) in enumerate(values(different_rows, world, runs, options)):
        peer, rows = (1, 8) if rank == 0 else (0, 4)
        assert message.startswith(f"ValueError: {runs.name}, rank {rank}: {told(rank, peer, rows)}")
        assert again
        assert at_close
        # The first launch of two has raised on the CPU.
        assert is_nan or runs.name != "GemmAllReduce" or runs.way == TWO_SHOT


# ---- ranks that die or stay away


OR_ANOTHER = "rank {0}, or one that it waits for, did not "
LOST = {"AllGatherGemm": OR_ANOTHER + "push chunk {0} in time"}
LOST |= {"GemmReduceScatter": OR_ANOTHER + "push its sums"}
LOST |= {f"GemmAllReduce, {way}": OR_ANOTHER + "offer its rows in time" for way in OF_KERNELS}
LOST |= {f"GemmAllReduce, {LOW_LATENCY}": OR_ANOTHER + "send its rows in time"}
LOST |= {f"GemmAllReduce, {OVERLAPPED}": OR_ANOTHER + "push its sums"}
LOST |= dict.fromkeys(EXPERTS, OR_ANOTHER + "send its choices in time")


def dead_peer(rank, runs, last):
    runs.begin(rank)
    op = runs.open(8, 16)
    rows = [6] * op.world_size
    runs.fresh_call(op, rows)
    op.check()
    meet()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    runs.forsake(op, 1.0)
    return ends(op, lambda: runs.fresh_call(op, rows))


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_a_dead_peer_is_named_and_the_wait_ends(world, name):
    runs = (EVERY | OF_ONE_WAY)[name]
    *survivors, dead = results(dead_peer, world, runs, world - 1)
    assert_killed(dead)
    for rank, (message, again, at_close) in enumerate(assert_all_ok(survivors)):
        lost_by = "GemmReduceScatter" if name.endswith(OVERLAPPED) else runs.name
        assert message.startswith(f"PeerTimeout: {lost_by}, rank {rank}: ")
        assert LOST[name].format(world - 1) in message
        assert again
        assert at_close


def absent_host(rank):
    """Have rank 1 stay away from a call that rank 0 would make by a collective."""
    runs = REDUCING[COLLECTIVE]
    op = runs.open(8, 16, timeout_s=1.5)
    text = message_of(lambda: runs.fresh_call(op, [8, 8])) if rank == 0 else ""
    meet()
    op.abandon()
    return text


def test_a_host_that_does_not_come_is_named_before_a_collective():
    text, _ = values(absent_host, 2)
    assert text.startswith(
        "PeerTimeout: GemmAllReduce, rank 0: rank 1 did not come to eager call 1 within 1.5 s"
    )


STUCK = {  # how many copies the last one is, what is told
    "AllGatherGemm": (GatheringRows(consumer="plain", pieces=1), 1, "chunk 0 was not copied"),
    "AllGatherGemm, cuBLAS": (GatheringRows(consumer="matmul", pieces=2), 2, "chunk 0 was not copied"),
    "GemmReduceScatter": (SCATTERING_SUMS, 1, "the sums of rank 0 were not copied"),
}


def stuck_copy(rank, runs, copies):
    """Hold the last copy that rank 0 pushes back until its kernel has given up."""
    runs.begin(rank)
    op = runs.open(32, 16)
    if rank == 0:
        runs.forsake(op, 0.5)
        copy, begun = op._memory.copy, []

        def copy_last_late(dst, src, stream):
            begun.append(dst)
            if len(begun) == copies:
                stream.enqueue(lambda: wait_for(op._error_records.any, 100.0))
            copy(dst, src, stream)

        op._memory.copy = copy_last_late
        arrived = op._pusher._pushes._here[1][ARRIVED.value]
        hold_launch(op, lambda: int(arrived) >= 32)
    return message_of(lambda: runs.fresh_call(op, [32, 32]))


@pytest.mark.parametrize("name", STUCK)
def test_a_copy_that_does_not_end_is_told_from_a_peer_that_does_not_come(name):
    runs, copies, told = STUCK[name]
    stuck, unharmed = values(stuck_copy, 2, runs, copies)
    assert stuck.startswith(f"PeerTimeout: {runs.name}, rank 0: {told} to all peers in time.")
    assert unharmed == "nothing was raised"


# ---- results without a peer


class WithRelu(GatheringRows):
    def call(self, op, operands, out, rows, *, told=True):
        return op(*operands, out, activation="relu")


SPOILED = {
    "gathered": WithRelu(consumer="plain"),
    "gathered, cuBLAS": WithRelu(consumer="matmul"),
    "scattered": SCATTERING_SUMS,
    **OF_KERNELS,
    **EXPERTS,
}


def without_a_peer(rank, runs):
    """Call twice; then rank 0 alone, whose buffers hold what rank 1 sent before, and again."""
    runs.begin(rank)
    rows = [8, 8]
    op = runs.open(8, 16)
    operands = runs.operands(op, rows, 24)
    out = runs.new_out(op, rows, operands)
    for _ in range(2):
        runs.call(op, operands, out, rows)
    before = bool(out.isfinite().all())
    dist.barrier()
    spoiled = []
    if rank == 0:
        runs.forsake(op, 0.5)
        check, op._check_usable = op._check_usable, lambda: None  # of replays, which ask no host
        for _ in range(2):
            with contextlib.suppress(PeerTimeout):
                runs.call(op, operands, out, rows)
            spoiled.append(bool(out[runs.result_of_peer].isnan().all()))
            out.zero_()
        op._check_usable = check
    meet()
    op.abandon()
    return before, spoiled


@each(SPOILED)
def test_a_result_without_a_peer_is_nan_now_and_later(runs):
    assert values(without_a_peer, 2, runs) == [(True, [True, True]), (True, [])]
