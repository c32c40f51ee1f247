"""That GemmReduceScatter computes the right sums, whatever its ranks do meanwhile.

Under pytest the ranks are CPU processes in Triton's interpreter; tests marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from gemm_rs_runs import (
    HALF,
    begin,
    call_and_compare,
    error_ratio,
    operands,
    poison,
    replays_among_eager_calls,
)
from gpu_cases import shapes_and_candidates
from operation_runs import (
    GPU_BACKENDS,
    INTERPRETER,
    assert_cases,
    cases_of,
    delay_copies,
    device,
    left_as_before,
    message_of,
    tuned_in_context,
    values,
)

from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.plain import CANDIDATES, gemm_reduce_scatter

pytestmark = INTERPRETER


SHAPES = {  # M, N, K, the most rows
    "whole tiles": (64, 64, 32, 64),
    "ragged chunks, N and K": (74, 40, 24, 74),
    "one row for each rank, one column": (2, 1, 16, 2),
    "M below m, m not divisible": (10, 70, 33, 65),
    "rows that TMA cannot address": (38, 21, 7, 40),
    "K of one": (6, 16, 1, 6),
}


def calls(rank, m, n, k, most, dtype=HALF, candidate=None, **options):
    begin(rank, candidate)
    with GemmReduceScatter(most, n, dtype, **options) as op:
        poison(op)
        return [call_and_compare(op, m, k) for _ in range(3)]


def by_columns_with_addend(rank, index, n, k):
    """Pass a transposed weight, and on rank 0 an addend; all rows and columns of tiles are ragged."""
    begin(rank, index)
    errors = []
    with GemmReduceScatter(38, n, HALF) as op:
        poison(op)
        for m in (38, 30):
            a, weight = operands(m, n, k, HALF)
            across = weight.T.contiguous().T
            addend = torch.randn(m, n, device=a.device).to(HALF) if rank == 0 else None
            wider = (a, weight) if addend is None else _with_addend(a, weight, addend)
            errors += [error_ratio(op(a, across), a, weight)]
            errors += [error_ratio(op(a, across, addend=addend), *wider)]
    return errors


def _with_addend(a, weight, addend):
    """Return operands whose product is a @ weight.T + addend."""
    ones = torch.eye(addend.shape[1], dtype=addend.dtype, device=addend.device)
    return torch.cat([a, addend], 1), torch.cat([weight, ones], 1)


def unequal_inner_parts(rank):
    begin(rank)
    with GemmReduceScatter(38, 24, HALF) as op:
        return [call_and_compare(op, 38, 16 + 24 * rank) for _ in range(2)]


def late_calls(rank, delays):
    """Keep every result until the end; no rank waits for another between calls."""
    begin(rank)
    world, kept = dist.get_world_size(), []
    with GemmReduceScatter(24 * world, 33, HALF) as op:
        poison(op)
        for call in range(6):
            m, k = (12, 7, 24, 5)[call % 4] * world, (24, 16, 33)[call % 3]
            a, weight = operands(m, 33, k, HALF)
            if delays == "one" and rank == call % world:
                time.sleep(0.1)
            if delays == "random":
                time.sleep(random.random() / 20)
            kept.append((op(a, weight), a, weight))
        op.check()
    return [error_ratio(*one) for one in kept]


def late_pushes(rank):
    """Push late from rank 0: its peers' kernels are waiting for its sums by then."""
    begin(rank)
    with GemmReduceScatter(48, 16, torch.float32) as op:
        poison(op)
        if rank == 0:
            delay_copies(op, lambda: time.sleep(0.2))
        return [call_and_compare(op, 48, 16) for _ in range(2)]


def two_operations(rank):
    begin(rank)
    errors = []
    with GemmReduceScatter(32, 24, HALF) as first, GemmReduceScatter(80, 40, torch.bfloat16) as second:
        for _ in range(2):
            errors += [call_and_compare(first, 32, 16), call_and_compare(second, 66, 24)]
            errors.append(call_and_compare(second, 4, 8))
    return errors


def strided_operands(rank):
    begin(rank)
    with GemmReduceScatter(32, 24, HALF) as op:
        a, weight = operands(32, 24, 64, HALF)
        a, weight = a[:, 3:35], weight[:, 5:37]  # rows that begin at odd addresses
        out = torch.full((32 // dist.get_world_size(), 50), float("nan"), dtype=HALF, device=device())
        op(a, weight, out[:, 1:25])
        beside = out[:, 0].isnan().all() and out[:, 25:].isnan().all()
        return [error_ratio(out[:, 1:25], a, weight), 0.0 if beside else 9.0]


def of_two_ranks(rank):
    cases = {name: lambda shape=shape: calls(rank, *shape) for name, shape in SHAPES.items()}
    for dtype in (torch.bfloat16, torch.float32):
        cases[str(dtype)] = lambda dtype=dtype: calls(rank, 74, 40, 48, 80, dtype)
    for index in range(len(CANDIDATES)):
        cases[f"candidate {index}"] = lambda index=index: calls(rank, 68, 72, 40, 140, candidate=index)
    cases["back to back"] = lambda: late_calls(rank, "none")
    return cases | cases_of((unequal_inner_parts, two_operations, strided_operands), rank)


def test_sums_of_any_shape_type_and_candidate_are_right_and_nothing_beside_them_is_written():
    assert_cases(of_two_ranks, 2)


def by_columns(rank):
    places = [(40, 24), (21, 33), (1, 24), (24, 1)]
    return {
        f"candidate {index}": lambda index=index, place=place: by_columns_with_addend(rank, index, *place)
        for index, place in enumerate(places)
    } | {f"{place}": lambda place=place: by_columns_with_addend(rank, None, *place) for place in places}


def test_a_weight_may_lie_by_columns_and_a_rank_may_add_something():
    assert_cases(by_columns, 2)


def in_a_subset(rank):
    begin(rank)
    group = dist.new_group([0, 2])
    if rank == 1:
        return [0.0]
    with GemmReduceScatter(18, 16, HALF, group) as op:
        return [call_and_compare(op, 18, 16, group=group)]


def of_more_ranks(rank, world):
    if world == 4:
        return {"late ranks": lambda: late_calls(rank, "random")}
    cases = {"different candidates": lambda: calls(rank, 57, 24, 16, 60)}
    cases["late ranks"] = lambda: late_calls(rank, "one")
    return cases | cases_of((late_pushes, in_a_subset), rank)


@pytest.mark.parametrize("world", [3, 4])
def test_ranks_of_different_candidates_may_be_late_and_the_group_a_subset(world):
    assert_cases(of_more_ranks, world, world)


def wrong_addends(rank):
    begin(rank)
    with GemmReduceScatter(16, 8, HALF) as op:
        a, weight = operands(16, 8, 4, HALF)
        short, across = torch.zeros(8, 8, dtype=HALF), torch.zeros(8, 16, dtype=HALF).T
        texts = [message_of(lambda given=given: op(a, weight, addend=given)) for given in (short, across)]
        texts.append(message_of(lambda: op(a, torch.zeros(8, 8, dtype=HALF)[:, ::2])))
        return texts, op(a, weight).shape == (8, 8)


def test_a_wrong_addend_or_layout_raises_with_values_and_the_next_call_works():
    for texts, went_on in values(wrong_addends, 2):
        assert texts == [
            "ValueError: addend has shape [8, 8] and strides (8, 1); it must be contiguous and [16, 8]",
            "ValueError: the rows of addend are not contiguous (strides (1, 16)); call .contiguous()",
            "ValueError: neither the rows nor the columns of weight are contiguous (strides (8, 2)); call "
            ".contiguous()",
        ]
        assert went_on


def test_one_rank_needs_no_process_group():
    with left_as_before(gemm_reduce_scatter):
        begin(0)
        with GemmReduceScatter(20, 24, HALF, backend="shm") as op:
            poison(op)
            assert call_and_compare(op, 20, 16) < 1


def outside_any_tuner(rank):
    begin(rank)
    gemm_reduce_scatter.configs, runs = CANDIDATES, []
    gemm_reduce_scatter.fn.add_pre_run_hook(lambda *args, **kwargs: runs.append(1))
    with GemmReduceScatter(128, 48, HALF) as op:
        poison(op)
        errors = [call_and_compare(op, m, 32) for m in (128, 96, 128)]
    return errors, len(runs)


@pytest.mark.filterwarnings("ignore:GemmReduceScatter .* has not been tuned")  # it has not
def test_outside_a_tuned_function_a_call_is_one_launch_of_the_first_candidate():
    for errors, runs in values(outside_any_tuner, 2):
        assert max(errors) < 1
        assert runs == 3


def tuned(rank):
    begin(rank)
    gemm_reduce_scatter.configs = CANDIDATES
    with GemmReduceScatter(128, 48, HALF) as op:
        step, errors = tuned_in_context(lambda: call_and_compare(op, 128, 32))
        step()
        winners = {context.kernel: str(context.config) for context in step.report.contexts}
    return errors, winners, step.report.runs


def test_tuned_in_context_every_run_is_right_and_ranks_agree():
    (errors, winners, runs), *others = values(tuned, 2)
    assert winners.keys() == {"gemm_reduce_scatter", "gemm_rs way"}
    assert len(errors) == runs > len(CANDIDATES)
    assert max(errors) < 1
    for other_errors, other_winners, other_runs in others:
        assert max(other_errors) < 1
        assert (other_winners, other_runs) == (winners, runs)


# ---- on GPUs


def cases_on_gpus(rank, backend):
    options = {"backend": backend, "timeout_s": 60.0}
    cases = shapes_and_candidates(
        rank,
        {**SHAPES, "large": (1998, 1024, 1024, 2000)},
        lambda shape, dtype: calls(rank, *shape, dtype, **options),
        CANDIDATES,
        lambda index: calls(rank, 334, 520, 256, 1000, candidate=index, body="plain", **options),
    )
    cases["a launch for each chunk"] = lambda: calls(rank, 2304, 1024, 512, 2400, **options)
    cases["outside any tuner"] = lambda: outside_any_tuner(rank)[0]
    cases["late ranks"] = lambda: late_calls(rank, "random")
    cases["graphs among eager calls"] = lambda: replays_among_eager_calls(rank, backend)
    cases["tuned in context"] = lambda: tuned(rank)[0]
    return cases


@pytest.mark.gpu(devices=2, seconds=60)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_sums_are_right_on_gpus(backend):
    assert_cases(cases_on_gpus, 2, backend, timeout_s=240)
