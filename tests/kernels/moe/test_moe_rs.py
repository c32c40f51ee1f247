"""What is MoEReduceScatter's own: equal bits, programs that wait for each other, wrong arguments.

What it promises as AllGatherMoE does is in `test_moe.py` and `test_moe_failures.py`.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from ag_moe_runs import GATHERING
from forked_programs import forked_programs, share_errors
from moe_rs_runs import SCATTERING as runs
from moe_rs_runs import same_call_twice
from moe_runs import HALF, delay_pushes, random_choices, randoms, tokens_of_call
from operation_runs import (
    INTERPRETER,
    assert_cases,
    assert_right,
    cases_of,
    device,
    message_of,
    values,
)

from dist_autotune.kernels.moe_rs import MoEReduceScatter
from dist_autotune.kernels.signals import as_patience

pytestmark = INTERPRETER


def several_programs(rank, programs):
    runs.begin(rank)
    world = dist.get_world_size() if dist.is_initialized() else 1
    tokens = [(33, 20, 0)[p] for p in range(world)]
    with MoEReduceScatter(40, 40, HALF, timeout_s=60.0) as op:
        runs.poison(op)
        share_errors(op)
        op._sms = 1  # a grid of one program, each launch of which becomes several
        mapped = [op._staged.local, op._flags.local, op._weights.local, op._ids.local]
        with forked_programs(runs.kernel, programs, mapped):
            return [runs.call_and_compare(op, tokens_of_call(tokens, call), 24, 3, 2) for call in range(3)]


@pytest.mark.parametrize(("world", "programs"), [(1, 3), (2, 3)])
def test_programs_of_a_launch_that_wait_for_each_other_are_right(world, programs):
    assert_right(values(several_programs, world, programs))


def pushes_that_nobody_needs(rank):
    """Push late from rank 1 sums for no token of rank 0 in the first call, and for some in the second."""
    runs.begin(rank)
    with MoEReduceScatter(16, 16, HALF) as op:
        runs.poison(op)
        if rank == 1:
            delay_pushes(op, 1.0)
        return [runs.call_and_compare(op, tokens, 16, 3, 2) for tokens in ([0, 9], [12, 9])]


def a_layer(rank):
    """Gather, multiply, apply, multiply, scatter: what the two operations are for, two layers at once."""
    GATHERING.begin(rank)
    runs.begin(rank)
    tokens, k, inner, experts, topk = [11, 6], 16, 24, 4, 2
    errors = []
    with GATHERING.open(12, k, torch.float32) as up, MoEReduceScatter(12, k, torch.float32) as down:
        for _ in range(2):
            x, ids = (
                randoms(tokens[rank], k, dtype=torch.float32),
                random_choices(tokens[rank], experts, topk),
            )
            first = randoms(experts, inner, k, dtype=torch.float32)
            second = randoms(experts, k, inner, dtype=torch.float32)
            weights = torch.rand(ids.shape, device=device())
            hidden = torch.relu(up(x, first, ids))
            errors.append(runs.error_ratio(down(hidden, second, ids, weights), hidden, second, ids, weights))
    return errors


def strided_operands(rank):
    runs.begin(rank)
    with MoEReduceScatter(8, 20, HALF) as op:
        y, weight = randoms(32, 50)[:, 3:35], randoms(3, 24, 50)[:, 2:22, 5:37]  # rows at odd addresses
        ids = random_choices(8, 3, 4)[:, 1:3]
        weights = torch.randn(8, 5, device=device(), dtype=torch.float64)[:, 2:4]
        out = torch.full((8, 50), float("nan"), dtype=HALF, device=device())
        op(y, weight, ids, weights, out[:, 1:21])
        beside = out[:, 0].isnan().all() and out[:, 21:].isnan().all()
        error = runs.error_ratio(out[:, 1:21], y, weight, ids, weights.float())
        return [error, 0.0 if beside else 9.0]


def test_bits_repeat_pushes_are_told_apart_and_what_was_gathered_can_be_scattered():
    functions = (same_call_twice, pushes_that_nobody_needs, a_layer, strided_operands)
    assert_cases(functools.partial(cases_of, functions), 2)


# ---- what goes wrong between ranks


def wrong_rows(rank):
    """Let rank 1 find, when the hosts have told each other their numbers, that its y has not as many rows."""
    runs.begin(rank)
    op = MoEReduceScatter(8, 16, HALF)
    op._patience_ticks = as_patience(1.0)
    first = message_of(lambda: runs.fresh_call(op, [4, 4], told=False, rows=14 if rank == 1 else None))
    return first, message_of(op.close)


def test_rows_that_do_not_fit_the_tokens_of_all_ranks_end_on_both():
    peer, wrong = values(wrong_rows, 2)
    assert wrong[0] == "ValueError: y has 14 rows; tokens [4, 4] of the ranks with topk=2 are 16 rows"
    assert wrong[1].startswith(
        "RuntimeError: MoEReduceScatter, rank 1: call 1 was not carried out: ValueError"
    )
    assert peer[0].startswith(
        "PeerTimeout: MoEReduceScatter, rank 0: rank 1, or one that it waits for, did not"
    )
    assert peer[1] == peer[0]
