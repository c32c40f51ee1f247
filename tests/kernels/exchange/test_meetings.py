"""That kernels begin when all peers have come to the call, where that is asked for: `meet_first`."""

import functools
import time
from pathlib import Path

import pytest
import torch
from dense_runs import GATHERING_ROWS
from every_operation import EVERY, each
from operation_runs import message_of, on_ranks
from rank_programs import wait_for
from tp_runs import in_workspaces

from dist_autotune.kernels import tp
from dist_autotune.kernels.exchange.streams import await_peers
from dist_autotune.kernels.signals import as_patience
from dist_autotune.kernels.tp.registry import WORKSPACES
from ranks import meet

HALF, ROWS = torch.float16, 16


def opened(rank, runs):
    """Open an operation of two ranks; return it and a call of it."""
    runs.begin(rank)
    overlapped = {} if runs.name == "GemmAllReduce" else {"collective": False}
    op, rows = runs.open(ROWS, 32, **overlapped), [ROWS, ROWS]
    operands = runs.operands(op, rows, 32)
    return op, functools.partial(runs.call, op, operands, runs.new_out(op, rows, operands), rows)


@each(EVERY)
@on_ranks(2)
def test_kernels_begin_when_all_peers_have_come(rank, runs):
    op, call = opened(rank, runs)
    with op:
        expected, came, seen = call().clone(), Path("came"), []
        op.meet_first()
        op.meet_first()  # a second time changes nothing
        name = "_exchange" if runs.name == "GemmAllReduce" else "_launch"
        launch = getattr(op, name)
        setattr(op, name, lambda *args, **given: (seen.append(came.exists()), launch(*args, **given))[1])
        meet()
        if rank == 1:
            here = op._meeting._arguments[0]
            wait_for(lambda: here[0] == 1)
            time.sleep(0.1)  # on purpose: rank 0 is to find this one away
            came.touch()
        assert torch.equal(call(), expected)
    assert seen
    assert all(seen)


def calls_without_a_peer(rank, runs, meets):
    """Return what rank 0 is told in two calls that rank 1 does not come to; nothing on rank 1."""
    op, call = opened(rank, runs)
    if meets:
        op.meet_first()
    call()
    meet()
    if rank == 1:
        return []
    op._patience_ticks = as_patience(0.5)
    messages = [message_of(call), message_of(call)]
    op.abandon()
    return messages


@each(EVERY)
@on_ranks(2)
def test_a_peer_that_does_not_come_is_named(rank, runs):
    told = f"PeerTimeout: {runs.name}, rank 0: rank 1 did not come to the call in time. Find out what that"
    told += " rank is doing. Close it on all ranks and open another"
    assert calls_without_a_peer(rank, runs, True) == ([told] * 2 if rank == 0 else [])


LAST, FIRST = 2**31 - 1, -(2**31)  # numbers of calls, in an int32 that wraps around


@pytest.mark.parametrize(("told", "call", "has_come"), [(LAST, FIRST, False), (FIRST, LAST, True)])
def test_numbers_of_calls_compare_across_the_end_of_int32(told, call, has_come):
    flags, errors = torch.tensor([0, told], dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    await_peers[(1,)](flags, errors, 0, call, 1, WORLD=2)
    assert (int(errors[1]) == 0) is has_come


@on_ranks(2)
def test_without_it_a_wait_that_ends_says_what_may_help(rank):
    for message in calls_without_a_peer(rank, GATHERING_ROWS, False):
        assert "If it waits for a send of this rank, call meet_first()." in message


@in_workspaces(2)
def test_all_layers_of_a_group_meet_first_also_in_workspaces_that_are_opened_later(rank):
    up, down = (torch.ones(shape) for shape in ((8, 4), (4, 8)))

    def step(rows):
        return tp.matmul_reduce_scatter(tp.all_gather_matmul(torch.ones(rows, 4), up), down)

    wanted = step(2)
    tp.meet_first()
    assert torch.equal(step(2), wanted)
    assert step(6).shape == (6, 4)
    assert [each.operation._meeting is not None for each in WORKSPACES.open.values()] == [True, True]
    tp.release()
