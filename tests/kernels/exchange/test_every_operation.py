"""That each operation computes the right numbers, whatever its ranks choose and do meanwhile.

Here the ranks are CPU processes in Triton's interpreter. What is an operation's own is in its folder.
"""

from itertools import cycle

import pytest
import torch
from dense_runs import GatheringByMail, ScatteringSums
from every_operation import EVERY, OF_ONE_WAY, WAYS, WITH_COLLECTIVES, each
from expert_runs import Scattering
from operation_runs import cases_of, on_ranks, values
from operations import (
    HALF,
    SHAPES,
    by_columns,
    in_a_subset,
    in_odd_places,
    late_pushes,
    many_calls,
    one_candidate,
    three_calls,
    tuned_with_other_row_counts,
    two_operations,
    unequal_inner_parts,
)


@each(WITH_COLLECTIVES | OF_ONE_WAY)
@on_ranks(2)
def test_any_shape_type_layout_choice_and_candidate_is_right_and_nothing_beside_it_is_written(rank, runs):
    turns = zip(
        runs.shapes.items(), cycle((HALF, torch.bfloat16, torch.float32)), cycle(("any", "one", "same"))
    )
    cases = {
        f"{name}, {kind}, {dtype}": lambda given=(*shape, dtype, kind): three_calls(rank, runs, *given)
        for (name, shape), dtype, kind in turns
    }
    if runs.shapes is SHAPES:
        cases["no choice at all"] = lambda: three_calls(rank, runs, (17, 6), 16, 24, 4, 3, HALF, "none")
    cases["K of one"] = lambda: three_calls(rank, runs, (6, 3), 1, 16, 3, 2)
    for index in range(len(runs.candidates))[: runs.most_choices]:
        cases[f"candidate {index}"] = lambda index=index: one_candidate(rank, runs, index)
    return cases | cases_of((unequal_inner_parts, two_operations, in_odd_places), rank, runs)


@each({name: runs for name, runs in EVERY.items() if name != "GemmReduceScatter"})  # see its own tests
@on_ranks(2)
def test_a_weight_may_lie_by_columns(rank, runs):
    sizes = enumerate((64, 40, 64, 40)[: runs.most_choices])  # as TMA takes it, ragged
    return {
        f"candidate {index}, {k}": lambda index=index, k=k: by_columns(rank, runs, index, k)
        for index, k in sizes
    }


OF_WORLDS = {
    f"{name}, {world} ranks": (runs, world)
    for (name, runs), world in zip((WITH_COLLECTIVES | OF_ONE_WAY).items(), cycle((4, 3)))
}


@pytest.mark.parametrize(("runs", "world"), OF_WORLDS.values(), ids=OF_WORLDS)
@on_ranks()
def test_ranks_of_different_candidates_may_be_late_and_the_group_a_subset(rank, runs, world):
    late = {"late ranks": lambda: many_calls(rank, runs, "random" if world == 4 else "one")}
    return late | cases_of((late_pushes, in_a_subset), rank, runs)


@pytest.mark.parametrize(("runs", "options"), WAYS.values(), ids=WAYS)
def test_one_rank_needs_no_process_group(runs, options):
    with runs.alone(20, 16, **options) as op:
        runs.poison(op)
        for rows, told in (([20], False), ([7], True)):
            assert runs.call_and_compare(op, rows, 24, told=told) < 1


TUNED = {
    "AllGatherGemm": {"all_gather_gemm", *(f"ag_gemm {choice}" for choice in ("way", "pieces", "programs"))},
    "GemmReduceScatter": {"gemm_reduce_scatter", "gemm_rs way"},
    "GemmAllReduce": {"add_rows", "exchange_rows", "multiply_and_send", "gemm_ar way"},
    "AllGatherMoE": {"all_gather_moe", "ag_moe way"},
    "MoEReduceScatter": {"moe_reduce_scatter", "moe_rs way"},
}
EVERY_WAY = "AllGatherGemm, every way"
TUNED[EVERY_WAY] = {*TUNED["AllGatherGemm"], "exchange_shards"}
EVERY_LAUNCH = "GemmReduceScatter, every launch"
TUNED[EVERY_LAUNCH] = {*TUNED["GemmReduceScatter"], "gemm_rs launches"}
OF_SUMS = "MoEReduceScatter, pushed or stored"
TUNED[OF_SUMS] = {*TUNED["MoEReduceScatter"], "moe_rs sums"}
RUNS = EVERY | {
    EVERY_WAY: GatheringByMail(low_latency=None),
    EVERY_LAUNCH: ScatteringSums(by_stores=None),
    OF_SUMS: Scattering(by_stores=None),
}


@pytest.mark.parametrize("name", TUNED)
def test_tuned_in_context_every_run_is_right_ranks_agree_and_other_row_counts_are_no_new_context(name):
    runs = RUNS[name]
    rows = (8, 6) if runs.name == "GemmAllReduce" else (40, 31)  # few enough for each way
    (errors, winners, taken, is_settled), *others = values(tuned_with_other_row_counts, 2, runs, rows)
    assert winners.keys() == TUNED[name]
    assert len(errors) == taken + 1 > len(runs.candidates)
    assert max(errors) < 1
    assert is_settled
    for other_errors, *other in others:
        assert max(other_errors) < 1
        assert other == [winners, taken, is_settled]
