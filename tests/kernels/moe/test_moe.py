"""That AllGatherMoE and MoEReduceScatter are right, whatever their ranks choose and do meanwhile.

Here the ranks are CPU processes in Triton's interpreter; `test_moe_on_gpus.py` repeats it on GPUs.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ag_moe_runs import GATHERING
from moe_rs_runs import SCATTERING
from moe_runs import HALF, SHAPES, many_calls, three_calls, tokens_of_call, tuned_with_other_token_counts
from operation_runs import INTERPRETER, assert_right, delay_copies, left_as_before, values

BOTH = [GATHERING, SCATTERING]
pytestmark = [INTERPRETER, pytest.mark.parametrize("runs", BOTH, ids=lambda runs: runs.name)]


@pytest.mark.parametrize(("tokens", "k", "n", "experts", "topk"), SHAPES.values(), ids=SHAPES)
def test_any_shape_is_right(runs, tokens, k, n, experts, topk):
    assert_right(values(three_calls, 2, runs, tokens, k, n, experts, topk))


@pytest.mark.parametrize("kind", ["one", "same", "none"])
def test_any_choices_are_right(runs, kind):
    assert_right(values(three_calls, 2, runs, (17, 6), 16, 24, 4, 3, HALF, kind))


@pytest.mark.parametrize("tokens", [(5, 12, 0, 8)], ids=len)
def test_more_ranks_are_right_too(runs, tokens):
    assert_right(values(three_calls, len(tokens), runs, tokens, 16, 24, 3, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_types_are_right(runs, dtype):
    assert_right(values(three_calls, 2, runs, (13, 20), 48, 24, 3, 2, dtype))


def one_candidate(rank, runs, index_of_rank):
    runs.begin(rank, index_of_rank[rank])
    of_operation, of_call = runs.sizes(40, 72)
    with runs.open(40, of_operation, HALF) as op:
        runs.poison(op)
        tokens = [(40, 33, 5, 12)[p] for p in range(op.world_size)]
        return [runs.call_and_compare(op, tokens_of_call(tokens, call), of_call, 3, 2) for call in range(2)]


@pytest.mark.parametrize("index", range(max(len(runs.candidates) for runs in BOTH)))
def test_every_candidate_is_right(runs, index):
    assert_right(values(one_candidate, 2, runs, [index] * 2))


def by_columns(rank, runs, index, k):
    runs.begin(rank, index)
    tokens, (of_operation, of_call) = [13, 20], runs.sizes(k, k)
    with runs.open(20, of_operation, HALF) as op:
        runs.poison(op)
        operands = runs.operands(op, tokens, of_call, 5, 3)
        given = [each.mT.contiguous().mT if each.dim() == 3 else each for each in operands]
        return [runs.error_ratio(op(*given, tokens=tokens), *operands)]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("k", [64, 40], ids=["as TMA takes it", "ragged"])
def test_weights_may_lie_by_columns(runs, index, k):
    assert_right(values(by_columns, 2, runs, index, k))


def test_ranks_may_run_different_candidates_in_one_call(runs):
    assert_right(values(one_candidate, 4, runs, range(4)))


def unequal_parts(rank, runs):
    runs.begin(rank)
    with runs.open(9, 16, HALF) as op:
        return [runs.call_and_compare(op, [9, 4], 8 + 30 * rank, 3, 2) for _ in range(2)]


def test_ranks_may_hold_unequal_parts_of_the_experts(runs):
    assert_right(values(unequal_parts, 2, runs))


@pytest.mark.parametrize(("delays", "world"), [("one", 3), ("random", 2)])
def test_calls_back_to_back_are_right_when_ranks_are_late(runs, delays, world):
    assert_right(values(many_calls, world, runs, delays))


def late_pushes(rank, runs):
    """Push late from rank 0: its peers' kernels are waiting for its choices and its rows by then."""
    runs.begin(rank)
    with runs.open(16, 16, torch.float32) as op:
        runs.poison(op)
        if rank == 0:
            delay_copies(op, lambda: time.sleep(0.2))
        return [runs.call_and_compare(op, [16, 9, 12], 16, 3, 2) for _ in range(2)]


def test_the_kernels_wait_for_what_comes_late(runs):
    assert_right(values(late_pushes, 3, runs))


def in_a_subset(rank, runs):
    runs.begin(rank)
    group = dist.new_group([0, 2])
    if rank == 1:
        return [0.0]
    with runs.open(9, 16, HALF, group) as op:
        return [runs.call_and_compare(op, [9, 4], 16, 3, 2, group=group)]


def test_the_group_may_be_a_subset(runs):
    assert_right(values(in_a_subset, 3, runs))


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
