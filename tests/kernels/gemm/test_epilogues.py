"""`persistent_matmul` with bias, activation and scales of fp8: the plain body, all candidates on a GPU."""

import itertools
import math
from typing import Any

import pytest
import torch
from epilogue_runs import quantized
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
from dist_autotune.kernels.tensors import check_fp8

FP8 = torch.float8_e4m3fn
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


def test_calls_with_different_epilogues_or_numbers_of_programs_share_no_winner(monkeypatch):
    monkeypatch.setattr(plain_gemm, "configs", PLAIN_CANDIDATES)
    monkeypatch.setattr(plain_gemm, "cache", {})
    a, b = normal(33, 65), normal(65, 48)
    endings = [Epilogue(), Epilogue(normal(48)), Epilogue(normal(48).float())]
    endings += [Epilogue(activation=activation) for activation in ("silu", "swiglu")]

    @contextual_autotune(n_warmup=0, n_repeat=1, cache=False, log_dir=None, progress=False)
    def call():
        for epilogue in endings:
            check_with(epilogue, a, b)
        check_with(endings[0], a, b, programs=1)

    call()
    contexts = call.report.contexts
    assert {(each.kernel, each.status) for each in contexts} == {("plain_gemm", "tuned")}
    assert len({context.key for context in contexts}) == len(endings) + 1


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16, **options)


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


WRONG: dict[type[Exception], dict[str, dict[str, Any]]] = {
    ValueError: {
        "no activation 'swish'; there are 'relu', 'gelu', 'gelu_tanh', 'silu', 'geglu_tanh', 'swiglu', and": {
            "activation": "swish"
        },
        "'swiglu' takes 8 columns of gate, .* a multiple of 16, not 5; .* by interleave_gate_up": {
            "activation": "swiglu"
        },
        r"bias has shape \(4,\); it must be \(5,\)": {"bias": zeros(4)},
        r"bias has shape \(1, 5\)": {"bias": zeros(1, 5)},
        "bias has stride 2, not 1; call .contiguous()": {"bias": zeros(10)[::2]},
        "bias is on meta, the product is on": {"bias": zeros(5).to("meta")},
        r"scale_a has shape \(1,\); it must be \(2,\) or \(2, 1\): one scale for all is scale_a.expand": {
            "scale_a": floats(1)
        },
        r"scale_b has shape \(5, 1\); .* \(5,\) or \(1, 5\)": {"scale_b": floats(5, 1)},
        r"scale_b has strides \(2,\); call .contiguous\(\)": {"scale_b": floats(10)[::2]},
        "scale_a is on meta, the product is on": {"scale_a": floats(2).to("meta")},
    },
    TypeError: {
        "bias is torch.float64; it must be one of torch.float16": {"bias": zeros(5).double()},
        "bias is a list": {"bias": [0.0] * 5},
        "scale_a is torch.float16; it must be torch.float32": {"scale_a": zeros(2)},
        r"scale_b is a float; it must be a float32 tensor \(5,\)": {"scale_b": 2.0},
        "out is torch.float8_e4m3fn; persistent_matmul writes": {"out_dtype": FP8},
    },
    RuntimeError: {
        "no backward, .* required by bias": {"bias": zeros(5, requires_grad=True)},
        "no backward, .* by scale_a": {"scale_a": floats(2).requires_grad_()},
    },
}


@pytest.mark.parametrize(("kind", "told"), [(kind, told) for kind, every in WRONG.items() for told in every])
def test_a_wrong_epilogue_is_told_with_its_values(kind, told):
    with pytest.raises(kind, match=told):
        persistent_matmul(zeros(2, 3), zeros(3, 5), **WRONG[kind][told])


# ---- in fp8

LARGEST = 4  # so that sums that are not scaled are no infinite halves


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a [m, k], b [k, n] and their scales [m, 1] and [1, n]."""
    (a, scale_a), (weight, scale_weight) = (quantized(rows, k, DEVICE, LARGEST) for rows in (m, n))
    return a, weight.T, scale_a, scale_weight.T.contiguous()


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


def test_operands_that_do_not_lie_along_k_are_told_what_to_pass():
    a, weight = zeros(16, 32).to(FP8), zeros(48, 32).to(FP8)
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
@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
def test_every_candidate_multiplies_fp8_on_a_gpu(by_columns, monkeypatch):
    a, b, scale_a, scale_b = operands(1000, 1304, 528)
    epilogue = Epilogue(torch.randn(1304, device=DEVICE), "gelu", scale_a, scale_b)
    out = poisoned(1304, 1000, torch.bfloat16).T if by_columns else poisoned(1000, 1304, torch.bfloat16)
    each_ends_with(monkeypatch, fitting(torch.bfloat16, lambda kwargs: True), a, b, epilogue, out)
