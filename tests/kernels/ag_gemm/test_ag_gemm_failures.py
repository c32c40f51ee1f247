"""That AllGatherGemm tells what went wrong, on every rank, and that every wait ends."""

from __future__ import annotations

import os
import signal

import pytest
from ag_gemm_runs import begin, call_and_compare, call_pushed, force
from operation_runs import hold_launch, message_of, results, values
from operations import HALF, factors
from rank_programs import wait_for

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.exchange.flags import ARRIVED, READY
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed


def lose_patience(op: AllGatherGemm) -> None:
    """Let the next calls give up soon; those that are to succeed have had minutes."""
    op._patience_ticks = as_patience(0.5)


def test_nothing_is_gathered_before_the_first_call():
    with (
        AllGatherGemm(4, 8, HALF, backend="shm") as op,
        pytest.raises(RuntimeError, match="nothing has been gathered yet"),
    ):
        _ = op.gathered


def die_in_the_middle(rank, consumer, producer):
    """Rank 1 dies when it has copied one of two pieces, on which rank 0 stops waiting."""
    begin(rank)
    op = AllGatherGemm(32, 16, HALF, producer=producer)
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
        # What has come of rank 1's chunk; of ours it has not all.
        flags = op._pusher.flags if producer == "push" else op._flags.local
        arrived, base = flags[ARRIVED.value], 0 if producer == "push" else 32
        lose_patience(op)
        hold_launch(op, lambda: int(arrived[1]) - base >= 16)
    a_shard, weight = factors(32, 16, 16, HALF)
    message = message_of(lambda: op(a_shard, weight))
    return message, message_of(lambda: op(a_shard, weight)) == message, message_of(op.close) == message


@pytest.mark.parametrize(("consumer", "producer"), [("plain", "pull"), ("matmul", "push")])
def test_a_peer_that_dies_in_the_middle_of_a_chunk_is_named(consumer, producer):
    survivor, dead = results(die_in_the_middle, 2, consumer, producer)
    assert_killed(dead)
    ((message, again, at_close),) = assert_all_ok([survivor])
    what = "did not push chunk 1" if producer == "push" else "did not fetch chunk 0 of call 2"
    assert message.startswith("PeerTimeout: AllGatherGemm, rank 0: rank 1")
    assert what in message
    assert again
    assert at_close


def stuck_copy(rank, consumer, pieces):
    """Hold the last piece that rank 0 fetches back until its kernel has given up."""
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
        # Of two pieces one is there; of one, the peer has told that it has come.
        half_is_there = lambda: int(op._flags.local[ARRIVED.value, 1]) >= 16  # noqa: E731
        hold_launch(op, half_is_there if pieces == 2 else lambda: int(op._flags.local[READY.value, 1]) >= 1)
    return message_of(lambda: op(*factors(32, 16, 16, HALF)))


@pytest.mark.parametrize(("consumer", "pieces"), [("plain", 1), ("matmul", 2)])
def test_a_copy_that_does_not_end_is_told_from_a_peer_that_does_not_come(consumer, pieces):
    stuck, unharmed = values(stuck_copy, 2, consumer, pieces)
    text = (
        "PeerTimeout: AllGatherGemm, rank 0: chunk 1 of call 1 was offered by rank 1 and not copied in time."
    )
    assert stuck.startswith(text)
    assert unharmed == "nothing was raised"


def different_rows_in_pieces(rank, consumers, call, rows):
    """No rank has the patience to wait for what does not come: patience outlasts the test."""
    begin(rank)
    op = AllGatherGemm(64, 16, HALF, timeout_s=3000.0)
    force(op, consumer=consumers[rank], pieces=1 + rank)
    return message_of(lambda: call(op, *factors(rows[rank], 16, 16, HALF)))


@pytest.mark.parametrize(
    ("call", "consumers", "rows"),
    [
        (AllGatherGemm.__call__, ("plain", "plain"), (20, 64)),
        (AllGatherGemm.__call__, ("matmul", "plain"), (64, 20)),
        (call_pushed, ("plain", "plain"), (64, 20)),
        (call_pushed, ("matmul", "plain"), (20, 64)),
    ],
    ids=["eager, as many pieces", "eager", "pushed, as many pieces", "pushed"],
)
def test_different_rows_are_told_at_once_whatever_the_pieces(consumers, call, rows):
    for rank, message in enumerate(values(different_rows_in_pieces, 2, consumers, call, rows)):
        told = f"rank {1 - rank} pushed {rows[1 - rank]} rows, not as many as this rank passed"
        if call is AllGatherGemm.__call__:
            told = f"in call 1 rank {1 - rank} passed {rows[1 - rank]} rows, not as many as this rank"
        assert message.startswith(f"ValueError: AllGatherGemm, rank {rank}: {told}")
