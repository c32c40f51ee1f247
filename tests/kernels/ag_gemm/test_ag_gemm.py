"""What is AllGatherGemm's own: shards in place, a weight by columns, calls outside of a tuner.

What it promises as other operations do is in `exchange/test_every_operation.py`.
"""

from __future__ import annotations

import itertools

import pytest
from ag_gemm_runs import begin, call_and_compare, error_ratio, gathered_by_torch, poison
from operation_runs import assert_cases, cases_of
from operations import HALF, factors

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm


def outside_any_tuner(rank):
    begin(rank)
    all_gather_gemm.configs = CANDIDATES
    with AllGatherGemm(37, 48, HALF) as op:
        poison(op)
        errors = [call_and_compare(op, 37, 40) for _ in range(2)]
    return [*errors, 0.0 if len(all_gather_gemm.configs_timings) > 1 else 9.0]


def by_columns_of_torchs_product(rank):
    begin(rank, 0)
    errors = []
    with AllGatherGemm(37, 24, HALF, consumer="matmul") as op:
        poison(op)
        for m, n in ((37, 40), (20, 21), (37, 1)):
            a_shard, weight = factors(m, n, 24, HALF)
            across = weight.T.contiguous().T
            errors.append(error_ratio(op(a_shard, across), gathered_by_torch(a_shard), weight))
    return errors


def copies_of_a_shard_in_place(rank):
    """Return whether a call whose shard lies elsewhere makes one copy more, of 16 rows and of 3."""
    begin(rank)
    with AllGatherGemm(16, 32, HALF) as op:
        versions = [op.shard._version]  # counts the writes to the gather buffer
        for m in (16, 3):
            a_shard, weight = factors(m, 8, 32, HALF)
            op(op.shard[:m], weight)
            versions.append(op.shard._version)
            op(a_shard, weight)
            versions.append(op.shard._version)
        writes = [after - before for before, after in itertools.pairwise(versions)]
        more = [copied - of_itself for of_itself, copied in zip(writes[::2], writes[1::2], strict=True)]
        return more == [1, 1]


OWN = (outside_any_tuner, by_columns_of_torchs_product, copies_of_a_shard_in_place)


def cases(rank):
    return cases_of(OWN, rank)


@pytest.mark.filterwarnings("ignore:AllGatherGemm .* has not been tuned")  # it has not
def test_calls_in_place_of_columns_and_outside_of_a_tuner_are_right():
    assert_cases(cases, 2)
