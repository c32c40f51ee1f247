"""What AllGatherMoE and MoEReduceScatter tell when ranks differ or die, and that every wait ends.

Cases marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import itertools
import os
import signal

import pytest
import torch
from collective_runs import ALWAYS
from every_operation import EXPERTS, each
from moe_runs import GIVEN_OTHERS, delay_pushes, random_choices
from operation_runs import TWO, assert_right, delay_copies, ends, message_of, results, values

from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed

pytestmark = each(EXPERTS)
WAYS = pytest.mark.parametrize("options", [{}, ALWAYS], ids=["overlapped", "by collectives"])


def invalid_expert(rank, runs, options):
    runs.begin(rank)
    op = runs.open(8, 16, **options)
    wrong = torch.tensor([[0, 1], [-1, 3], [2, 2], [-2, 0]]) if rank == 1 else None
    return ends(op, lambda: runs.fresh_call(op, [4] * op.world_size, ids=wrong))


@WAYS
@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_an_expert_that_there_is_not_is_named_with_its_rank_on_every_rank(runs, world, options):
    for rank, (message, again, at_close) in enumerate(values(invalid_expert, world, runs, options)):
        wanted = f"ValueError: {runs.name}, rank {rank}: rank 1 chose expert 3, which weight does not have"
        assert message.startswith(wanted)
        assert again
        assert at_close


def huge_expert(rank, runs):
    runs.begin(rank)
    op = runs.open(8, 16)
    wrong = torch.full((4, 2), 2**32 + 1) if rank == 1 else None  # as int32 it would be expert 1
    return ends(op, lambda: runs.fresh_call(op, [4, 4], told=False, ids=wrong))[0]


def test_a_huge_expert_is_not_taken_for_another_one(runs):
    for message in values(huge_expert, 2, runs):
        assert "rank 1 chose expert 2147483647, which weight does not have" in message


def wrong_tokens(rank, runs, told, options):
    """Let rank 0 be told wrong numbers, all others the right ones."""
    runs.begin(rank)
    op = runs.open(8, 16, **options)
    ids = random_choices((4, 6, 5)[rank], 3, 2)
    first = message_of(lambda: runs.fresh_call(op, told if rank == 0 else (4, 6, 5), ids=ids))
    return first, message_of(op.close)


WRONG = {
    "fewer": ((4, 5, 5), {}),
    "more": ((4, 8, 5), {}),
    "as many together": ((4, 5, 6), {}),
    "fewer, by collectives": ((4, 5, 5), ALWAYS),
}


@pytest.mark.parametrize(("told", "options"), WRONG.values(), ids=WRONG)
def test_wrong_tokens_are_reported_by_name_on_every_rank(runs, told, options):
    zero, *others = values(wrong_tokens, 3, runs, told, options)
    also = ", rank 2 has 5" if told[2] != 5 else ""
    wanted = f"ValueError: {runs.name}, rank 0: tokens={list(told)} here, but rank 1 has 6{also}. Close it"
    assert zero[0].startswith(wanted)
    assert zero[1] == zero[0]
    for rank, (message, at_close) in enumerate(others, 1):
        assert message.startswith(f"ValueError: {runs.name}, rank {rank}: {GIVEN_OTHERS}")
        assert at_close == message


NEEDED_LATER = {"AllGatherMoE": ([9, 0], [9, 12]), "MoEReduceScatter": ([0, 9], [12, 9])}


def pushes_that_nobody_needs(rank, runs):
    """Push late from rank 1 what no tile needs in the first call, and some do in the second."""
    runs.begin(rank)
    with runs.open(16, 16) as op:
        runs.poison(op)
        if rank == 1:
            delay_pushes(op, 1.0)
        return [runs.call_and_compare(op, tokens, 16) for tokens in NEEDED_LATER[runs.name]]


def test_late_pushes_of_two_calls_are_told_apart(runs):
    assert_right(values(pushes_that_nobody_needs, 2, runs))


def dies_before_its_push(rank, runs):
    """End rank 1 when it has told its choices, at the copy that follows those of the choices."""
    runs.begin(rank)
    op = runs.open(8, 16)
    copies = itertools.count()

    def die_behind_the_choices():
        if next(copies) == runs.choices_copied:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        delay_copies(op, die_behind_the_choices)
    op._patience_ticks = as_patience(3.0)
    return ends(op, lambda: runs.fresh_call(op, [4, 4]))


def test_a_peer_that_dies_between_its_choices_and_its_push_is_named(runs):
    survivor, dead = results(dies_before_its_push, 2, runs)
    assert_killed(dead)
    ((message, again, at_close),) = assert_all_ok([survivor])
    assert message.startswith(f"PeerTimeout: {runs.name}, rank 0: rank 1, or one that it waits for, ")
    assert runs.lost_push in message
    assert again
    assert at_close
