"""What AllGatherMoE and MoEReduceScatter each have of their own: hosts that wait, bits, programs that wait.

What both promise is in `test_moe_failures.py`.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist
from ag_moe_runs import GATHERING
from forked_programs import forked_programs, share_errors
from moe_rs_runs import SCATTERING, same_call_twice
from operation_runs import assert_right, ends, message_of, results, values
from operations import HALF, rows_of_call

from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.moe_rs import MoEReduceScatter
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed, meet

HOST_PATIENCE_S = 3.0  # where a host waits for one that does not come, and for others that do


# ---- AllGatherMoE


def different_topk(rank):
    GATHERING.begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    return ends(op, lambda: GATHERING.fresh_call(op, [4, 4], told=False, topk=2 + rank))


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
    GATHERING.begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    GATHERING.fresh_call(op, [4, 4, 4])
    op.check()
    meet()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    op._hosts._timeout_s = HOST_PATIENCE_S
    return message_of(lambda: GATHERING.fresh_call(op, [4, 4, 4], told=False)), message_of(op.close)


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
    GATHERING.begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    op._patience_ticks = as_patience(1.0)
    op._hosts._timeout_s = HOST_PATIENCE_S
    first = message_of(lambda: GATHERING.fresh_call(op, [4, 4], told=rank == 0))
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


# ---- MoEReduceScatter


def several_programs(rank, programs):
    SCATTERING.begin(rank)
    world = dist.get_world_size() if dist.is_initialized() else 1
    tokens = [(33, 20, 0)[p] for p in range(world)]
    with MoEReduceScatter(40, 40, HALF, timeout_s=60.0) as op:
        SCATTERING.poison(op)
        share_errors(op)
        op._sms = 1  # a grid of one program, each launch of which becomes several
        mapped = [op._staged.local, op._flags.local, op._weights.local, op._ids.local]
        with forked_programs(SCATTERING.kernel, programs, mapped):
            return [
                SCATTERING.call_and_compare(op, rows_of_call(tokens, call), 24, 3, 2) for call in range(3)
            ]


@pytest.mark.parametrize(("world", "programs"), [(1, 3), (2, 3)])
def test_programs_of_a_launch_that_wait_for_each_other_are_right(world, programs):
    assert_right(values(several_programs, world, programs))


def test_bits_repeat():
    assert values(same_call_twice, 2) == [True, True]


def wrong_rows(rank):
    """Let rank 1 find, when the hosts have told each other their numbers, that its y has not as many rows."""
    SCATTERING.begin(rank)
    op = MoEReduceScatter(8, 16, HALF)
    op._patience_ticks = as_patience(1.0)
    first = message_of(lambda: SCATTERING.fresh_call(op, [4, 4], told=False, rows=14 if rank == 1 else None))
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
