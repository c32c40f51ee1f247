"""What AllGatherMoE and MoEReduceScatter tell when ranks differ or die, and that every wait ends.

Cases marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import itertools
import os
import signal

import pytest
import torch
from ag_moe_runs import GATHERING
from moe_rs_runs import SCATTERING
from moe_runs import GIVEN_OTHERS, HALF, random_choices
from operation_runs import INTERPRETER, TWO, delay_copies, ends, message_of, results, values

from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed, meet

pytestmark = [
    INTERPRETER,
    pytest.mark.parametrize("runs", [GATHERING, SCATTERING], ids=lambda runs: runs.name),
]


def invalid_expert(rank, runs):
    runs.begin(rank)
    op = runs.open(8, 16, HALF)
    wrong = torch.tensor([[0, 1], [-1, 3], [2, 2], [-2, 0]]) if rank == 1 else None
    return ends(op, lambda: runs.fresh_call(op, [4] * op.world_size, ids=wrong))


@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_an_expert_that_there_is_not_is_named_with_its_rank_on_every_rank(runs, world):
    for rank, (message, again, at_close) in enumerate(values(invalid_expert, world, runs)):
        wanted = f"ValueError: {runs.name}, rank {rank}: rank 1 chose expert 3, which weight does not have"
        assert message.startswith(wanted)
        assert again
        assert at_close


def huge_expert(rank, runs):
    runs.begin(rank)
    op = runs.open(8, 16, HALF)
    wrong = torch.full((4, 2), 2**32 + 1) if rank == 1 else None  # as int32 it would be expert 1
    return ends(op, lambda: runs.fresh_call(op, [4, 4], told=False, ids=wrong))[0]


def test_a_huge_expert_is_not_taken_for_another_one(runs):
    for message in values(huge_expert, 2, runs):
        assert "rank 1 chose expert 2147483647, which weight does not have" in message


def wrong_tokens(rank, runs, told):
    """Let rank 0 be told wrong numbers, all others the right ones."""
    runs.begin(rank)
    op = runs.open(8, 16, HALF)
    ids = random_choices((4, 6, 5)[rank], 3, 2)
    first = message_of(lambda: runs.fresh_call(op, told if rank == 0 else (4, 6, 5), ids=ids))
    return first, message_of(op.close)


@pytest.mark.parametrize("told", [(4, 5, 5), (4, 8, 5), (4, 5, 6)], ids=["fewer", "more", "as many together"])
def test_wrong_tokens_are_reported_by_name_on_every_rank(runs, told):
    zero, *others = values(wrong_tokens, 3, runs, told)
    also = ", rank 2 has 5" if told[2] != 5 else ""
    wanted = f"ValueError: {runs.name}, rank 0: tokens={list(told)} here, but rank 1 has 6{also}. Close it"
    assert zero[0].startswith(wanted)
    assert zero[1] == zero[0]
    for rank, (message, at_close) in enumerate(others, 1):
        assert message.startswith(f"ValueError: {runs.name}, rank {rank}: {GIVEN_OTHERS}")
        assert at_close == message


def dead_peer(rank, runs, last):
    runs.begin(rank)
    op = runs.open(8, 16, HALF)
    tokens = [4] * op.world_size
    runs.fresh_call(op, tokens)
    op.check()
    meet()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    op._patience_ticks = as_patience(1.0)
    return ends(op, lambda: runs.fresh_call(op, tokens))


@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_a_dead_peer_is_named_and_the_wait_ends(runs, world):
    *survivors, dead = results(dead_peer, world, runs, world - 1)
    assert_killed(dead)
    for rank, (message, again, at_close) in enumerate(assert_all_ok(survivors)):
        assert message.startswith(f"PeerTimeout: {runs.name}, rank {rank}: ")
        assert f"rank {world - 1}, or one that it waits for, did not send its choices in time" in message
        assert again
        assert at_close


def dies_before_its_push(rank, runs):
    """End rank 1 when it has told its choices, at the copy that follows those of the choices."""
    runs.begin(rank)
    op = runs.open(8, 16, HALF)
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
