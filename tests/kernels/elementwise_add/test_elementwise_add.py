"""elementwise_add: the bits of torch's sum; the warp-specialised source in the model of a GPU."""

from __future__ import annotations

import math
import os
from typing import Any

import gluon_model
import numpy as np
import pytest
import torch
from gluon_model import Descriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_autotune.kernels.elementwise_add import VARIANTS, elementwise_add
from dist_autotune.kernels.elementwise_add.operation import as_rows

DEVICE = "cuda" if os.environ.get("DIST_AUTOTUNE_TEST_GPU") == "1" else "cpu"
# Triton 3.6 turns one-element arrays into loop bounds the way NumPy 1.25 deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
SHAPES = [(1000, 20), (40, 120), (7,), (), (1, 1), (3, 5, 7), (256, 3)]


def check(shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> None:
    a, b = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    out = torch.full_like(a, math.nan)
    assert elementwise_add(a, b, out, **options) is out
    assert torch.equal(out, a + b)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_has_the_bits_of_torch(shape, variant):
    check(shape, torch.float32, variant=variant)
    check(shape, torch.float16, variant=variant)


def test_an_empty_sum_and_a_new_result():
    a = torch.ones(0, 4)
    assert elementwise_add(a, a).shape == (0, 4)
    assert torch.equal(elementwise_add(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        pytest.param(
            lambda x: elementwise_add(x, x[:2]),
            ValueError,
            r"b has shape \(2, 4\), a has \(4, 4\)",
            id="shape",
        ),
        pytest.param(
            lambda x: elementwise_add(x, x.half()), TypeError, "b is torch.float16, a is", id="types"
        ),
        pytest.param(lambda x: elementwise_add(x.int(), x.int()), TypeError, "a is torch.int32", id="type"),
        pytest.param(lambda x: elementwise_add(x.T, x), ValueError, r"a has strides \(1, 4\)", id="strides"),
        pytest.param(lambda x: elementwise_add(x, x.to("meta")), ValueError, "b is on meta", id="device"),
        pytest.param(
            lambda x: elementwise_add(x, x, variant="fast"), ValueError, "no variant 'fast'", id="variant"
        ),
    ],
)
def test_a_wrong_call_is_told_with_its_values(call, kind, text):
    with pytest.raises(kind, match=text):
        call(torch.arange(16.0, device=DEVICE).view(4, 4))


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((1000, 2000), 1000), ((4000, 120), 1875), ((7, 12), 7)],
    ids=str,
)
def test_contiguous_memory_is_rows_for_tma(shape, rows):
    matrix = as_rows(torch.zeros(shape))
    assert matrix is not None
    assert matrix.rows == rows
    assert matrix.rows * matrix.columns == math.prod(shape)


def test_rows_that_tma_cannot_address_are_left_to_the_other_kernel():
    assert as_rows(torch.zeros(7, 13)) is None
    assert as_rows(torch.zeros(1025)[1:]) is None
    assert as_rows(torch.zeros(())) is None


# ---- the warp-specialised source, on the CPU


SOURCE = gluon_model.load_kernel_module("elementwise_add.specialized")


@settings(max_examples=40)
@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 30),
    programs=st.integers(1, 3),
    buffers=st.integers(1, 4),
    out_buffers=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_loading_adding_and_storing_end_with_the_sum(rows, columns, programs, buffers, out_buffers, seed):
    run_in_the_model(rows, columns, programs, buffers, out_buffers, seed)


def run_in_the_model(rows, columns, programs, buffers, out_buffers, seed):
    numbers = np.random.default_rng(seed)
    a, b = (Descriptor(numbers.standard_normal((rows, columns)), [2, 4]) for _ in range(2))
    out = Descriptor(np.full((rows, columns), np.nan), [2, 4])
    gluon_model.launch(
        SOURCE.warp_specialized_add,
        programs,
        a,
        b,
        out,
        rows,
        columns,
        seed=seed,
        DTYPE="",
        ROWS=2,
        COLUMNS=4,
        BUFFERS=buffers,
        OUT_BUFFERS=out_buffers,
    )
    np.testing.assert_array_equal(out.array, a.array + b.array)
    assert (out.writes == 1).all()


def test_the_model_finds_a_missing_fence(monkeypatch):
    monkeypatch.setattr(SOURCE, "fence_async_shared", lambda: None)
    with pytest.raises(AssertionError, match="proxy fence"):
        run_in_the_model(20, 20, 1, 2, 2, 0)


def test_the_model_finds_a_wrong_parity(monkeypatch):
    monkeypatch.setattr(SOURCE, "ring_phase", lambda step, size: 0)
    with pytest.raises(AssertionError):
        run_in_the_model(20, 20, 1, 2, 2, 0)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1000, 2000), (4000, 120), (8192, 8192), (33, 264), (5, 16)], ids=str)
def test_both_variants_have_the_bits_of_torch_on_a_gpu(shape, dtype):
    check(shape, dtype, variant="pipelined")
    check(shape, dtype, variant="warp_specialized")


@pytest.mark.gpu
def test_what_tma_cannot_address_is_added_all_the_same_on_a_gpu():
    check((7, 13), torch.float16)
    with pytest.raises(ValueError, match="TMA cannot address"):
        check((7, 13), torch.float16, variant="warp_specialized")
