"""elementwise_add: the bits of torch's sum, and what is said of wrong calls."""

import math
import re

import pytest
import torch
from operation_runs import DEVICE, message_of

from dist_autotune import contextual_autotune
from dist_autotune.kernels.elementwise_add import elementwise_add

SHAPES = [(1000, 20), (40, 120), (7,), (), (1, 1), (3, 5, 7), (256, 3)]


def check(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a, b = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    out = torch.full_like(a, math.nan)
    assert elementwise_add(a, b, out) is out
    assert torch.equal(out, a + b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_has_the_bits_of_torch(shape):
    check(shape, torch.float32)
    check(shape, torch.float16)


def test_an_empty_sum_and_a_new_result():
    a = torch.ones(0, 4)
    assert elementwise_add(a, a).shape == (0, 4)
    assert torch.equal(elementwise_add(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize("tunes", [True, False], ids=["tuned here", "tuned by Triton"])
def test_a_sum_in_place_is_added_once_however_often_it_is_launched(tunes, tmp_path):
    def step(a, b):
        assert elementwise_add(a, b, a) is a
        assert elementwise_add(b, a, a) is a

    for size in (40, 48):
        a, b = torch.ones(size, device=DEVICE), torch.full((size,), 2.0, device=DEVICE)
        tuned = contextual_autotune(step, cache=False, log_dir=tmp_path) if tunes else step
        for times in (1, 2):
            tuned(a, b)
            assert torch.equal(a, torch.full_like(a, 1.0 + 4.0 * times))
        assert not tunes or tuned.report.runs > 3


WRONG = {  # what is told, and of which call
    r"ValueError: b has shape \(2, 4\), a has \(4, 4\)": lambda x: elementwise_add(x, x[:2]),
    "TypeError: b is torch.float16, a is": lambda x: elementwise_add(x, x.half()),
    "TypeError: b is a int; a tensor": lambda x: elementwise_add(x, 1),
    "TypeError: a is torch.int32": lambda x: elementwise_add(x.int(), x.int()),
    r"ValueError: a has strides \(1, 4\)": lambda x: elementwise_add(x.T, x),
    "ValueError: out overlaps b": lambda x: elementwise_add(x[2], x[0], x.flatten()[1:5]),
    "ValueError: b is on meta": lambda x: elementwise_add(x, x.to("meta")),
    "RuntimeError: .* no backward, .* by a:": lambda x: elementwise_add(x.clone().requires_grad_(), x),
}


@pytest.mark.parametrize("told", WRONG)
def test_a_wrong_call_is_told_with_its_values(told):
    assert re.match(told, message_of(lambda: WRONG[told](torch.arange(16.0, device=DEVICE).view(4, 4))))


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1000, 2000), (4000, 120), (8192, 8192), (33, 264), (7, 13)], ids=str)
def test_it_has_the_bits_of_torch_on_a_gpu(shape, dtype):
    check(shape, dtype)
