"""`persistent_matmul` with a bias and an activation: the plain body, and every candidate on a GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from gemm_runs import check_with, fitting, poisoned
from gpu_cases import covering
from operation_runs import DEVICE

from dist_autotune import contextual_autotune
from dist_autotune.kernels.epilogues import ACTIVATIONS, BIAS_DTYPES, GATED, Epilogue
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.gemm.configs import GLUON_CANDIDATES, PLAIN_CANDIDATES
from dist_autotune.kernels.gemm.operation import OUT_DTYPES, plain_gemm
from dist_autotune.kernels.gemm.pruning import suits
from dist_autotune.kernels.persistent_gemm import interleave_gate_up, persistent_matmul, split_gate_up

ENDINGS = [
    *[*itertools.product((None, *BIAS_DTYPES), (None, *ACTIVATIONS))][1:],
    *zip(itertools.cycle((None, *BIAS_DTYPES)), GATED),
]


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


# ---- through the public function


@pytest.mark.parametrize(("bias_dtype", "activation"), ENDINGS, ids=str)
def test_every_bias_and_activation_ends_as_torch_has_it(bias_dtype, activation):
    n = 48 if activation in GATED else 45
    bias = None if bias_dtype is None else normal(n, dtype=bias_dtype)
    for dtype, out_dtype in itertools.product((torch.float16, torch.bfloat16), OUT_DTYPES):
        a, b = normal(37, 29, dtype=dtype), normal(29, n, dtype=dtype)
        check_with(Epilogue(bias, activation), a, b, out_dtype=out_dtype)


def test_a_result_by_columns_and_any_strides():
    bias = normal(45)
    a, b = normal(70, 66)[::2, ::3], normal(44, 90)[::2, 1::2]
    for out in (normal(45, 35).T, normal(70, 135)[::2, ::3]):
        check_with(Epilogue(bias, "gelu"), a, b, out=out)


def test_a_weight_made_of_gate_and_up_makes_what_they_make():
    a, (gate, up), biases = normal(20, 32), normal(2, 24, 32), normal(2, 24)
    weight, bias = interleave_gate_up(gate, up), interleave_gate_up(*biases)
    assert weight.is_contiguous()
    assert weight.shape == (48, 32)
    result = persistent_matmul(a, weight.T, bias=bias, activation="swiglu")
    of_gate = a.float() @ gate.float().T + biases[0]
    wanted = torch.nn.functional.silu(of_gate) * (a.float() @ up.float().T + biases[1])
    torch.testing.assert_close(result.float(), wanted, rtol=1e-3, atol=1e-4)
    assert all(map(torch.equal, split_gate_up(weight), (gate, up)))
    assert all(map(torch.equal, split_gate_up(bias), biases))


def test_ranks_that_share_out_an_interleaved_weight_have_their_parts_of_gate_and_up():
    gate, up = normal(2, 32, 5)
    of_ranks = [interleave_gate_up(*parts) for parts in zip(gate.chunk(2), up.chunk(2), strict=True)]
    assert torch.equal(torch.cat(of_ranks), interleave_gate_up(gate, up))


def test_gate_and_up_that_cannot_take_turns_are_told_with_their_shapes():
    with pytest.raises(ValueError, match=r"gate has shape \(8, 2\), up has shape \(8, 3\)"):
        interleave_gate_up(zeros(8, 2), zeros(8, 3))
    with pytest.raises(ValueError, match=r"have shape \(12, 2\); the first size must be a multiple of 8"):
        interleave_gate_up(zeros(12, 2), zeros(12, 2))
    with pytest.raises(ValueError, match=r"weight has shape \(24, 2\); .* multiple of 16"):
        split_gate_up(zeros(24, 2))


def test_the_sums_are_rounded_once_behind_the_epilogue():
    a, bias = torch.full((32, 1), 256.0, device=DEVICE).half(), torch.full((32,), -65535.0, device=DEVICE)
    assert (persistent_matmul(a, a.T, bias=bias) == 1).all()  # 65536 alone is no float16


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_nan_and_huge_sums_are_what_torch_makes_of_them(activation):
    values = torch.tensor([[math.nan, 1e30, -1e30, 100.0, -100.0, -0.0]], device=DEVICE)
    if activation in GATED:
        values = interleave_gate_up(values.T.repeat(4, 1), torch.ones(24, 1, device=DEVICE)).T
    one, row = torch.ones(1, 1, device=DEVICE).half(), torch.zeros_like(values).half()
    result = persistent_matmul(one, row, bias=values[0], activation=activation, out_dtype=torch.float32)
    torch.testing.assert_close(result, Epilogue(activation=activation).of(values), equal_nan=True)


def test_calls_with_different_epilogues_share_no_winner(monkeypatch):
    monkeypatch.setattr(plain_gemm, "configs", PLAIN_CANDIDATES)
    monkeypatch.setattr(plain_gemm, "cache", {})
    a, b = normal(33, 65), normal(65, 48)
    endings = [Epilogue(), Epilogue(normal(48)), Epilogue(normal(48).float())]
    endings += [Epilogue(activation=activation) for activation in ("silu", "swiglu")]

    @contextual_autotune(n_warmup=0, n_repeat=1, cache=False, log_dir=None, progress=False)
    def call():
        for epilogue in endings:
            check_with(epilogue, a, b)

    call()
    assert len({context.key for context in call.report.contexts}) == len(endings)


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16, **options)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "activation": (
        {"activation": "swish"},
        ValueError,
        "no activation 'swish'; there are 'relu', 'gelu', 'gelu_tanh', 'silu', 'glu', .*'swiglu', and None",
    ),
    "gates": (
        {"activation": "swiglu"},
        ValueError,
        "'swiglu' takes 8 columns of gate, .* a multiple of 16, not 5; make the weight by interleave_gate_up",
    ),
    "shape": ({"bias": zeros(4)}, ValueError, r"bias has shape \(4,\); it must be \(5,\)"),
    "a row": ({"bias": zeros(1, 5)}, ValueError, r"bias has shape \(1, 5\)"),
    "type": (
        {"bias": zeros(5).double()},
        TypeError,
        "bias is torch.float64; it must be one of torch.float16",
    ),
    "stride": ({"bias": zeros(10)[::2]}, ValueError, "bias has stride 2, not 1; call .contiguous()"),
    "device": ({"bias": zeros(5).to("meta")}, ValueError, "bias is on meta, the product is on"),
    "a list": ({"bias": [0.0] * 5}, TypeError, "bias is a list"),
    "gradient": ({"bias": zeros(5, requires_grad=True)}, RuntimeError, "no backward, .* required by bias"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_epilogue_is_told_with_its_values(name):
    options, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        persistent_matmul(zeros(2, 3), zeros(3, 5), **options)


# ---- on a GPU


def each_ends_with(monkeypatch, candidates, a, b, epilogue, out):
    for config in covering(candidates):
        monkeypatch.setattr(launching.tuned_gemm, "configs", [config])
        for _ in range(2):  # asked of the tuner, then the short way
            check_with(epilogue, a, b, out=out.fill_(math.nan))


@pytest.mark.gpu
@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("kind", sorted({config.kwargs["VARIANT"] for config in GLUON_CANDIDATES}))
def test_every_candidate_ends_with_its_epilogue_on_a_gpu(kind, out_dtype, by_columns, monkeypatch):
    of_kind = fitting(out_dtype, lambda kwargs: kwargs["VARIANT"] == kind)
    out = poisoned(1304, 1000, out_dtype).T if by_columns else poisoned(1000, 1304, out_dtype)
    ending = Epilogue(normal(1304), "gelu")
    each_ends_with(monkeypatch, of_kind, normal(1000, 520), normal(520, 1304), ending, out)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_every_candidate_multiplies_gates_with_their_ups_on_a_gpu(out_dtype, monkeypatch):
    args = {"TRANS_A": False, "TRANS_B": True, "ACTIVATION": "swiglu"}
    suiting, out = fitting(out_dtype, lambda kwargs: suits(kwargs, args)), poisoned(1000, 664, out_dtype)
    ending = Epilogue(normal(1328), "swiglu")
    each_ends_with(monkeypatch, suiting, normal(1000, 520), normal(1328, 520).T, ending, out)


@pytest.mark.gpu
@pytest.mark.parametrize(("bias_dtype", "activation"), ENDINGS, ids=str)
@pytest.mark.parametrize("sizes", [(1000, 1304, 520), (999, 333, 501)], ids=["TMA", "copies or plain"])
def test_every_epilogue_on_a_gpu(bias_dtype, activation, sizes, monkeypatch):
    monkeypatch.setattr(launching.tuned_gemm, "configs", launching.tuned_gemm.configs[:1])
    m, n, k = sizes
    n -= n % 16 if activation in GATED else 0
    bias = None if bias_dtype is None else normal(n, dtype=bias_dtype)
    check_with(Epilogue(bias, activation), normal(m, k), normal(k, n))


@pytest.mark.gpu
def test_a_captured_call_reads_its_bias_in_each_replay(monkeypatch):
    monkeypatch.setattr(launching.tuned_gemm, "configs", launching.tuned_gemm.configs[:1])
    a, b, bias = normal(512, 256), normal(256, 512), normal(512)
    out = persistent_matmul(a, b, bias=bias, activation="silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        persistent_matmul(a, b, out, bias=bias, activation="silu")
    bias.normal_()
    graph.replay()
    torch.testing.assert_close(out, torch.nn.functional.silu(a.float() @ b.float() + bias).half())
