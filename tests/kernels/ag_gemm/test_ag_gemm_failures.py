"""That AllGatherGemm tells what went wrong, on every rank, and that every wait ends."""

from __future__ import annotations

import os
import signal

import pytest
from ag_gemm_runs import begin, call_and_compare, force
from operation_runs import hold_launch, message_of, results, values
from operations import HALF, factors
from rank_programs import wait_for

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.exchange.flags import ARRIVED
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed


def lose_patience(op: AllGatherGemm) -> None:
    """Let the next calls give up soon; those that are to succeed have had minutes."""
    op._patience_ticks = as_patience(0.5)


def die_in_the_middle(rank, consumer):
    """Rank 1 dies when it has copied one of two pieces, on which rank 0 stops waiting."""
    begin(rank)
    op = AllGatherGemm(32, 16, HALF)
    force(op, consumer=consumer, pieces=2)
    call_and_compare(op, 32, 16)
    if rank == 1:
        copy, copies = op._memory.copy, []

        def die_at_the_second(dst, src, stream):
            copies.append(dst)
            if len(copies) == 2:
                stream.enqueue(lambda: os.kill(os.getpid(), signal.SIGKILL))
            copy(dst, src, stream)

        op._memory.copy = die_at_the_second
    else:
        arrived = op._pusher.flags[ARRIVED.value]
        lose_patience(op)
        hold_launch(op, lambda: int(arrived[1]) >= 16)
    a_shard, weight = factors(32, 16, 16, HALF)
    message = message_of(lambda: op(a_shard, weight))
    return message, message_of(lambda: op(a_shard, weight)) == message, message_of(op.close) == message


@pytest.mark.parametrize("consumer", ["plain", "matmul"])
def test_a_peer_that_dies_in_the_middle_of_a_chunk_is_named(consumer):
    survivor, dead = results(die_in_the_middle, 2, consumer)
    assert_killed(dead)
    ((message, again, at_close),) = assert_all_ok([survivor])
    assert message.startswith("PeerTimeout: AllGatherGemm, rank 0: rank 1")
    assert "did not push chunk 1" in message
    assert again
    assert at_close


def stuck_copy(rank, consumer, pieces):
    """Hold the last piece that rank 0 pushes back until its kernel has given up."""
    begin(rank)
    op = AllGatherGemm(32, 16, HALF)
    force(op, consumer=consumer, pieces=pieces)
    if rank == 0:
        lose_patience(op)
        copy, copies = op._memory.copy, []

        def copy_last_late(dst, src, stream):
            copies.append(dst)
            if len(copies) == pieces:
                stream.enqueue(lambda: wait_for(op._error_records.any, 100.0))
            copy(dst, src, stream)

        op._memory.copy = copy_last_late
        arrived = op._pusher.flags[ARRIVED.value]
        hold_launch(op, lambda: int(arrived[1]) >= 32)
    return message_of(lambda: op(*factors(32, 16, 16, HALF)))


@pytest.mark.parametrize(("consumer", "pieces"), [("plain", 1), ("matmul", 2)])
def test_a_copy_that_does_not_end_is_told_from_a_peer_that_does_not_come(consumer, pieces):
    stuck, unharmed = values(stuck_copy, 2, consumer, pieces)
    assert stuck.startswith(
        "PeerTimeout: AllGatherGemm, rank 0: chunk 0 was not copied to all peers in time."
    )
    assert unharmed == "nothing was raised"


def different_rows_in_pieces(rank, consumers, rows):
    """No rank has the patience to wait for what does not come: patience outlasts the test."""
    begin(rank)
    op = AllGatherGemm(64, 16, HALF, timeout_s=3000.0)
    force(op, consumer=consumers[rank], pieces=1 + rank)
    return message_of(lambda: op(*factors(rows[rank], 16, 16, HALF)))


@pytest.mark.parametrize(
    ("consumers", "rows"),
    [(("plain", "plain"), (64, 20)), (("matmul", "plain"), (20, 64))],
    ids=["plain", "matmul"],
)
def test_different_rows_are_told_at_once_whatever_the_pieces(consumers, rows):
    for rank, message in enumerate(values(different_rows_in_pieces, 2, consumers, rows)):
        told = f"rank {1 - rank} pushed {rows[1 - rank]} rows, not as many as this rank passed"
        assert message.startswith(f"ValueError: AllGatherGemm, rank {rank}: {told}")
