"""`persistent_matmul` in fp8 with scales: the plain body, and every candidate on a GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from epilogue_runs import quantized
from gemm_runs import check_with, fitting, poisoned
from gpu_cases import covering
from operation_runs import DEVICE

from dist_autotune.kernels.epilogues import Epilogue
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.gemm.operation import OUT_DTYPES
from dist_autotune.kernels.persistent_gemm import persistent_matmul
from dist_autotune.kernels.tensors import check_fp8

FP8 = torch.float8_e4m3fn
LARGEST = 4  # so that sums that are not scaled are no infinite halves


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a [m, k], b [k, n] and their scales [m, 1] and [1, n]."""
    (a, scale_a), (weight, scale_weight) = (quantized(rows, k, DEVICE, LARGEST) for rows in (m, n))
    return a, weight.T, scale_a, scale_weight.T.contiguous()


# ---- through the public function

SCALED = {"neither": (False, False), "rows": (True, False), "columns": (False, True), "both": (True, True)}


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("scaled", SCALED.values(), ids=SCALED)
def test_scales_come_before_the_bias_and_the_activation(scaled, out_dtype):
    a, b, *scales = operands(37, 45, 70)
    scale_a, scale_b = (scale if wanted else None for scale, wanted in zip(scales, scaled, strict=True))
    bias = torch.randn(45, device=DEVICE)
    for ending in ((None, None), (bias, "gelu")):
        check_with(Epilogue(*ending, scale_a, scale_b), a, b, out_dtype=out_dtype)


def test_scales_are_vectors_too_and_also_of_halves():
    a, b, scale_a, scale_b = operands(8, 16, 32)
    as_columns = check_with(Epilogue(None, None, scale_a, scale_b), a, b)
    as_vectors = persistent_matmul(a, b, scale_a=scale_a[:, 0], scale_b=scale_b[0])
    assert torch.equal(as_columns, as_vectors)
    check_with(Epilogue(None, None, scale_a, scale_b), a.half(), b.half())


def test_a_result_by_columns_and_an_empty_inner_dimension():
    a, b, scale_a, scale_b = operands(35, 45, 48)
    epilogue = Epilogue(torch.randn(45, device=DEVICE), "silu", scale_a, scale_b)
    check_with(epilogue, a, b, out=torch.empty(45, 35, dtype=torch.float16, device=DEVICE).T)
    result = persistent_matmul(a[:, :0], b[:0], bias=epilogue.bias, scale_a=scale_a)
    assert torch.equal(result, epilogue.bias.bfloat16().expand(35, 45))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rows": (
        {"scale_a": zeros(1)},
        ValueError,
        r"scale_a has shape \(1,\); it must be \(2,\) or \(2, 1\): one scale for all is scale_a.expand",
    ),
    "columns": ({"scale_b": zeros(5, 1)}, ValueError, r"scale_b has shape \(5, 1\); .* \(5,\) or \(1, 5\)"),
    "type": ({"scale_a": zeros(2).half()}, TypeError, "scale_a is torch.float16; it must be torch.float32"),
    "a number": ({"scale_b": 2.0}, TypeError, r"scale_b is a float; it must be a float32 tensor \(5,\)"),
    "stride": ({"scale_b": zeros(10)[::2]}, ValueError, r"scale_b has strides \(2,\); call .contiguous\(\)"),
    "device": ({"scale_a": zeros(2).to("meta")}, ValueError, "scale_a is on meta, the product is on"),
    "gradient": ({"scale_a": zeros(2).requires_grad_()}, RuntimeError, "no backward, .* required by scale_a"),
    "out_dtype": ({"out_dtype": FP8}, TypeError, "out is torch.float8_e4m3fn; persistent_matmul writes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_scale_is_told_with_its_values(name):
    options, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        persistent_matmul(zeros(2, 3, dtype=FP8), zeros(5, 3, dtype=FP8).T, **options)


def test_operands_that_do_not_lie_along_k_are_told_what_to_pass():
    a, weight = zeros(16, 32, dtype=FP8), zeros(48, 32, dtype=FP8)
    with pytest.raises(ValueError, match=r"a \[16, 32\] has strides \(1, 16\); .* pass a.contiguous\(\)"):
        persistent_matmul(a.T.contiguous().T, weight.T)
    with pytest.raises(ValueError, match=r"b \[32, 48\] has strides \(48, 1\); .* pass weight.T of a weight"):
        persistent_matmul(a, weight.T.contiguous())
    with pytest.raises(TypeError, match=r"a is torch.float8_e4m3fn, b is torch.bfloat16; convert one"):
        persistent_matmul(a, weight.T.bfloat16())
    with pytest.raises(TypeError, match=r"a is torch.float8_e5m2; persistent_matmul takes"):
        persistent_matmul(a.to(torch.float8_e5m2), weight.T)


def test_a_gpu_without_such_tensor_cores_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(TypeError, match=r"cuda:1 has \(8, 0\): convert the operands to torch"):
        check_fp8(torch.device("cuda:1"))


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
def test_every_candidate_multiplies_fp8_on_a_gpu(by_columns, monkeypatch):
    a, b, scale_a, scale_b = operands(1000, 1304, 528)
    epilogue = Epilogue(torch.randn(1304, device=DEVICE), "gelu", scale_a, scale_b)
    out = poisoned(1304, 1000, torch.bfloat16).T if by_columns else poisoned(1000, 1304, torch.bfloat16)
    for config in covering(fitting(torch.bfloat16, lambda kwargs: True)):
        monkeypatch.setattr(launching.tuned_gemm, "configs", [config])
        for _ in range(2):  # asked of the tuner, then the short way
            check_with(epilogue, a, b, out=out.fill_(math.nan))


def choose_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls take the first candidate that has room for a float32 result: a single one is not pruned."""
    monkeypatch.setattr(launching.tuned_gemm, "configs", fitting(torch.float32, lambda kwargs: True)[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(4096, 512, 16384), (1, 128, 256), (999, 333, 501)], ids=str)
def test_products_in_fp8_are_those_of_torch_on_a_gpu(sizes, monkeypatch):
    choose_first(monkeypatch)
    a, b, scale_a, scale_b = operands(*sizes)
    for scales, out_dtype in itertools.product(((None, None), (scale_a, scale_b)), OUT_DTYPES):
        ours = check_with(Epilogue(None, None, *scales), a, b, out_dtype=out_dtype)
        if scales[0] is not None and out_dtype == torch.bfloat16 and sizes[2] % 16 == 0:
            theirs = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=True)
            exact = (a.double() @ b.double()) * scale_a * scale_b
            assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


@pytest.mark.gpu
def test_a_captured_call_reads_its_scales_in_each_replay(monkeypatch):
    choose_first(monkeypatch)
    a, b, scale_a, scale_b = operands(512, 512, 256)
    out = persistent_matmul(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        persistent_matmul(a, b, out, scale_a=scale_a, scale_b=scale_b)
    expected = 2 * out
    scale_a.mul_(2)
    graph.replay()
    assert torch.equal(out, expected)
