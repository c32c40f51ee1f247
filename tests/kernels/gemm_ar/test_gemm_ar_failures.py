"""What GemmAllReduce tells when a call is wrong, ranks differ or one dies, and that every wait ends.

Cases marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
from gemm_ar_runs import HALF, begin, call_and_compare, call_with_norm, of_all, operands
from operation_runs import INTERPRETER, TWO, device, ends, message_of, results, values

from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.gemm_ar.ways import COLLECTIVE, LOW_LATENCY, ONE_SHOT, TWO_SHOT, WAYS
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed, meet

pytestmark = INTERPRETER


def ones(*shape):
    return torch.ones(shape, dtype=HALF)


def test_more_columns_than_a_norm_takes_are_refused():
    op = GemmAllReduce(1, 32769, HALF, backend="shm")
    with pytest.raises(ValueError, match="n=32769: the norm takes up to 32768 columns"), op:
        op(ones(1, 1), ones(32769, 1), None, ones(1, 32769), ones(32769))


# ---- what goes wrong between ranks


def other_way(rank):
    return message_of(lambda: GemmAllReduce(4, 4, HALF, way=WAYS[rank]))


def test_ranks_that_fix_different_ways_are_refused():
    for text in values(other_way, 2):
        assert text.startswith(
            "ValueError: the ranks pass different values of way: rank 0: 'one-shot'; rank 1"
        )


def different_rows(rank, way):
    op = GemmAllReduce(8, 16, HALF, way=way)
    rows = 4 if rank == 0 else 8
    out = torch.zeros(rows, 16, dtype=HALF, device=device())
    told = ends(op, lambda: op(*operands(rows, 16, 16, HALF), out))
    return told, bool(out.isnan().all())


@pytest.mark.parametrize("way", [None, ONE_SHOT, TWO_SHOT, LOW_LATENCY])
@pytest.mark.parametrize("world", TWO)
def test_different_rows_raise_on_every_rank(world, way):
    for rank, ((message, again, at_close), is_nan) in enumerate(values(different_rows, world, way)):
        peer, rows = (1, 8) if rank == 0 else (0, 4)
        assert message.startswith(
            f"ValueError: GemmAllReduce, rank {rank}: rank {peer} has {rows} rows, not as many as this rank. "
            "Every rank must pass as many rows. Close it on all ranks"
        )
        assert again
        assert at_close
        assert is_nan or way == TWO_SHOT  # whose first launch has raised on the CPU


def dead_peer(rank, last, way):
    op = GemmAllReduce(8, 16, HALF, way=way)
    begin(rank)
    call_with_norm(op, 8, 16)
    meet()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    op._patience_ticks = as_patience(1.0)
    if way == LOW_LATENCY:
        op._ways._ballots.agree = lambda key, way, terms: way  # the peer dies behind its ballot
    out = torch.zeros(8, 16, dtype=HALF, device=device())
    more = of_all(8, 16, HALF, 0)
    told = ends(op, lambda: op(*operands(8, 16, 16, HALF), out, *more))
    return told, bool(out.isnan().all())


@pytest.mark.parametrize("way", [ONE_SHOT, TWO_SHOT, LOW_LATENCY])
@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_a_dead_peer_is_named_the_wait_ends_and_no_row_passes_for_a_sum(world, way):
    *survivors, dead = results(dead_peer, world, world - 1, way)
    assert_killed(dead)
    for rank, ((message, again, at_close), is_nan) in enumerate(assert_all_ok(survivors)):
        assert message.startswith(f"PeerTimeout: GemmAllReduce, rank {rank}: ")
        verb = "send" if way == LOW_LATENCY else "offer"
        assert f"rank {world - 1}, or one that it waits for, did not {verb} its rows in time" in message
        assert again
        assert at_close
        assert is_nan


def absent_host(rank):
    """Have rank 1 stay away from a call that rank 0 would make by a collective."""
    op = GemmAllReduce(8, 16, HALF, way=COLLECTIVE, timeout_s=1.5)
    text = message_of(lambda: call_and_compare(op, 8, 16)) if rank == 0 else ""
    meet()
    op.abandon()
    return text


def test_a_host_that_does_not_come_is_named_before_a_collective():
    text, _ = values(absent_host, 2)
    assert text.startswith(
        "PeerTimeout: GemmAllReduce, rank 0: rank 1 did not come to eager call 1 within 1.5 s"
    )
