"""What is GemmReduceScatter's own: addends, rows that the ranks share out, one launch outside of a tuner.

What it promises as other operations do is in `exchange/test_every_operation.py`.
"""

from __future__ import annotations

import pytest
import torch
from gemm_rs_runs import begin, call_and_compare, error_ratio, operands, poison
from operation_runs import assert_cases, message_of, values
from operations import HALF

from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.plain import CANDIDATES, gemm_reduce_scatter


def by_columns_with_addend(rank, index, n, k, collective):
    """Pass a transposed weight, and on rank 0 an addend; all rows and columns of tiles are ragged."""
    begin(rank, index)
    errors = []
    with GemmReduceScatter(65, n, HALF, collective=collective) as op:  # more rows than the ranks can share
        poison(op)
        for m in (38, 30):
            a, weight = operands(m, n, k, HALF)
            across = weight.T.contiguous().T
            addend = torch.randn(m, n, device=a.device).to(HALF) if rank == 0 or collective else None
            wider = (a, weight) if addend is None else _with_addend(a, weight, addend)
            errors += [error_ratio(op(a, across), a, weight)]
            errors += [error_ratio(op(a, across, addend=addend), *wider)]
    return errors


def _with_addend(a, weight, addend):
    """Return operands whose product is a @ weight.T + addend."""
    ones = torch.eye(addend.shape[1], dtype=addend.dtype, device=addend.device)
    return torch.cat([a, addend], 1), torch.cat([weight, ones], 1)


def by_columns(rank):
    places = [(40, 24), (21, 33), (1, 24), (24, 1)]
    cases = [(index, *place, False) for index, place in enumerate(places)]
    cases += [(None, *place, False) for place in places] + [(None, 21, 33, True)]
    return {f"{case}": lambda case=case: by_columns_with_addend(rank, *case) for case in cases}


def test_a_weight_may_lie_by_columns_and_a_rank_may_add_something():
    assert_cases(by_columns, 2)


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


def rows_that_do_not_divide(rank):
    with GemmReduceScatter(12, 8, HALF) as op:
        message = message_of(lambda: op(*operands(7, 8, 16, HALF)))
        return message, call_and_compare(op, 9, 16)


def test_rows_that_the_ranks_cannot_share_are_refused_on_every_rank():
    for message, error in values(rows_that_do_not_divide, 3):
        assert message == "ValueError: a has 7 rows, which 3 ranks cannot share evenly; pad it to 9"
        assert error < 1


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
