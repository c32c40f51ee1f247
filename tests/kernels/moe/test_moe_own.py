"""What AllGatherMoE and MoEReduceScatter each have of their own: hosts that wait, bits, programs that wait.

What both promise is in `test_moe_failures.py`.
"""

import pytest
from expert_runs import GATHERING, SCATTERING, Scattering, routed_layers, same_call_twice
from operation_runs import end_of, message_of, on_ranks
from operations import ALWAYS, HALF

from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.moe_rs import MoEReduceScatter

# ---- AllGatherMoE


@on_ranks(2)
def test_different_numbers_of_choices_raise_on_every_rank(rank):
    GATHERING.begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    message = end_of(op, lambda: GATHERING.fresh_call(op, [4, 4], told=False, topk=2 + rank))
    told = f"rank {1 - rank} has {3 - rank} choices a token, not as many"
    assert message.startswith(f"ValueError: AllGatherMoE, rank {rank}: {told}")


@pytest.mark.parametrize("options", [{}, ALWAYS], ids=["overlapped", "by collectives"])
@on_ranks(2, timeout_s=30.0)
def test_tokens_on_one_rank_only_fail_that_call_on_both(rank, options):
    GATHERING.begin(rank)
    with AllGatherMoE(8, 16, HALF, **options) as op:
        told = message_of(lambda: GATHERING.fresh_call(op, [4, 4], told=rank == 0))
        assert "ranks [0] were given tokens= or a routing, rank 1 was not. Pass tokens= on all" in told
        GATHERING.fresh_call(op, [4, 4])


# ---- MoEReduceScatter


@on_ranks(2)
def test_bits_repeat(rank):
    return same_call_twice(rank)


@on_ranks(3)
def test_kernels_of_some_ranks_may_store_sums_where_others_push_them(rank):
    runs = Scattering(by_stores=rank != 1)
    with runs.opened(rank, 17, 16) as op:
        errors = [runs.call_and_compare(op, tokens, 16) for tokens in ([9, 0, 16], [4, 17, 5], [0, 7, 3])]
    return errors + routed_layers(rank, (5, 0, 9), "any", scattering=runs)


@on_ranks(2)
def test_rows_that_do_not_fit_the_tokens_of_all_ranks_fail_that_call_on_both(rank):
    """Let rank 1 find, when the hosts have told each other their numbers, that its y has not as many rows."""
    SCATTERING.begin(rank)
    op = MoEReduceScatter(8, 16, HALF)
    told = message_of(lambda: SCATTERING.fresh_call(op, [4, 4], told=False, rows=(None, 14)[rank]))
    wrong = "ValueError: y has 14 rows; tokens [4, 4] of the ranks with topk=2 are 16 rows"
    assert told == wrong if rank == 1 else wrong in told
    SCATTERING.fresh_call(op, [4, 4], told=False)
    op.close()
