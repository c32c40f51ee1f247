"""What GemmReduceScatter tells when a call is wrong, ranks differ or one dies, and that every wait ends.

Cases marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist
from gemm_rs_runs import HALF, call_and_compare, operands
from operation_runs import INTERPRETER, TWO, ends, message_of, results, values

from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed, meet

pytestmark = INTERPRETER


def rows_that_do_not_divide(rank):
    with GemmReduceScatter(12, 8, HALF) as op:
        message = message_of(lambda: op(*operands(7, 8, 16, HALF)))
        return message, call_and_compare(op, 9, 16)


def test_rows_that_the_ranks_cannot_share_are_refused_on_every_rank():
    for message, error in values(rows_that_do_not_divide, 3):
        assert message == "ValueError: a has 7 rows, which 3 ranks cannot share evenly; pad it to 9"
        assert error < 1


# ---- what goes wrong between ranks


def different_rows(rank):
    op = GemmReduceScatter(8, 16, HALF)
    return ends(op, lambda: op(*operands(4 if rank == 0 else 8, 16, 16, HALF)))


@pytest.mark.parametrize("world", TWO)
def test_different_rows_raise_on_every_rank(world):
    for rank, (message, again, at_close) in enumerate(values(different_rows, world)):
        peer, rows = (1, 4) if rank == 0 else (0, 2)
        assert message.startswith(
            f"ValueError: GemmReduceScatter, rank {rank}: rank {peer} has {rows} rows for each rank"
        )
        assert again
        assert at_close


def dead_peer(rank, last):
    op = GemmReduceScatter(8 * dist.get_world_size(), 16, HALF)
    call_and_compare(op, 8 * op.world_size, 16)
    meet()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    op._patience_ticks = as_patience(1.0)
    return ends(op, lambda: op(*operands(8 * op.world_size, 16, 16, HALF)))


@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_a_dead_peer_is_named_and_the_wait_ends(world):
    *survivors, dead = results(dead_peer, world, world - 1)
    assert_killed(dead)
    for rank, (message, again, at_close) in enumerate(assert_all_ok(survivors)):
        assert message.startswith(f"PeerTimeout: GemmReduceScatter, rank {rank}: ")
        assert f"rank {world - 1}, or one that it waits for, did not push its sums" in message
        assert again
        assert at_close
