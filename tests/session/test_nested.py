"""A tuned function inside a tuned function: it joins, or is refused with both values."""

import pytest
import torch
from kernels_for_tests import is_outside, numbers

from dist_autotune import TuningError

TENSOR = torch.zeros(1)


@pytest.mark.parametrize(
    ("inner", "outer", "told"),
    [
        ({"is_dist": True}, {}, r"is_dist=True.*is_dist=False"),
        ({"bits": "same"}, {}, r"bits='same'.*bits='any'"),
        ({"bits": "same"}, {"bits": "check"}, r"bits='same'.*bits='check'"),
        ({"preserve": [TENSOR]}, {}, r"preserve=\[Tensor\].*preserve=\[\]"),
        ({"preserve": [TENSOR]}, {"preserve": [torch.zeros(1)]}, r"preserve=\[Tensor\].*preserve=\[Tensor\]"),
        ({"objective": "thunk"}, {}, r"objective='thunk'.*objective='kernel'"),
        ({"mode": "online"}, {}, r"mode='online'.*mode='replay'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_settled", [False, True], ids=["tuning", "settled"])
def test_a_function_that_asks_for_what_the_one_around_it_does_not_do_is_refused(
    bench, inner, outer, told, is_settled
):
    within = bench.tuned({16: 3.0, 32: 1.0}, name="inner", **inner)
    calls_it = not is_settled
    around = bench.tune(lambda: calls_it and within(), name="outer", **outer)
    if is_settled:
        around()
        calls_it = True
    with pytest.raises(TuningError, match=rf"inner with {told}"):
        around()
    assert is_outside()
    assert torch.equal(within(), numbers() + 1)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ({}, {"is_dist": True, "bits": "same", "preserve": [TENSOR], "objective": "thunk"}),
        ({}, {"mode": "online"}),
        ({"bits": "check", "preserve": [TENSOR]}, {"bits": "same", "preserve": [torch.zeros(1), TENSOR]}),
        ({"preserve": [TENSOR]}, {"mode": "online"}),
        ({"is_dist": True}, {"is_dist": True}),
    ],
    ids=str,
)
def test_a_function_whose_wishes_are_met_joins(bench, inner, outer):
    within = bench.tuned({16: 3.0, 32: 1.0}, name="inner", **inner)
    around = bench.tune(within, name="outer", **outer)
    for _ in range(4):
        assert torch.equal(around(), numbers() + 1)
    assert around.settled
    assert within.report is None
