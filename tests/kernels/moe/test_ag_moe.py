"""What AllGatherMoE tells when ranks differ or die.

What it promises as MoEReduceScatter does is in `test_moe_failures.py`.
"""

from __future__ import annotations

import os
import signal

from ag_moe_runs import GATHERING as runs
from operation_runs import (
    ends,
    message_of,
    results,
    values,
)
from operations import HALF

from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed, meet

HOST_PATIENCE_S = 3.0  # where a host waits for one that does not come, and for others that do


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
