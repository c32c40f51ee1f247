"""What operations refuse alike: wrong arguments, openings that cannot be, calls when closed or broken."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dense_runs import GATHERING_ROWS, REDUCING, SCATTERING_SUMS
from expert_runs import GATHERING, SCATTERING
from operations import HALF, Runs

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.exchange.operation import Operation
from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.moe_rs import MoEReduceScatter
from dist_autotune.kernels.tensors import Apart

Wrong = dict[str, Callable[[Any], Any]]  # what is told, and of which call


@dataclass(frozen=True)
class Refusing:
    """One of the operations."""

    runs: Runs
    kind: type[Operation]
    given: dict[str, Any]  # to open it
    wrong: Wrong
    unopened: dict[str, dict[str, Any]]  # what is told, and of which options
    uses: tuple[Callable[[Any], Any], ...]  # what a closed one refuses

    @property
    def name(self) -> str:
        return self.runs.name

    def open(self, **changed: Any) -> Any:
        return self.kind(**{"dtype": HALF, "backend": "shm"} | self.given | changed)


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def overlapping(rows: int, columns: int, step: int = 1) -> torch.Tensor:
    """Return rows that begin `step` elements apart."""
    return zeros(rows * columns).as_strided((rows, columns), (step, 1))


# ---- AllGatherGemm

A, W = zeros(4, 8), zeros(6, 8)
OF_GATHER: Wrong = {
    "a_shard has 0 rows; this operation takes 1 to m_per_rank=4": lambda op: op(zeros(0, 8), W),
    r"a_shard \[4, 9\] and weight \[6, 8\] must both have K=8": lambda op: op(zeros(4, 9), W),
    r"K=8 columns; the weight is \[N, K\], not \[K, N\]": lambda op: op(A, zeros(8, 6)),
    "weight has no rows; there is nothing to compute": lambda op: op(A, W[:0]),
    "a_shard is torch.float32 on cpu; .* opened for torch.float16": lambda op: op(A.float(), W),
    r"weight has shape \[1, 6, 8\]; two dimensions are needed": lambda op: op(A, W[None]),
    r"rows of a_shard are not contiguous \(strides \(1, 4\)\)": lambda op: op(zeros(8, 4).T, W),
    r"out has shape \[3, 6\]; the result has \[4, 6\]": lambda op: op(A, W, zeros(3, 6)),
    r"out has shape \[4, 6\] and strides \(5, 1\): elements": lambda op: op(A, W, overlapping(4, 6, 5)),
    r"strides \(0, 1\): elements overlap; pass": lambda op: op(A, W, zeros(6).expand(4, 6)),
    "out lies in op.gathered, which peers write in the call": lambda op: op(A, zeros(8, 8), op.shard),
    r"overlaps op.shard .* pass op.shard\[:m\]": lambda op: op(op.shard[1:3], W),
    "a_shard is a list; a tensor is needed": lambda op: op(A.tolist(), W),
    r"bias has shape \(7,\); it must be \(6,\)": lambda op: op(A, W, bias=zeros(7)),
    "AllGatherGemm has no backward, .* by bias": lambda op: op(A, W, bias=zeros(6).requires_grad_()),
    "there is no activation 'swish'": lambda op: op(A, W, activation="swish"),
    "takes 8 columns of gate, .* a multiple of 16": lambda op: op(A, W, activation="swiglu"),
    "nothing has been gathered yet": lambda op: op.gathered,
}


GATHER = Refusing(
    GATHERING_ROWS,
    AllGatherGemm,
    {"m_per_rank": 4, "k": 8},
    OF_GATHER,
    {
        "m_per_rank=0 and k=8: must be at least 1": {"m_per_rank": 0},
        "m_per_rank=4 and k=7.5: must be an int of at least 1": {"k": 7.5},
        "torch.float64 is not supported on cpu; use one of": {"dtype": torch.float64},
        "consumer is 'fast'; it is one of specialized, plain, or None": {"consumer": "fast"},
        "pieces is 0; it is at least 1, or None": {"pieces": 0},
        "collective is 'auto'; it is True, False, or None, which tunes it": {"collective": "auto"},
        "by_stores is 0; it is True, False, or None": {"by_stores": 0},
        "low_latency is 'auto'; it is True, False, or None, which tunes it": {"low_latency": "auto"},
        "consumer is 'plain', but collective=True leaves the": {"collective": True, "consumer": "plain"},
    },
    (*(lambda op: op(A, W), lambda op: op.shard, lambda op: op.gathered, lambda op: op.check()),),
)

# ---- GemmReduceScatter and GemmAllReduce


def ones(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


FACTORS = ones(4, 3), ones(6, 3)
OF_SUMS: Wrong = {
    "a is torch.float32 on cpu": lambda op: op(ones(4, 3).float(), ones(6, 3)),
    "a has 9 rows; .* takes 1 to m=8": lambda op: op(ones(9, 3), ones(6, 3)),
    r"weight \[5, 3\] must be .* \[n=6, K\]": lambda op: op(ones(4, 3), ones(5, 3)),
    "the same K, at least 1": lambda op: op(ones(4, 0), ones(6, 0)),
    r"out has shape \[3, 6\]": lambda op: op(*FACTORS, ones(3, 6)),
    r"out has .* strides \(1, 1\): elements overlap": lambda op: op(*FACTORS, overlapping(4, 6)),
    "a is a int": lambda op: op(1, ones(6, 3)),
    "rows of a are not contiguous": lambda op: op(ones(3, 4).T, ones(6, 3)),
    "neither the rows nor the columns of weight are": lambda op: op(ones(4, 3), ones(6, 6)[:, ::2]),
}
OF_SCATTERED: Wrong = OF_SUMS | {
    "GemmReduceScatter has no backward, .* required by a, weight": (
        lambda op: op(*(each.clone().requires_grad_() for each in FACTORS))
    ),
    r"addend has shape \[3, 6\] .* be contiguous and \[4, 6\]": lambda op: op(*FACTORS, addend=ones(3, 6)),
    r"rows of addend .* contiguous \(strides \(1, 4\)\)": lambda op: op(*FACTORS, addend=ones(6, 4).T),
}
OF_REDUCED: Wrong = OF_SUMS | {
    "residual is given and norm_weight is not; pass both": lambda op: op(*FACTORS, None, ones(4, 6)),
    "norm_weight is given and residual is not; pass both": lambda op: op(*FACTORS, None, None, ones(6)),
    r"residual has shape \[3, 6\]; it must be \[4, 6\]": lambda op: op(*FACTORS, None, ones(3, 6), ones(6)),
    r"norm_weight has shape \[5\]; it must be \[6\]": lambda op: op(*FACTORS, None, ones(4, 6), ones(5)),
    "GemmAllReduce has no backward, .* weight:": lambda op: op(ones(4, 3), ones(6, 3).requires_grad_()),
    "eps='x': it must be a number of at least 0": lambda op: op(*FACTORS, eps="x"),
    "eps=-1.0: it must be": lambda op: op.all_reduce_rms_norm(ones(4, 6), ones(4, 6), ones(6), eps=-1.0),
    "required by norm_weight": lambda op: op(*FACTORS, None, ones(4, 6), ones(6).requires_grad_()),
    r"part has shape \[4, 5\]; it must be \[M, n=6\]": lambda op: op.all_reduce(ones(4, 5)),
    r"strides \(3, 1\): elements": (
        lambda op: op.all_reduce_rms_norm(ones(4, 6), ones(4, 6), ones(6), out=overlapping(4, 6, 3))
    ),
    r"overlaps op.part .*; pass op.part\[:M\]": lambda op: op.all_reduce(op.part[2:4]),
    "out lies in op.part, which peers read": lambda op: op.all_reduce(op.part[:4], op.part[:4]),
    "a lies in op.part, which this rank writes": lambda op: op(op.part[:4], ones(6, 6)),
    "residual lies in op.part, which this rank": lambda op: op(*FACTORS, None, op.part[:4], ones(6)),
}
EMPTY = {f"{name}=0.*must be at least 1": {name: 0} for name in ("m", "n")}
OF_ALL = {"m": 8, "n": 6}
CALL = (lambda op: op(*FACTORS),)
SCATTER = Refusing(SCATTERING_SUMS, GemmReduceScatter, OF_ALL, OF_SCATTERED, EMPTY, CALL)
REDUCE = Refusing(
    REDUCING[None],
    GemmAllReduce,
    OF_ALL,
    OF_REDUCED,
    EMPTY
    | {
        "dtype torch.float64 is not supported on cpu; use one of": {"dtype": torch.float64},
        "m=16777215 rows; it must be 16777214 or less": {"m": 2**24 - 1},
        "way is 'three-shot'; it is one of one-shot, two-shot, collective, low-latency": {
            "way": "three-shot"
        },
    },
    CALL,
)

# ---- AllGatherMoE and MoEReduceScatter

IDS, WEIGHTS = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
X, UP, Y, DOWN = zeros(4, 6), zeros(3, 5, 6), zeros(8, 5), zeros(3, 6, 5)
OF_DISPATCH: Wrong = {
    "x_shard is torch.float32 on cpu": lambda op: op(X.float(), UP, IDS),
    r"x_shard has shape \[4, 7\]; .* K=6": lambda op: op(zeros(4, 7), UP, IDS),
    "9 tokens; .* tokens_per_rank=8": lambda op: op(zeros(9, 6), UP, IDS.new_zeros(9, 2)),
    r"weight has shape \[5, 6\]; \[E, N, K\] is": lambda op: op(X, UP[0], IDS),
    "its rows must have K=6 elements": lambda op: op(X, zeros(3, 5, 4), IDS),
    r"shape \[0, 5, 6\]; .* each at least 1": lambda op: op(X, UP[:0], IDS),
    "neither": lambda op: op(X, zeros(3, 5, 12)[..., ::2], IDS),
    "weight is torch.float32 on cpu": lambda op: op(X, UP.float(), IDS),
    r"x_shard \[4, 6\] and topk_ids \[3, 2\]": lambda op: op(X, UP, IDS[:3]),
    "topk_ids is torch.float32": lambda op: op(X, UP, IDS.float()),
    r"topk_ids has shape \[4\]": lambda op: op(X, UP, IDS[:, 0]),
    "4 choices a token; .* max_topk=3": lambda op: op(X, UP, IDS.new_zeros(4, 4)),
    r"out has shape \[9, 5\]; .* 8 rows": lambda op: op(X, UP, IDS, zeros(9, 5)),
    r"out has .* strides \(1, 1\): elements overlap": lambda op: op(X, UP, IDS, overlapping(8, 5)),
    "out lies in op.shard, which peers read": lambda op: op(X, UP, IDS, op.shard[:, :5]),
    "AllGatherMoE has no backward, .* x_shard:": lambda op: op(X.clone().requires_grad_(), UP, IDS),
    r"tokens=\[\] has 0 numbers": lambda op: op(X, UP, IDS, tokens=[]),
    r"rank 0, this one, passes 4 tokens": lambda op: op(X, UP, IDS, tokens=[3]),
    "each must be 0 to tokens_per_rank=8": lambda op: op(X, UP, IDS, tokens=[9]),
    r"pass op.shard\[:T_r\]": lambda op: op(op.shard[2:6], UP, IDS),
}
OF_COMBINE: Wrong = {
    "y is torch.float32 on cpu": lambda op: op(Y.float(), DOWN, IDS, WEIGHTS),
    "its rows must have K=4 elements": lambda op: op(zeros(8, 4), DOWN, IDS, WEIGHTS),
    r"\[3, 5, 5\]; \[E, n=6, K\] is needed": lambda op: op(Y, DOWN[:, :5], IDS, WEIGHTS),
    r"y has 7 rows; .* topk=2 are 8 rows": lambda op: op(Y[:7], DOWN, IDS, WEIGHTS),
    "topk_weights is torch.int64": lambda op: op(Y, DOWN, IDS, IDS),
    r"topk_ids \[4, 2\] and topk_weights \[3, 2\]": lambda op: op(Y, DOWN, IDS, WEIGHTS[:3]),
    r"out has .* \[4, 6\]": lambda op: op(Y, DOWN, IDS, WEIGHTS, zeros(3, 6)),
    r"strides \(1, 1\): elements overlap": lambda op: op(Y, DOWN, IDS, WEIGHTS, overlapping(4, 6)),
    "this one, passes 4 tokens": lambda op: op(Y, DOWN, IDS, WEIGHTS, tokens=[3]),
    "no backward, .* topk_weights": lambda op: op(Y, DOWN, IDS, WEIGHTS.clone().requires_grad_()),
}
OF_EXPERTS = {
    "max_topk=64; it must be 1 to 63": {"max_topk": 64},
    "tokens_per_rank=0; it must be 1 to 16777215": {"tokens_per_rank": 0},
    "tokens_per_rank=16777216; it must be 1 to 16777215": {"tokens_per_rank": 2**24},
    "tokens_per_rank='8'; it must be an int, 1 to 16777215": {"tokens_per_rank": "8"},
}
DISPATCH = Refusing(
    GATHERING,
    AllGatherMoE,
    {"tokens_per_rank": 8, "k": 6, "max_topk": 3},
    OF_DISPATCH,
    OF_EXPERTS
    | {
        "torch.float64 is not supported on cpu": {"dtype": torch.float64},
        "k=0: must be at least 1": {"k": 0},
        "k='6': must be an int of at least 1": {"k": "6"},
    },
    (lambda op: op(X, UP, IDS), lambda op: op.shard, lambda op: op.check()),
)
COMBINE = Refusing(
    SCATTERING,
    MoEReduceScatter,
    {"tokens_per_rank": 8, "n": 6, "max_topk": 3},
    OF_COMBINE,
    OF_EXPERTS | {"n=0: must be at least 1": {"n": 0}},
    (lambda op: op(Y, DOWN, IDS, WEIGHTS),),
)

ALL = [GATHER, SCATTER, REDUCE, DISPATCH, COMBINE]
EACH = pytest.mark.parametrize("of", ALL, ids=lambda of: of.name)


@pytest.mark.parametrize(
    ("of", "told"), [pytest.param(of, told, id=f"{of.name}, {told}") for of in ALL for told in of.wrong]
)
def test_a_wrong_argument_raises_with_its_values_and_the_operation_stays_usable(of, told):
    with of.runs.begun(), of.open() as op:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=told):
            of.wrong[told](op)
        assert of.runs.call_and_compare(op, [4], 5) < 1


@pytest.mark.parametrize(
    ("of", "told"), [pytest.param(of, told, id=f"{of.name}, {told}") for of in ALL for told in of.unopened]
)
def test_an_operation_that_cannot_be_is_refused(of, told):
    with pytest.raises((ValueError, TypeError), match=told):
        of.open(**of.unopened[told])


@EACH
@pytest.mark.parametrize("seconds", ["60", True, 0, float("inf"), float("nan")])
def test_a_timeout_that_is_no_number_of_seconds_is_refused_with_it(of, seconds):
    with pytest.raises(
        (ValueError, TypeError), match=f"timeout_s={seconds!r}: it must be a number of seconds"
    ):
        of.open(timeout_s=seconds)


@EACH
def test_a_closed_operation_says_so_and_closes_twice(of):
    op = of.open()
    op.close()
    op.close()
    for use in of.uses:
        with pytest.raises(RuntimeError, match=f"this {of.name} is closed; open another on all ranks"):
            use(op)


# ---- in fp8

FP8 = torch.float8_e4m3fn
ROWS, WEIGHT, SCALE = zeros(16, 32, dtype=FP8), zeros(20, 32, dtype=FP8), torch.ones(20)
OF_FP8 = {
    r"scale_a has shape \(20,\); it must be \(16,\) or \(16, 1\)": {"scale_a": SCALE},
    r"scale_weight has shape \(16,\); it must be \(20,\) or \(20, 1\)": {"scale_weight": SCALE[:16]},
    "scale_weight is torch.float64; it must be": {"scale_weight": SCALE.double()},
    "has no backward, .* by scale_weight": {"scale_weight": SCALE.clone().requires_grad_()},
    "out is torch.float16 on cpu; this operation": {"out": zeros(16, 20)},
    "the rows of weight are not contiguous": {"weight": WEIGHT.T.contiguous().T},
}


@pytest.mark.parametrize("told", OF_FP8)
@pytest.mark.parametrize("runs", [GATHERING_ROWS, SCATTERING_SUMS], ids=lambda runs: runs.name)
def test_what_cannot_be_scaled_is_told_with_its_values_before_the_call(runs, told):
    with (
        runs.alone(16, runs.sizes(32, 20)[0], FP8) as op,
        pytest.raises((ValueError, TypeError, RuntimeError), match=told),
    ):
        op(ROWS, **{"weight": WEIGHT} | OF_FP8[told])


def test_scales_are_for_fp8_alone_whose_rows_are_whole_16_bytes_and_have_no_addend():
    narrow = "k=24: rows of torch.float8_e4m3fn are whole 16 bytes; pad K to 32"
    with pytest.raises(ValueError, match=narrow):
        AllGatherGemm(16, 24, FP8, backend="shm")
    with SCATTERING_SUMS.alone(16, 20, FP8) as op:
        with pytest.raises(ValueError, match=narrow):
            op(ROWS[:, :24].contiguous(), WEIGHT[:, :24].contiguous())
        with pytest.raises(ValueError, match=r"addend is given, and operands are torch.float8_e4m3fn"):
            op(ROWS, WEIGHT, addend=zeros(16, 20, dtype=FP8))
    with (
        GATHERING_ROWS.alone(16, 32) as of_halves,
        pytest.raises(ValueError, match=r"scale_a and scale_weight are for torch.float8_e4m3fn"),
    ):
        of_halves(ROWS.half(), WEIGHT.half(), scale_weight=SCALE)


# ---- a result in an operand

VECTOR, SIX = torch.ones(16), ones(6)
GATHERED_FP8 = functools.partial(AllGatherGemm, 16, 32, FP8, backend="shm")
SCATTERED_FP8 = functools.partial(GemmReduceScatter, 16, 20, FP8, backend="shm")
IN_FP8 = {"weight": WEIGHT, "scale_a": VECTOR, "scale_weight": SCALE}
Sharing = tuple[Callable[..., Any], str, dict[str, torch.Tensor], tuple[int, int]]


def sums_by_expert(op: MoEReduceScatter, out: torch.Tensor, **given: torch.Tensor) -> Any:
    with DISPATCH.open() as dispatch:
        _, routing = dispatch.route(X, UP, IDS, WEIGHTS)
    return op.by_expert(routing=routing, out=out, **given)


SHARING: list[Sharing] = [  # how it is opened, the call, its operands, the shape of its result
    (GATHER.open, "__call__", {"a_shard": A, "weight": W, "bias": zeros(6)}, (4, 6)),
    (GATHERED_FP8, "__call__", {"a_shard": ROWS, **IN_FP8}, (16, 20)),
    (SCATTER.open, "__call__", {"a": ones(4, 3), "weight": ones(6, 3), "addend": ones(4, 6)}, (4, 6)),
    (SCATTERED_FP8, "__call__", {"a": ROWS, **IN_FP8}, (16, 20)),
    (
        REDUCE.open,
        "__call__",
        {"a": ones(4, 3), "weight": ones(6, 3), "residual": ones(4, 6), "norm_weight": SIX},
        (4, 6),
    ),
    (REDUCE.open, "all_reduce", {"part": ones(4, 6)}, (4, 6)),
    (
        REDUCE.open,
        "all_reduce_rms_norm",
        {"part": ones(4, 6), "residual": ones(4, 6), "norm_weight": SIX},
        (4, 6),
    ),
    (DISPATCH.open, "__call__", {"x_shard": X, "weight": UP, "topk_ids": IDS}, (8, 5)),
    (COMBINE.open, "__call__", {"y": Y, "weight": DOWN, "topk_ids": IDS, "topk_weights": WEIGHTS}, (4, 6)),
    (COMBINE.open, "by_expert", {"y": Y, "weight": DOWN, "weights": torch.ones(8)}, (4, 6)),
]


@pytest.mark.filterwarnings(
    "ignore:.*has not been tuned"
)  # by the first test that calls it so in this process
@pytest.mark.parametrize(
    ("opened", "method", "operands", "shape", "name"),
    [
        pytest.param(*case, name, id=f"{name} of {index}")
        for index, case in enumerate(SHARING)
        for name in case[2]
    ],
)
def test_a_result_that_lies_in_any_operand_is_refused_by_its_name(opened, method, operands, shape, name):
    (moved, out), free = in_one_memory(operands[name], shape), in_one_memory(zeros(1), shape)[1]
    with opened() as op:
        call = functools.partial(sums_by_expert, op) if method == "by_expert" else getattr(op, method)
        for _ in range(2):  # not only with a new layout
            with pytest.raises(ValueError, match=f"out overlaps {name}, which the call reads meanwhile"):
                call(out=out, **operands | {name: moved})
        call(out=free, **operands)


def in_one_memory(operand: torch.Tensor, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operand, and a result of that shape that begins in its last element."""
    begin, size = (operand.nbytes - operand.element_size()) // 2 * 2, 2 * shape[0] * shape[1]
    memory = torch.zeros(max(begin + size, operand.nbytes), dtype=torch.uint8)
    moved = memory[: operand.nbytes].view(operand.dtype).view(operand.shape)
    dtype = torch.bfloat16 if shape == (16, 20) else HALF
    return moved.copy_(operand), memory[begin : begin + size].view(dtype).view(shape)


def test_columns_of_one_matrix_lie_apart_from_each_other():
    whole = zeros(4, 12)
    for a in (whole[:, :3], whole[:, 9:], whole[1:, :3]):
        Apart(whole[:, 3:9], a=a).check(whole[:, 3:9], a)
    every_other, floats = whole[:, 1::2], whole[:, :2].view(torch.float32)
    for out, a in ((whole[:, 2:], floats), (floats, whole[:, 2:].T), (whole[:, ::2], every_other)):
        Apart(out, a=a).check(out, a)
    for a in (whole[:, :4], whole[1:, 8:], whole[0, 3:11].unflatten(0, (2, 4)), every_other):
        with pytest.raises(ValueError, match="out overlaps a"):
            Apart(whole[:, 3:9], a=a).check(whole[:, 3:9], a)
    with pytest.raises(ValueError, match="out overlaps a"):
        Apart(whole[:, 1:], a=floats).check(whole[:, 1:], floats)
