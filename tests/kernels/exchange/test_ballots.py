"""That hosts which must decide alike do, however far one is ahead of another."""

import random
import time

import pytest
import torch.distributed as dist
from operation_runs import on_ranks
from operations import PATIENCE_S

from dist_autotune.kernels.agreement.ballots import NUMBERS, RING, Ballots


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
