"""What AllGatherMoE and MoEReduceScatter tell when ranks differ or die, and that every wait ends.

Cases marked `gpu` repeat on GPUs.
"""

import pytest
import torch
from every_operation import EXPERTS, each
from expert_runs import GIVEN_OTHERS, delay_pushes, random_choices
from operation_runs import TWO, end_of, message_of, on_ranks
from operations import ALWAYS

pytestmark = each(EXPERTS)
WAYS = pytest.mark.parametrize("options", [{}, ALWAYS], ids=["overlapped", "by collectives"])


CHOSEN = {  # by rank 1, and which of these is told
    "one behind the last": (([0, 1], [-1, 3], [2, 2], [-2, 0]), 3),
    "one that is expert 1 as int32": (((2**32 + 1, 2**32 + 1),) * 4, 2147483647),
}


@WAYS
@pytest.mark.parametrize(("chosen", "told"), CHOSEN.values(), ids=CHOSEN)
@pytest.mark.parametrize("world", [3, *TWO[1:]])
@on_ranks()
def test_an_expert_that_there_is_not_is_named_with_its_rank_on_every_rank(
    rank, runs, world, chosen, told, options
):
    runs.begin(rank)
    op = runs.open(8, 16, **options)
    wrong = torch.tensor(chosen) if rank == 1 else None
    message = end_of(op, lambda: runs.fresh_call(op, [4] * world, ids=wrong))
    wanted = f"{runs.name}, rank {rank}: rank 1 chose expert {told}, which weight does not have"
    assert message.startswith(f"ValueError: {wanted}")


WRONG = {
    "fewer": ((4, 5, 5), {}),
    "more": ((4, 8, 5), {}),
    "as many together": ((4, 5, 6), {}),
    "fewer, by collectives": ((4, 5, 5), ALWAYS),
}


@pytest.mark.parametrize(("told", "options"), WRONG.values(), ids=WRONG)
@on_ranks(3)
def test_wrong_tokens_are_reported_by_name_on_every_rank(rank, runs, told, options):
    runs.begin(rank)
    op, right = runs.open(8, 16, **options), (4, 6, 5)
    ids = random_choices(right[rank], 3, 2)
    message = message_of(lambda: runs.fresh_call(op, told if rank == 0 else right, ids=ids))
    also = ", rank 2 has 5" if told[2] != 5 else ""
    here = f"tokens={list(told)} here, but rank 1 has 6{also}. Close it"
    wanted = here if rank == 0 else GIVEN_OTHERS
    assert message.startswith(f"ValueError: {runs.name}, rank {rank}: {wanted}")
    assert message_of(op.close) == message


NEEDED_LATER = {"AllGatherMoE": ([9, 0], [9, 12]), "MoEReduceScatter": ([0, 9], [12, 9])}


@on_ranks(2)
def test_late_pushes_of_two_calls_are_told_apart(rank, runs):
    """Push late from rank 1 what no tile needs in the first call, and some do in the second."""
    with runs.opened(rank, 16, 16) as op:
        if rank == 1:
            delay_pushes(op, 1.0)
        return [runs.call_and_compare(op, tokens, 16) for tokens in NEEDED_LATER[runs.name]]
