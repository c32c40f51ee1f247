"""What is AllGatherMoE's own: strided operands, wrong arguments, ranks that differ.

What it promises as MoEReduceScatter does is in `test_moe.py` and `test_moe_failures.py`.
"""

from __future__ import annotations

import functools
import os
import signal

import torch
from ag_moe_runs import GATHERING as runs
from moe_runs import HALF, delay_pushes, random_choices, randoms
from operation_runs import (
    INTERPRETER,
    assert_cases,
    cases_of,
    device,
    ends,
    message_of,
    results,
    values,
)

from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed, meet

pytestmark = INTERPRETER
HOST_PATIENCE_S = 3.0  # where a host waits for one that does not come, and for others that do


def pushes_that_no_tile_needs(rank):
    """Push late from rank 1, whose chunk nobody needs in the first call, and everybody in the second."""
    runs.begin(rank)
    with AllGatherMoE(16, 16, HALF) as op:
        runs.poison(op)
        if rank == 1:
            delay_pushes(op, 1.0)
        return [runs.call_and_compare(op, tokens, 16, 3, 2) for tokens in ([9, 0], [9, 12])]


def two_operations(rank):
    runs.begin(rank)
    errors = []
    with AllGatherMoE(12, 24, HALF) as first, AllGatherMoE(20, 16, torch.bfloat16) as second:
        for _ in range(2):
            errors += [
                runs.call_and_compare(first, [12, 5], 16, 3, 2),
                runs.call_and_compare(second, [3, 20], 24, 2, 4),
            ]
    return errors


def strided_operands(rank):
    runs.begin(rank)
    with AllGatherMoE(8, 32, HALF) as op:
        x, weight = randoms(8, 50)[:, 3:35], randoms(3, 24, 50)[:, 2:22, 5:37]  # rows at odd addresses
        ids = random_choices(8, 3, 4)[:, 1:3]
        out = torch.full((32, 50), float("nan"), dtype=HALF, device=device())
        op(x, weight, ids, out[:, 1:21])
        beside = out[:, 0].isnan().all() and out[:, 21:].isnan().all()
        return [runs.error_ratio(out[:, 1:21], x, weight, ids), 0.0 if beside else 9.0]


def test_pushes_and_operations_are_told_apart_and_nothing_beside_slices_is_written():
    functions = (pushes_that_no_tile_needs, two_operations, strided_operands)
    assert_cases(functools.partial(cases_of, functions), 2)


# ---- what goes wrong between ranks


def different_topk(rank):
    runs.begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    return ends(op, lambda: runs.fresh_call(op, [4, 4], told=False, topk=2 + rank))


def test_different_numbers_of_choices_raise_on_every_rank():
    for rank, (message, again, at_close) in enumerate(values(different_topk, 2)):
        peer, theirs = (1, 3) if rank == 0 else (0, 2)
        wanted = (
            f"ValueError: AllGatherMoE, rank {rank}: rank {peer} has {theirs} choices a token, not as many"
        )
        assert message.startswith(wanted)
        assert again
        assert at_close


def dead_before_its_number_of_tokens(rank):
    runs.begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    runs.fresh_call(op, [4, 4, 4])
    op.check()
    meet()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    op._hosts._timeout_s = HOST_PATIENCE_S
    return message_of(lambda: runs.fresh_call(op, [4, 4, 4], told=False)), message_of(op.close)


def test_a_dead_peer_is_named_where_hosts_wait_for_its_number_of_tokens():
    *survivors, dead = results(dead_before_its_number_of_tokens, 3)
    assert_killed(dead)
    for rank, (message, at_close) in enumerate(assert_all_ok(survivors)):
        assert message.startswith(
            f"PeerTimeout: AllGatherMoE, rank {rank}: rank 2 did not come to eager call 1 within 3 s"
        )
        broken = f"RuntimeError: AllGatherMoE, rank {rank}: call 2 was not carried out: PeerTimeout"
        assert at_close.startswith(broken)


def tokens_on_one_rank(rank):
    runs.begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    op._patience_ticks = as_patience(1.0)
    op._hosts._timeout_s = HOST_PATIENCE_S
    first = message_of(lambda: runs.fresh_call(op, [4, 4], told=rank == 0))
    return first, message_of(op.close)


def test_tokens_on_one_rank_only_are_told_on_both():
    given, asked = values(tokens_on_one_rank, 2)
    assert given[0].startswith("PeerTimeout: AllGatherMoE, rank 0: rank 1, or one that it waits for")
    assert given[1] == given[0]
    assert asked[0].startswith(
        "PeerTimeout: AllGatherMoE, rank 1: rank 0 did not come to eager call 1 within 3 s"
    )
    assert "Pass tokens= on all ranks or on none" in asked[0]
    assert asked[1].startswith("RuntimeError: AllGatherMoE, rank 1: call 1 was not carried out: PeerTimeout")
