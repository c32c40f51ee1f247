"""What is GemmAllReduce's own: sums without a product, bits that ways share, who decides on a way.

What it promises as other operations do is in `exchange/test_every_operation.py`.
"""

from __future__ import annotations

import pytest
import torch
from gemm_ar_runs import (
    EPS,
    REDUCING,
    call_and_compare,
    call_with_norm,
    error_ratio,
    norm_error_ratio,
    of_all,
)
from operation_runs import assert_cases, device, values
from operations import HALF, factors

from dist_autotune import contextual_autotune
from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.gemm_ar.ways import COLLECTIVE, LOW_LATENCY, ONE_SHOT, TWO_SHOT, WAYS

OURS = (ONE_SHOT, TWO_SHOT, LOW_LATENCY)  # those with candidates


def without_a_product(rank, way):
    """Add what ranks have: by a copy, and in the operation's own buffer."""
    REDUCING[None].begin(rank)
    errors, one = [], torch.eye(40, dtype=HALF, device=device())
    with GemmAllReduce(9, 40, HALF, way=way) as op:
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


def without_products(rank):
    return {way: lambda way=way: without_a_product(rank, way) for way in WAYS}


def test_what_ranks_have_is_added_without_a_product():
    assert_cases(without_products, 2)


def tuned_in_its_own_buffer(rank):
    """Tune a call whose rows are in the buffer, where a collective adds them up."""
    given, one = torch.randn(5, 40, device=device()).to(HALF), torch.eye(40, dtype=HALF, device=device())
    residual, norm_weight = of_all(5, 40, HALF, 3)
    with GemmAllReduce(9, 40, HALF, way=COLLECTIVE) as op:
        part = op.part[:5].copy_(given)

        @contextual_autotune(is_dist=True, max_runs=4, cache=False, log_dir=None)
        def layer():
            return op.all_reduce_rms_norm(part, residual, norm_weight, EPS)

        pair = layer()
        return layer.report.runs > 1, norm_error_ratio(pair, given, one, residual, norm_weight) < 1


def test_a_call_of_its_own_buffer_may_be_tuned():
    assert values(tuned_in_its_own_buffer, 2) == [(True, True)] * 2


def tuned_in_place(rank):
    """Tune a call by a collective whose result takes the place of what each rank adds."""
    given, one = torch.randn(5, 40, device=device()).to(HALF), torch.eye(40, dtype=HALF, device=device())
    part = given.clone()
    with GemmAllReduce(9, 40, HALF, way=COLLECTIVE) as op:

        @contextual_autotune(is_dist=True, max_runs=4, preserve=(part,), cache=False, log_dir=None)
        def layer():
            return op.all_reduce(part, part)

        return error_ratio(layer(), given, one) < 1


def test_a_sum_may_take_the_place_of_what_is_added():
    assert values(tuned_in_place, 2) == [True] * 2


def same_sums(rank):
    """Return whether sums with a residual have the same bits by each way of ours."""
    REDUCING[None].begin(rank)
    a, weight = factors(7, 34, 24, HALF)
    residual, norm_weight = of_all(7, 34, HALF, 1)
    sums = []
    for way in OURS:
        with GemmAllReduce(7, 34, HALF, way=way) as op:
            sums.append(op(a, weight, None, residual, norm_weight)[1])
    return all(torch.equal(each, sums[0]) for each in sums)


def test_ways_differ_in_no_bit():
    assert values(same_sums, 3) == [True] * 3


def ways_of_ranks(rank, wanted_of_call):
    """Let each rank want its own way in each call; return the ways that were taken, and the errors."""
    REDUCING[None].begin(rank)
    taken, errors = [], []
    with GemmAllReduce(9, 24, HALF) as op:
        settle = op._ways.settle

        def noted(*args, **given):
            taken.append(settle(*args, **given))
            return taken[-1]

        op._ways.settle = noted
        for wanted in wanted_of_call:
            op._choose = lambda layout, wanted=wanted: wanted[rank]
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


def test_more_columns_than_a_norm_takes_are_refused():
    def ones(*shape):
        return torch.ones(shape, dtype=HALF)

    with (
        REDUCING[None].alone(1, 32769) as op,
        pytest.raises(ValueError, match="n=32769: the norm takes up to 32768 columns"),
    ):
        op(ones(1, 1), ones(32769, 1), None, ones(1, 32769), ones(32769))
