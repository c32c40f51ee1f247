"""That GemmAllReduce computes the right sums and norms, with the same bits on all ranks.

Under pytest the ranks are CPU processes in Triton's interpreter; tests marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import functools
import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist
from gemm_ar_runs import (
    EPS,
    HALF,
    begin,
    call_and_compare,
    call_with_norm,
    error_ratio,
    leave_all_candidates,
    norm_error_ratio,
    of_all,
    operands,
    poison,
    replays_among_eager_calls,
)
from gpu_cases import covering_indices
from operation_runs import (
    GPU_BACKENDS,
    INTERPRETER,
    assert_cases,
    cases_of,
    device,
    left_as_before,
    tuned_in_context,
    values,
)

from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.gemm_ar.low_latency import exchange_rows
from dist_autotune.kernels.gemm_ar.pull import CANDIDATES, add_rows
from dist_autotune.kernels.gemm_ar.ways import COLLECTIVE, LOW_LATENCY, ONE_SHOT, TWO_SHOT, WAYS
from dist_autotune.kernels.symm import open_symmetric_memory

pytestmark = INTERPRETER
OURS = (ONE_SHOT, TWO_SHOT, LOW_LATENCY)  # those with candidates


SHAPES = {  # m, n, k, the most rows
    "whole tiles": (16, 64, 32, 16),
    "ragged rows, N and K": (37, 41, 24, 40),
    "one row": (1, 48, 16, 8),
    "one column": (3, 1, 16, 3),
    "fewer rows than ranks own": (2, 70, 33, 65),
    "K of one": (6, 16, 1, 6),
}


def calls(rank, m, n, k, most, dtype=HALF, candidate=None, **options):
    begin(rank, candidate)
    with GemmAllReduce(most, n, dtype, **options) as op:
        poison(op)
        return [call(op, m, k) for _ in range(2) for call in (call_and_compare, call_with_norm)]


def without_a_product(rank, **options):
    """Add what ranks have: by a copy, and in the operation's own buffer."""
    begin(rank)
    errors, one = [], torch.eye(40, dtype=HALF, device=device())
    with GemmAllReduce(9, 40, HALF, **options) as op:
        for in_place in (False, True):
            given = torch.randn(5, 40, device=device()).to(HALF)
            residual, norm_weight = of_all(5, 40, HALF, 3)
            for norm in (False, True):
                part = op.part[:5].copy_(given) if in_place else given.clone()
                if norm:
                    pair = op.all_reduce_rms_norm(part, residual, norm_weight, EPS)
                    errors.append(norm_error_ratio(pair, given, one, residual, norm_weight))
                else:
                    errors.append(error_ratio(op.all_reduce(part), given, one))
    return errors


def late_calls(rank, delays, **options):
    """Keep every result until the end; no rank waits for another between calls."""
    begin(rank)
    world, kept = dist.get_world_size(), []
    with GemmAllReduce(24, 34, HALF, **options) as op:
        poison(op)
        for call in range(6):
            m, k = (12, 7, 1, 5)[call % 4], (24, 16, 33)[call % 3]
            a, weight = operands(m, 34, k, HALF)
            if delays == "one" and rank == call % world:
                time.sleep(0.1)
            if delays == "random":
                time.sleep(random.random() / 20)
            more = of_all(m, 34, HALF, call) if call % 2 else ()
            kept.append((op(a, weight, None, *more, *([EPS] if more else [])), a, weight, *more))
        op.check()
    return [(norm_error_ratio if len(one) > 3 else error_ratio)(*one) for one in kept]


def odd_places(rank, **options):
    """Pass slices of matrices, a weight by columns, and an out beside which nothing may be written."""
    begin(rank)
    with GemmAllReduce(16, 24, HALF, **options) as op:
        a, weight = operands(9, 24, 64, HALF)
        a, weight = a[:, 3:35], weight[:, 5:37]
        wide = torch.randn(9, 50, generator=torch.Generator().manual_seed(1)).to(HALF).to(device())
        out = torch.full((9, 50), float("nan"), dtype=HALF, device=device())
        op(a, weight.T.contiguous().T, out[:, 1:25])
        errors = [error_ratio(out[:, 1:25], a, weight)]
        norm_weight = of_all(9, 24, HALF, 1)[1]
        pair = op(a, weight, out[:, 1:25], wide[:, 3:27], norm_weight, EPS)
        errors.append(norm_error_ratio(pair, a, weight, wide[:, 3:27], norm_weight))
        beside = out[:, 0].isnan().all() and out[:, 25:].isnan().all()
        return [*errors, 0.0 if beside else 9.0]


def unequal_inner_parts(rank, **options):
    begin(rank)
    with GemmAllReduce(8, 24, HALF, **options) as op:
        return [call_and_compare(op, 8, 16 + 24 * rank) for _ in range(2)]


def cases(rank, types, candidates, shape_of_candidates, **options):
    """Return calls that are right by each way, here and on GPUs; but for `candidates`, ranks' differ."""
    found = {
        f"{name}, {dtype}": lambda shape=shape, dtype=dtype: calls(rank, *shape, dtype, **options)
        for (name, shape), dtype in zip(SHAPES.items(), itertools.cycle(types))
    }
    found |= {
        f"candidate {index}": lambda index=index: calls(rank, *shape_of_candidates, HALF, index, **options)
        for index in candidates
    }
    return found | cases_of((without_a_product, odd_places, unequal_inner_parts), rank, **options)


def of_two_ranks(rank, way):
    candidates = range(2) if way in OURS else ()  # of four: two of sums and two of norms
    found = cases(rank, (HALF, torch.bfloat16, torch.float32), candidates, (21, 72, 40, 21), way=way)
    return found | {"back to back": lambda: late_calls(rank, "none", way=way)}


@pytest.mark.parametrize("way", WAYS)
def test_sums_and_norms_are_right_and_equal_on_all_ranks(way):
    assert_cases(of_two_ranks, 2, way)


def of_more_ranks(rank, way):
    delays = "one" if dist.get_world_size() == 3 else "random"
    return {
        "different candidates": lambda: calls(rank, 5, 24, 16, 7, way=way),
        "late ranks": lambda: late_calls(rank, delays, way=way),
    }


@pytest.mark.parametrize(("way", "world"), [*zip(WAYS, (3, 4, 4, 3), strict=True)])
def test_ranks_of_different_candidates_that_come_late_have_the_same_bits(way, world):
    assert_cases(of_more_ranks, world, way)


def same_sums(rank):
    """Return whether sums with a residual have the same bits by each way of ours."""
    begin(rank)
    a, weight = operands(7, 34, 24, HALF)
    residual, norm_weight = of_all(7, 34, HALF, 1)
    sums = []
    for way in OURS:
        with GemmAllReduce(7, 34, HALF, way=way) as op:
            sums.append(op(a, weight, None, residual, norm_weight)[1])
    return all(torch.equal(each, sums[0]) for each in sums)


def in_a_subset(rank):
    begin(rank)
    group = dist.new_group([0, 2])
    if rank == 1:
        return [0.0]
    with (
        GemmAllReduce(18, 16, HALF, group) as first,
        GemmAllReduce(5, 16, HALF, group, way=TWO_SHOT) as second,
    ):
        by_turns = [(op, call) for op in (first, second) for call in (call_and_compare, call_with_norm)] * 2
        return [call(op, 5, 16, group=group) for op, call in by_turns]


def test_ways_differ_in_no_bit_and_two_operations_of_a_subset_do_not_disturb_each_other():
    assert_cases(functools.partial(cases_of, (same_sums, in_a_subset)), 3)


@pytest.mark.parametrize("way", [None, *WAYS])
def test_one_rank_needs_no_process_group(way):
    with left_as_before(add_rows), left_as_before(exchange_rows):
        begin(0)
        with GemmAllReduce(20, 24, HALF, backend="shm", way=way) as op:
            assert max(call(op, 7, 16) for call in (call_and_compare, call_with_norm)) < 1


# ---- who decides


def ways_of_ranks(rank, wanted_of_call):
    """Let each rank want its own way in each call; return the ways that were taken, and the errors."""
    begin(rank)
    taken, errors = [], []
    with GemmAllReduce(9, 24, HALF) as op:
        settle = op._ways.settle

        def noted(*args, **given):
            taken.append(settle(*args, **given))
            return taken[-1]

        op._ways.settle = noted
        for wanted in wanted_of_call:
            op._ways.choose = lambda rows, key, wanted=wanted: wanted[rank]
            errors.append(call_with_norm(op, 9, 16))
        op._is_capturing = lambda: True
        errors += [call_and_compare(op, 9, 16), call_and_compare(op, 8, 16)]
        op._is_capturing = lambda: False
    return taken, errors


def test_a_way_is_taken_by_all_ranks_or_none_and_captured_as_in_the_last_eager_call():
    wanted = [(TWO_SHOT, ONE_SHOT), (TWO_SHOT, TWO_SHOT), (COLLECTIVE, TWO_SHOT), (COLLECTIVE, COLLECTIVE)]
    expected = [ONE_SHOT, TWO_SHOT, TWO_SHOT, COLLECTIVE, COLLECTIVE, ONE_SHOT]
    for taken, errors in values(ways_of_ranks, 2, wanted):
        assert taken == expected
        assert max(errors) < 1


def tuned(rank):
    begin(rank)
    leave_all_candidates()
    with GemmAllReduce(8, 40, HALF) as op:
        step, errors = tuned_in_context(lambda: max(call_and_compare(op, 8, 16), call_with_norm(op, 8, 16)))
        step()
        winners = {context.kernel: str(context.config) for context in step.report.contexts}
    return errors, winners, step.report.runs


def test_tuned_in_context_every_run_is_right_and_ranks_agree():
    (errors, winners, runs), *others = values(tuned, 2)
    assert winners.keys() == {"add_rows", "exchange_rows", "gemm_ar way"}
    assert len(errors) == runs > len(CANDIDATES)
    assert max(errors) < 1
    for other_errors, other_winners, other_runs in others:
        assert max(other_errors) < 1
        assert (other_winners, other_runs) == (winners, runs)


# ---- on GPUs


def cases_on_gpus(rank, backend):
    held = open_symmetric_memory(backend=backend)  # NVSHMEM is initialised once, not a second for each case
    found = {}
    for way in WAYS:
        options = {"backend": backend, "timeout_s": 60.0, "way": way}
        candidates = covering_indices(CANDIDATES) if way in OURS else ()
        of_way = cases(rank, (HALF, torch.bfloat16), candidates, (300, 8192, 256, 300), **options)
        for name, shape in {"large": (1998, 1024, 1024, 2000), "wide": (64, 8192, 512, 64)}.items():
            of_way[name] = lambda shape=shape, options=options: calls(rank, *shape, **options)
        of_way["late ranks"] = lambda options=options: late_calls(rank, "random", **options)
        of_way["graphs among eager calls"] = lambda way=way: replays_among_eager_calls(rank, backend, way)
        found |= {f"{name}, {way}": case for name, case in of_way.items()}
    return found | {"tuned in context": lambda: tuned(rank)[0], "closing": lambda: closed(held)}


def closed(memory):
    memory.close()
    return [0.0]


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_sums_and_norms_are_right_on_gpus(backend):
    assert_cases(cases_on_gpus, 2, backend, timeout_s=400)
