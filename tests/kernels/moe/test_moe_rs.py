"""What is MoEReduceScatter's own: equal bits, programs that wait for each other, rows that do not fit.

What it promises as AllGatherMoE does is in `test_moe_failures.py`.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from forked_programs import forked_programs, share_errors
from moe_rs_runs import SCATTERING as runs
from moe_rs_runs import same_call_twice
from operation_runs import (
    assert_right,
    message_of,
    values,
)
from operations import HALF, rows_of_call

from dist_autotune.kernels.moe_rs import MoEReduceScatter
from dist_autotune.kernels.signals import as_patience


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
            return [runs.call_and_compare(op, rows_of_call(tokens, call), 24, 3, 2) for call in range(3)]


@pytest.mark.parametrize(("world", "programs"), [(1, 3), (2, 3)])
def test_programs_of_a_launch_that_wait_for_each_other_are_right(world, programs):
    assert_right(values(several_programs, world, programs))


def test_bits_repeat():
    assert values(same_call_twice, 2) == [True, True]


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
