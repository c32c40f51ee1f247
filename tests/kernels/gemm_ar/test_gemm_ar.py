"""What is GemmAllReduce's own: sums without a product, bits that ways share, who decides on a way.

What it promises as other operations do is in `exchange/test_every_operation.py`.
"""

import time

import pytest
import torch
from dense_runs import EPS, REDUCING, norm_error_ratio, of_all, reduce_error_ratio
from operation_runs import device, on_ranks
from operations import HALF, factors

from dist_autotune import contextual_autotune
from dist_autotune.kernels.exchange.mail import TICKET_BITS
from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.gemm_ar.ways import COLLECTIVE, LOW_LATENCY, ONE_SHOT, TWO_SHOT, WAYS
from ranks import meet

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
                    errors.append(reduce_error_ratio(op.all_reduce(part), given, one))
    return errors


@on_ranks(2)
def test_what_ranks_have_is_added_without_a_product(rank):
    return {way: lambda way=way: without_a_product(rank, way) for way in WAYS}


@pytest.mark.parametrize("is_sent", [False, True], ids=["sent by the exchange", "by the product"])
@on_ranks(2)
def test_a_word_that_nobody_has_sent_is_of_no_call_when_their_numbers_begin_anew(rank, is_sent):
    """Let rank 0 wait in the call whose number is 0 again, which no word was sent in before."""
    REDUCING[LOW_LATENCY].begin(rank)
    with REDUCING[LOW_LATENCY].open(8, 16) as op:
        a, weight = factors(3, 16, 16 if is_sent else 24, HALF)
        op(a, weight)  # from now on no host waits for another
        op._rows.mail.ticket.fill_((2**25 - 1) << TICKET_BITS.value)
        meet()
        if rank == 1:
            time.sleep(0.3)
        return [reduce_error_ratio(op(a, weight), a, weight)]


@on_ranks(3)
def test_ways_differ_in_no_bit(rank):
    REDUCING[None].begin(rank)
    a, weight = factors(7, 34, 24, HALF)
    residual, norm_weight = of_all(7, 34, HALF, 1)
    sums = []
    for way in OURS:
        with GemmAllReduce(7, 34, HALF, way=way) as op:
            sums.append(op(a, weight, None, residual, norm_weight)[1])
    return all(torch.equal(each, sums[0]) for each in sums)


@on_ranks(2)
def test_products_of_few_rows_are_sent_by_their_kernel_whatever_its_candidates_and_where_they_can_be(rank):
    REDUCING[None].begin(rank)
    with GemmAllReduce(20, 40, torch.bfloat16, way=LOW_LATENCY) as op:
        errors = [REDUCING[None].call_and_compare(op, [rows], 80) for rows in (3, 17)]
        errors.append(REDUCING[None].call_and_compare(op, [5], 80 if rank == 0 else 24))
        is_sent = ["send" in layout.launches for layout in op._layouts.values()]
    assert is_sent == [True] * 4 + [rank == 0] * 2  # a sum and a norm each
    return errors


WANTED = {  # by each rank in a call, and the way that is taken
    (TWO_SHOT, ONE_SHOT): ONE_SHOT,
    (TWO_SHOT, TWO_SHOT): TWO_SHOT,
    (COLLECTIVE, TWO_SHOT): TWO_SHOT,
    (COLLECTIVE, COLLECTIVE): COLLECTIVE,
}


@on_ranks(2)
def test_a_way_is_taken_by_all_ranks_or_none_and_captured_as_in_the_last_eager_call(rank):
    REDUCING[None].begin(rank)
    taken, errors = [], []
    with GemmAllReduce(17, 24, HALF) as op:
        settle = op._collective.settle
        op._collective.settle = lambda *args, **given: taken.append(settle(*args, **given)) or taken[-1]
        for wanted in WANTED:
            op._choose = lambda layout, wanted=wanted: wanted[rank]
            a, weight, *_ = REDUCING[None].operands(op, [9], 16)
            errors.append(reduce_error_ratio(op(a, weight), a, weight))
        op._is_capturing = lambda: True
        for rows in (9, 8, 17):
            a, weight, *_ = REDUCING[None].operands(op, [rows], 16)
            errors.append(reduce_error_ratio(op(a, weight), a, weight))
        op._is_capturing = lambda: False
    # 17 rows are of another class.
    assert taken == [*WANTED.values(), COLLECTIVE, COLLECTIVE, ONE_SHOT]
    return errors


@on_ranks(2)
def test_settled_calls_with_a_norm_and_without_take_ways_of_their_own_and_wait_for_nobody(rank):
    """Have both be tuned to different ways, and no host read another's ballot once they are."""
    REDUCING[None].begin(rank)
    with GemmAllReduce(17, 24, HALF) as op:
        ballots, errors = op._collective._ballots, []
        for is_settled in (False, True):
            if is_settled:
                ballots.read = lambda: pytest.fail("a host waits for its peers' ballots")
            a, weight, *of_norm = given = REDUCING[None].operands(op, [9], 16)
            op._choose = lambda layout: TWO_SHOT
            errors.append(reduce_error_ratio(op(a, weight), a, weight))
            op._choose = lambda layout: COLLECTIVE
            errors.append(norm_error_ratio(op(a, weight, None, *of_norm, EPS), *given))
        del ballots.read
    return errors


@on_ranks(2)
def test_the_way_is_tuned_once_for_a_class_of_rows(rank):
    keys, counts, weight = set(), [], torch.zeros(24, 16, dtype=HALF, device=device())
    with GemmAllReduce(17, 24, HALF) as op:
        options = {"is_dist": True, "max_runs": 4, "cache": False, "log_dir": None}
        layer = contextual_autotune(lambda a: op(a, weight), **options)
        for rows in (9, 10, 17):
            layer(torch.zeros(rows, 16, dtype=HALF, device=device()))
            keys |= {each.key for each in layer.report.contexts if each.kernel == "gemm_ar way"}
            counts.append(len(keys))
    assert counts == [1, 1, 2]


def test_more_columns_than_a_norm_takes_are_refused():
    def ones(*shape):
        return torch.ones(shape, dtype=HALF)

    with (
        REDUCING[None].alone(1, 32769) as op,
        pytest.raises(ValueError, match="n=32769: the norm takes up to 32768 columns"),
    ):
        op(ones(1, 1), ones(32769, 1), None, ones(1, 32769), ones(32769))
