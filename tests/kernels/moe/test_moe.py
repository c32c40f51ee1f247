"""That AllGatherMoE and MoEReduceScatter are right, whatever their ranks choose and do meanwhile.

Here the ranks are CPU processes in Triton's interpreter; `test_moe_on_gpus.py` repeats it on GPUs.
"""

from __future__ import annotations

import time
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from ag_moe_runs import GATHERING
from moe_rs_runs import SCATTERING
from moe_runs import HALF, SHAPES, many_calls, three_calls, tokens_of_call, tuned_with_other_token_counts
from operation_runs import INTERPRETER, assert_cases, cases_of, delay_copies, left_as_before, values

BOTH = [GATHERING, SCATTERING]
pytestmark = [INTERPRETER, pytest.mark.parametrize("runs", BOTH, ids=lambda runs: runs.name)]


def one_candidate(rank, runs, index):
    runs.begin(rank, index)
    of_operation, of_call = runs.sizes(40, 72)
    with runs.open(40, of_operation, HALF) as op:
        runs.poison(op)
        return [runs.call_and_compare(op, tokens_of_call((40, 33), call), of_call, 3, 2) for call in range(2)]


def unequal_parts(rank, runs):
    runs.begin(rank)
    with runs.open(9, 16, HALF) as op:
        return [runs.call_and_compare(op, [9, 4], 8 + 30 * rank, 3, 2) for _ in range(2)]


def of_two_ranks(rank, runs):
    """Have the shapes by turns in each type and with each kind of choices."""
    turns = zip(SHAPES.items(), cycle((HALF, torch.bfloat16, torch.float32)), cycle(("any", "one", "same")))
    cases = {
        f"{name}, {kind}, {dtype}": lambda given=(*shape, dtype, kind): three_calls(rank, runs, *given)
        for (name, shape), dtype, kind in turns
    }
    cases["no choice at all"] = lambda: three_calls(rank, runs, (17, 6), 16, 24, 4, 3, HALF, "none")
    for index in range(len(runs.candidates)):
        cases[f"candidate {index}"] = lambda index=index: one_candidate(rank, runs, index)
    cases["late ranks"] = lambda: many_calls(rank, runs, "random")
    return cases | cases_of((unequal_parts,), rank, runs)


def test_any_shape_type_choice_and_candidate_is_right(runs):
    assert_cases(of_two_ranks, 2, runs)


def by_columns(rank, runs, index, k):
    runs.begin(rank, index)
    tokens, (of_operation, of_call) = [13, 20], runs.sizes(k, k)
    with runs.open(20, of_operation, HALF) as op:
        runs.poison(op)
        operands = runs.operands(op, tokens, of_call, 5, 3)
        given = [each.mT.contiguous().mT if each.dim() == 3 else each for each in operands]
        return [runs.error_ratio(op(*given, tokens=tokens), *operands)]


def of_columns(rank, runs):
    sizes = (64, 40, 64, 40)  # as TMA takes it, ragged
    return {
        f"candidate {index}, {k}": lambda index=index, k=k: by_columns(rank, runs, index, k)
        for index, k in enumerate(sizes)
    }


def test_weights_may_lie_by_columns(runs):
    assert_cases(of_columns, 2, runs)


def late_pushes(rank, runs):
    """Push late from rank 0: its peers' kernels are waiting for its choices and its rows by then."""
    runs.begin(rank)
    with runs.open(16, 16, torch.float32) as op:
        runs.poison(op)
        if rank == 0:
            delay_copies(op, lambda: time.sleep(0.2))
        return [runs.call_and_compare(op, [16, 9, 12], 16, 3, 2) for _ in range(2)]


def in_a_subset(rank, runs):
    runs.begin(rank)
    group = dist.new_group([0, 2])
    if rank == 1:
        return [0.0]
    with runs.open(9, 16, HALF, group) as op:
        return [runs.call_and_compare(op, [9, 4], 16, 3, 2, group=group)]


def of_more_ranks(rank, runs, world):
    tokens = (5, 12, 0, 8)[:world]
    cases = {"different candidates": lambda: three_calls(rank, runs, tokens, 16, 24, 3, 2)}
    if world == 4:
        return cases
    cases["late ranks"] = lambda: many_calls(rank, runs, "one")
    return cases | cases_of((late_pushes, in_a_subset), rank, runs)


@pytest.mark.parametrize("world", [3, 4])
def test_ranks_of_different_candidates_may_be_late_and_the_group_a_subset(runs, world):
    assert_cases(of_more_ranks, world, runs, world)


def test_one_rank_needs_no_process_group(runs):
    with left_as_before(runs.kernel):
        runs.begin(0)
        with runs.open(20, 16, HALF, backend="shm") as op:
            runs.poison(op)
            assert runs.call_and_compare(op, [20], 24, 3, 2) < 1
            assert runs.call_and_compare(op, [7], 24, 3, 2, told=True) < 1


def test_tuned_in_context_every_run_is_right_ranks_agree_and_other_token_counts_are_no_new_context(runs):
    (errors, config, taken, *settled), *others = values(tuned_with_other_token_counts, 2, runs)
    assert len(errors) == taken + 1 == len(runs.candidates) + 2
    assert max(errors) < 1
    assert settled == [True, 1]
    for other_errors, *other in others:
        assert max(other_errors) < 1
        assert other == [config, taken, *settled]
