"""That hosts which must decide alike do, however far one is ahead of another."""

from __future__ import annotations

import random
import time

import pytest
import torch.distributed as dist
from operation_runs import message_of, on_ranks
from operations import PATIENCE_S

from dist_autotune.kernels.agreement.ballots import NUMBERS, RING, Ballots
from ranks import meet


@pytest.mark.parametrize(("world", "first"), [(2, 0), (3, NUMBERS - RING)])
@on_ranks()
def test_all_ranks_decide_alike_around_the_ring_and_where_numbers_begin_anew(rank, world, first):
    """Ask at random, and late at random."""
    box, order, late = Ballots("test", None, PATIENCE_S), random.Random(first), random.Random(rank)
    box._call, box._rings[rank][first % RING] = first, first << 32
    dist.barrier()
    wrong = []
    for call in range(3 * RING):
        asked = [order.choice((0, 8, 8)) for _ in range(world)]
        if order.random() < 0.7:
            asked = [8 * (asked[0] > 0)] * len(asked)
        if late.random() < 0.01:
            time.sleep(late.random() / 100)
        standing = box.standing(8)
        if box.agree(8, int(asked[rank] > 0), 8) != (set(asked) == {8} or (standing and 8 in asked)):
            wrong.append(call)
    box.check()
    assert wrong == []


@on_ranks(2)
def test_a_rank_that_goes_on_as_before_waits_for_nobody(rank):
    """Agree on a way, let rank 0 go on alone with it, then give it up together."""
    box = Ballots("test", None, PATIENCE_S)
    assert [box.agree("key", way, 8) for way in (1, 3, 3)] == [1, 3, 3]
    if rank == 1:
        meet()  # rank 0 has made all its calls
    assert {box.agree("key", 3, 8) for _ in range(RING // 2 - 10)} == {3}
    if rank == 0:
        meet()
    # Who wants another way does what peers do that may have gone on; all may want another one.
    assert box.agree("key", 3 if rank == 0 else 0, 8) == 3
    assert box.agree("key", 0, 8) == 0
    box.check()
    assert box.standing("key") == 0


@on_ranks(2)
def test_other_terms_in_a_call_that_nobody_read_are_told_later(rank):
    box = Ballots("test", None, PATIENCE_S)
    for _ in range(2):
        box.agree("key", 1, 8)
    box.agree("key", 1, 8 + rank)  # unread: it stands
    messages = [message_of(box.check), message_of(lambda: box.agree("key", 1, 8))]
    meet()
    told = f"ValueError: test, rank {rank}: rank {1 - rank} made eager call 3 with other rows or tokens"
    assert [message[: len(told)] for message in messages] == [told] * 2
