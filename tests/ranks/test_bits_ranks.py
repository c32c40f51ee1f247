"""Bits of outputs on several ranks: what differs on one of them is given up on all."""

import itertools

import pytest
import torch
from kernels_for_tests import Bench, launch, numbers, only, winner
from operation_runs import on_ranks
from rank_programs import ending, tune

from ranks import assert_all_ok, run_ranks

BASE, SLOW, FAST = 16, 32, 64


def changed(y, value=0.5):
    y[0] = value
    return y


def session(rank, change):
    """Return its winner, banned BLOCKs with reasons, launches, and whether result and bits are right."""
    bench = Bench()
    kernel = bench.kernel({BASE: 3.0, SLOW: 2.0, FAST: 1.0})

    def thunk():
        y = launch(kernel, numbers() + rank)
        return change(rank, bench.launches[-1].block, y)

    step = tune(bench, thunk, log_dir=None, bits="same")
    is_right = bool(torch.equal(step(), numbers() + rank + 1))
    context = only(step.report)
    banned = {int(text.split("BLOCK: ")[1].split(",")[0]): why for text, why in context.banned.items()}
    return winner(context), banned, bench.blocks(), is_right, context.same_bits


@pytest.mark.parametrize("where", ["last rank", "every rank"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_config_that_changes_a_bit_on_any_rank_wins_on_none(world_size, where):
    ranks = [world_size - 1] if where == "last rank" else range(world_size)

    def program(rank):
        def change(rank, block, y):
            return changed(y) if block == FAST and rank in ranks else y

        return session(rank, change)

    results = assert_all_ok(run_ranks(program, world_size))
    assert [result[0] for result in results] == [SLOW] * world_size
    reason = f"rank {ranks[0]}: other bits than with the first config, in the result"
    assert [result[1] for result in results] == [{FAST: reason}] * world_size
    assert [result[2] for result in results] == [results[0][2]] * world_size
    assert all(result[3] for result in results)
    assert {result[4] for result in results} == {True}


@on_ranks(2)
def test_a_function_that_does_not_repeat_itself_on_one_rank_is_refused_on_all(rank):
    count = itertools.count()

    def change(rank, block, y):
        return changed(y, next(count) + 0.5) if rank == 1 else y

    text = ending(lambda: session(rank, change))
    assert text.startswith("TuningError: bits='same': two runs with the same configs (add[64")
    assert "different bits in the result on rank 1" in text
