"""That hosts which must decide alike do, however far one is ahead of another."""

from __future__ import annotations

import random
import time

import pytest
import torch.distributed as dist
from collective_runs import PATIENCE_S, SHORT_S
from operation_runs import message_of, values

from dist_autotune.kernels.exchange.ballots import NUMBERS, RING, Ballots
from ranks import meet


def in_step(rank, first, calls):
    """Ask at random, for rows that may differ, and late at random; return the calls decided wrongly."""
    box, order, late = Ballots("test", None, PATIENCE_S), random.Random(first), random.Random(rank)
    box._call, box._rings[rank][first % RING] = first, first << 32
    dist.barrier()
    wrong = []
    for call in range(calls):
        asked = [order.choice((0, 8, 8, 8)) for _ in range(dist.get_world_size())]
        if order.random() < 0.7:
            asked = [8 * (asked[0] > 0)] * len(asked)
        if late.random() < 0.01:
            time.sleep(late.random() / 100)
        if box.agree(asked[rank]) != (set(asked) == {8}):
            wrong.append(call)
    return wrong


@pytest.mark.parametrize(("world", "first"), [(2, 0), (3, NUMBERS - RING)])
def test_all_ranks_decide_alike_around_the_ring_and_where_numbers_begin_anew(world, first):
    assert values(in_step, world, first, 3 * RING) == [[]] * world


def far_ahead(rank):
    """Let rank 0, which asks for nothing, run as far ahead as it can while rank 1 stands still."""
    box = Ballots("test", None, SHORT_S)
    if rank == 1:
        meet()
        return [box.agree(8) for _ in range(3)]
    message = message_of(lambda: [box.agree(0) for _ in range(10 * RING)])
    meet()
    return box._call, message


def test_a_rank_that_asks_for_nothing_is_less_than_a_ring_ahead():
    (calls, message), decided = values(far_ahead, 2)
    assert calls == RING
    text = (
        f"PeerTimeout: test, rank 0: rank 1 did not come to eager call {RING // 2} within 1.5 s; its last is"
    )
    assert message.startswith(text)
    assert decided == [False] * 3
