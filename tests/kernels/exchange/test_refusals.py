"""What operations refuse alike: wrong arguments, openings that cannot be, calls when closed or broken."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ag_gemm_runs import GATHERING_ROWS
from ag_moe_runs import GATHERING
from gemm_ar_runs import REDUCING
from gemm_rs_runs import SCATTERING_SUMS
from moe_rs_runs import SCATTERING
from operation_runs import message_of, values
from operations import HALF, Runs

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.moe_rs import MoEReduceScatter
from dist_autotune.kernels.signals import as_patience
from dist_autotune.kernels.tensors import Apart

Wrong = dict[str, tuple[Callable[[Any], Any], str]]  # a call, and what it is told


@dataclass(frozen=True)
class Refusing:
    """One of the operations."""

    runs: Runs
    sizes: tuple[int, int]  # rows of a rank, and the operation's own size
    wrong: Wrong
    unopened: dict[str, tuple[dict[str, Any], str]]
    uses: tuple[Callable[[Any], Any], ...]  # what a closed one refuses
    waits: bool  # a call ends when the peer has come with its part
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.runs.name

    def open(self, **changed: Any) -> Any:
        names = list(inspect.signature(KINDS[self.name]).parameters)[:2]
        given = dict(zip(names, self.sizes, strict=True)) | {"dtype": HALF, "backend": "shm"}
        return KINDS[self.name](**given | self.options | changed)


KINDS = {
    kind.__name__: kind
    for kind in (AllGatherGemm, GemmReduceScatter, GemmAllReduce, AllGatherMoE, MoEReduceScatter)
}


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


# ---- AllGatherGemm

A, W, SQUARE = zeros(4, 8), zeros(6, 8), zeros(8, 8)
OF_GATHER: Wrong = {
    "m = 0": (lambda op: op(zeros(0, 8), W), "a_shard has 0 rows; this operation takes 1 to m_per_rank=4"),
    "m too large": (lambda op: op(zeros(5, 8), W), "a_shard has 5 rows; .* takes 1 to m_per_rank=4"),
    "K of a": (lambda op: op(zeros(4, 9), W), r"a_shard \[4, 9\] and weight \[6, 8\] must both have K=8"),
    "weight [K, N]": (lambda op: op(A, zeros(8, 6)), r"K=8 columns; the weight is \[N, K\], not \[K, N\]"),
    "N = 0": (lambda op: op(A, W[:0]), "weight has no rows; there is nothing to compute"),
    "dtype": (lambda op: op(A.float(), W), "a_shard is torch.float32 on cpu; .* opened for torch.float16"),
    "device": (lambda op: op(A.to("meta"), W), "a_shard is torch.float16 on meta"),
    "weight not 2-D": (lambda op: op(A, W[None]), r"weight has shape \[1, 6, 8\]; two dimensions are needed"),
    "columns first": (
        lambda op: op(zeros(8, 4).T, W), r"rows of a_shard are not contiguous \(strides \(1, 4\)\)"
    ),
    "shape of out": (lambda op: op(A, W, zeros(3, 6)), r"out has shape \[3, 6\]; the result has \[4, 6\]"),
    "dtype of out": (lambda op: op(A, W, zeros(4, 6).float()), "out is torch.float32"),
    "out in op.gathered": (
        lambda op: op(A, zeros(8, 8), op.shard), "out lies in op.gathered, which peers write in the call"
    ),
    "out in weight": (lambda op: op(A, SQUARE, SQUARE[:4]), "out overlaps weight, which the call reads"),
    "middle of op.shard": (lambda op: op(op.shard[1:3], W), r"overlaps op.shard .* pass op.shard\[:m\]"),
    "no tensor": (lambda op: op(A.tolist(), W), "a_shard is a list; a tensor is needed"),
    "bias": (lambda op: op(A, W, bias=zeros(7)), r"bias has shape \(7,\); it must be \(6,\)"),
    "gradient of the bias": (
        lambda op: op(A, W, bias=zeros(6).requires_grad_()), "AllGatherGemm has no backward, .* by bias"
    ),
    "activation": (lambda op: op(A, W, activation="swish"), "there is no activation 'swish'"),
    "gates": (lambda op: op(A, W, activation="swiglu"), "takes 8 columns of gate, .* a multiple of 16"),
    "nothing gathered": (lambda op: op.gathered, "nothing has been gathered yet"),
}  # fmt: skip


GATHER = Refusing(
    GATHERING_ROWS,
    (4, 8),
    OF_GATHER,
    {
        "m_per_rank": ({"m_per_rank": 0}, "m_per_rank=0 and k=8: must be at least 1"),
        "k": ({"k": 0}, "m_per_rank=4 and k=0: must be at least 1"),
        "half a column": ({"k": 7.5}, "m_per_rank=4 and k=7.5: must be an int of at least 1"),
        "dtype": ({"dtype": torch.float64}, "torch.float64 is not supported on cpu; use one of"),
        "consumer": (
            {"consumer": "fast"}, "consumer is 'fast'; it is one of specialized, plain, matmul, or None"
        ),
        "pieces": ({"pieces": 0}, "pieces is 0; it is at least 1, or None"),
        "programs": ({"programs": -1}, "programs is -1; it is at least 1, or None"),
        "collective": (
            {"collective": "auto"}, "collective is 'auto'; it is True, False, or None, which tunes it"
        ),
        "a consumer of a collective": (
            {"collective": True, "consumer": "plain"},
            "consumer is 'plain', but collective=True leaves the",
        ),
    },
    (lambda op: op(A, W), lambda op: op.shard, lambda op: op.gathered, lambda op: op.check()),
    waits=False,
)  # fmt: skip

# ---- GemmReduceScatter and GemmAllReduce


def ones(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


FACTORS = ones(4, 3), ones(6, 3)
WHOLE, WIDE = ones(4, 9), ones(6, 9)
OF_SUMS: Wrong = {
    "dtype": (lambda op: op(ones(4, 3).float(), ones(6, 3)), "a is torch.float32 on cpu"),
    "too many rows": (lambda op: op(ones(9, 3), ones(6, 3)), "a has 9 rows; .* takes 1 to m=8"),
    "no rows": (lambda op: op(ones(0, 3), ones(6, 3)), "a has 0 rows"),
    "other n": (lambda op: op(ones(4, 3), ones(5, 3)), r"weight \[5, 3\] must be .* \[n=6, K\]"),
    "no K": (lambda op: op(ones(4, 0), ones(6, 0)), "the same K, at least 1"),
    "out": (lambda op: op(*FACTORS, ones(3, 6)), r"out has shape \[3, 6\]"),
    "out in a": (lambda op: op(WHOLE[:, :3], ones(6, 3), WHOLE[:, 2:8]), "out overlaps a, which the call"),
    "out in weight": (lambda op: op(ones(4, 3), WIDE[:, :3], WIDE[1:5, 2:8]), "out overlaps weight, which"),
    "no tensor": (lambda op: op(1, ones(6, 3)), "a is a int"),
    "three dimensions": (lambda op: op(ones(1, 4, 3), ones(6, 3)), "two dimensions"),
    "columns apart": (lambda op: op(ones(3, 4).T, ones(6, 3)), "rows of a are not contiguous"),
    "columns of weight apart": (
        lambda op: op(ones(4, 3), ones(6, 6)[:, ::2]), "neither the rows nor the columns of weight are"
    ),
}  # fmt: skip
OF_SCATTERED: Wrong = OF_SUMS | {
    "addend": (
        lambda op: op(*FACTORS, addend=ones(3, 6)), r"addend has shape \[3, 6\] .* be contiguous and \[4, 6\]"
    ),
    "columns of addend apart": (
        lambda op: op(*FACTORS, addend=ones(6, 4).T), r"rows of addend .* contiguous \(strides \(1, 4\)\)"
    ),
}  # fmt: skip
OF_REDUCED: Wrong = OF_SUMS | {
    "residual alone": (
        lambda op: op(*FACTORS, None, ones(4, 6)), "residual is given and norm_weight is not; pass both"
    ),
    "weight of a norm alone": (
        lambda op: op(*FACTORS, None, None, ones(6)), "norm_weight is given and residual is not; pass both"
    ),
    "rows of the residual": (
        lambda op: op(*FACTORS, None, ones(3, 6), ones(6)),
        r"residual has shape \[3, 6\]; it must be \[4, 6\]",
    ),
    "type of the residual": (
        lambda op: op(*FACTORS, None, ones(4, 6, dtype=torch.float32), ones(6)), "residual is torch.float32"
    ),
    "size of the norm": (
        lambda op: op(*FACTORS, None, ones(4, 6), ones(5)), r"norm_weight has shape \[5\]; it must be \[6\]"
    ),
    "dimensions of the norm": (
        lambda op: op(*FACTORS, None, ones(4, 6), ones(1, 6)), "norm_weight has .*; one dimension is needed"
    ),
    "gradient": (
        lambda op: op(ones(4, 3), ones(6, 3).requires_grad_()), "GemmAllReduce has no backward, .* weight:"
    ),
    "text as eps": (lambda op: op(*FACTORS, eps="x"), "eps='x': it must be a number of at least 0"),
    "eps below 0": (
        lambda op: op.all_reduce_rms_norm(ones(4, 6), ones(4, 6), ones(6), eps=-1.0), "eps=-1.0: it must be"
    ),
    "gradient of the norm": (
        lambda op: op(*FACTORS, None, ones(4, 6), ones(6).requires_grad_()), "required by norm_weight"
    ),
    "columns of a part": (
        lambda op: op.all_reduce(ones(4, 5)), r"part has shape \[4, 5\]; it must be \[M, n=6\]"
    ),
    "rows of a part": (lambda op: op.all_reduce_rms_norm(ones(9, 6), ones(9, 6), ones(6)), "part has 9 rows"),
    "middle of op.part": (lambda op: op.all_reduce(op.part[2:4]), r"overlaps op.part .*; pass op.part\[:M\]"),
    "out in op.part": (
        lambda op: op.all_reduce(op.part[:4], op.part[:4]), "out lies in op.part, which peers read"
    ),
    "out in another place of part": (
        lambda op: op.all_reduce((rows := ones(5, 6))[:4], rows[1:]), "out overlaps part, which the call"
    ),
    "out with other rows than part": (
        lambda op: op.all_reduce((whole := ones(4, 9))[:, :6], whole.flatten()[:24].view(4, 6)),
        "out overlaps part, which the call",
    ),
    "a in op.part": (lambda op: op(op.part[:4], ones(6, 6)), "a lies in op.part, which this rank writes"),
    "residual in op.part": (
        lambda op: op(*FACTORS, None, op.part[:4], ones(6)), "residual lies in op.part, which this rank"
    ),
}  # fmt: skip
EMPTY = {name: ({name: 0}, "must be at least 1") for name in ("m", "n")}
SCATTER = Refusing(SCATTERING_SUMS, (8, 6), OF_SCATTERED, EMPTY, (lambda op: op(*FACTORS),), waits=True)
REDUCE = Refusing(
    REDUCING[None],
    (8, 6),
    OF_REDUCED,
    EMPTY
    | {
        "float64": ({"dtype": torch.float64}, "dtype torch.float64 is not supported on cpu; use one of"),
        "no dtype": ({"dtype": None}, "dtype None is not supported on cpu; use one of"),
        "too many rows": ({"m": 2**24}, "m=16777216 rows; it must be 16777215 or less"),
        "no such way": (
            {"way": "three-shot"},
            "way is 'three-shot'; it is one of one-shot, two-shot, collective, low-latency",
        ),
    },
    (lambda op: op(*FACTORS),),
    waits=True,
)

# ---- AllGatherMoE and MoEReduceScatter

IDS, WEIGHTS = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
X, UP, Y, DOWN = zeros(4, 6), zeros(3, 5, 6), zeros(8, 5), zeros(3, 6, 5)
WIDE_Y = zeros(8, 8)
OF_DISPATCH: Wrong = {
    "dtype": (lambda op: op(X.float(), UP, IDS), "x_shard is torch.float32 on cpu"),
    "K": (lambda op: op(zeros(4, 7), UP, IDS), r"x_shard has shape \[4, 7\]; .* K=6"),
    "too many tokens": (
        lambda op: op(zeros(9, 6), UP, IDS.new_zeros(9, 2)), "9 tokens; .* tokens_per_rank=8"
    ),
    "weight [N, K]": (lambda op: op(X, UP[0], IDS), r"weight has shape \[5, 6\]; \[E, N, K\] is"),
    "K of weight": (lambda op: op(X, zeros(3, 5, 4), IDS), "its rows must have K=6 elements"),
    "no experts": (lambda op: op(X, UP[:0], IDS), r"shape \[0, 5, 6\]; .* each at least 1"),
    "columns of weight apart": (lambda op: op(X, zeros(3, 5, 12)[..., ::2], IDS), "neither"),
    "dtype of weight": (lambda op: op(X, UP.float(), IDS), "weight is torch.float32 on cpu"),
    "no tensor": (lambda op: op(X, UP.tolist(), IDS), "weight is a list"),
    "ids of others": (lambda op: op(X, UP, IDS[:3]), r"x_shard \[4, 6\] and topk_ids \[3, 2\]"),
    "ids are floats": (lambda op: op(X, UP, IDS.float()), "topk_ids is torch.float32"),
    "ids are no tensor": (lambda op: op(X, UP, IDS.tolist()), "topk_ids is a list"),
    "one dimension": (lambda op: op(X, UP, IDS[:, 0]), r"topk_ids has shape \[4\]"),
    "no dimension": (lambda op: op(X, UP, IDS[0, 0]), r"topk_ids has shape \[\]"),
    "too many choices": (
        lambda op: op(X, UP, IDS.new_zeros(4, 4)), "4 choices a token; .* max_topk=3"
    ),
    "no choices": (lambda op: op(X, UP, IDS[:, :0]), "0 choices a token"),
    "rows of out": (lambda op: op(X, UP, IDS, zeros(9, 5)), r"out has shape \[9, 5\]; .* 8 rows"),
    "columns of out": (lambda op: op(X, UP, IDS, zeros(8, 4)), "the result has 5 columns"),
    "out in op.shard": (lambda op: op(X, UP, IDS, op.shard[:, :5]), "out lies in op.shard, which peers read"),
    "out in weight": (
        lambda op: op(X, UP, IDS, UP.flatten()[:40].view(8, 5)), "out overlaps weight, which the call"
    ),
    "too few counts": (lambda op: op(X, UP, IDS, tokens=[]), r"tokens=\[\] has 0 numbers"),
    "own count": (lambda op: op(X, UP, IDS, tokens=[3]), r"rank 0, this one, passes 4 tokens"),
    "count above": (lambda op: op(X, UP, IDS, tokens=[9]), "each must be 0 to tokens_per_rank=8"),
    "middle of op.shard": (lambda op: op(op.shard[2:6], UP, IDS), r"pass op.shard\[:T_r\]"),
}  # fmt: skip
OF_COMBINE: Wrong = {
    "dtype": (lambda op: op(Y.float(), DOWN, IDS, WEIGHTS), "y is torch.float32 on cpu"),
    "K": (lambda op: op(zeros(8, 4), DOWN, IDS, WEIGHTS), "its rows must have K=4 elements"),
    "N": (lambda op: op(Y, DOWN[:, :5], IDS, WEIGHTS), r"\[3, 5, 5\]; \[E, n=6, K\] is needed"),
    "rows of y": (lambda op: op(Y[:7], DOWN, IDS, WEIGHTS), r"y has 7 rows; .* topk=2 are 8 rows"),
    "too many tokens": (
        lambda op: op(zeros(18, 5), DOWN, IDS.new_zeros(9, 2), torch.ones(9, 2)), "9 tokens; "
    ),
    "too many choices": (
        lambda op: op(zeros(16, 5), DOWN, IDS.new_zeros(4, 4), torch.ones(4, 4)), "max_topk=3"
    ),
    "ids are floats": (lambda op: op(Y, DOWN, WEIGHTS, WEIGHTS), "topk_ids is torch.float32"),
    "weights are integers": (lambda op: op(Y, DOWN, IDS, IDS), "topk_weights is torch.int64"),
    "weights of others": (
        lambda op: op(Y, DOWN, IDS, WEIGHTS[:3]), r"topk_ids \[4, 2\] and topk_weights \[3, 2\]"
    ),
    "out": (lambda op: op(Y, DOWN, IDS, WEIGHTS, zeros(3, 6)), r"out has .* \[4, 6\]"),
    "out in y": (
        lambda op: op(WIDE_Y[:, :5], DOWN, IDS, WEIGHTS, WIDE_Y[4:, 2:]), "out overlaps y, which the call"
    ),
    "own count": (lambda op: op(Y, DOWN, IDS, WEIGHTS, tokens=[3]), "this one, passes 4 tokens"),
}  # fmt: skip
OF_EXPERTS = {"max_topk": ({"max_topk": 64}, "max_topk=64; it must be 1 to 63")}
OF_EXPERTS |= {
    f"{tokens} tokens": ({"tokens_per_rank": tokens}, f"tokens_per_rank={tokens}; it must be 1 to 16777215")
    for tokens in (0, 2**24)
}
OF_EXPERTS["no int"] = ({"tokens_per_rank": "8"}, "tokens_per_rank='8'; it must be an int, 1 to 16777215")
DISPATCH = Refusing(
    GATHERING,
    (8, 6),
    OF_DISPATCH,
    OF_EXPERTS
    | {
        "dtype": ({"dtype": torch.float64}, "torch.float64 is not supported on cpu"),
        "k": ({"k": 0}, "k=0: must be at least 1"),
        "k is no int": ({"k": "6"}, "k='6': must be an int of at least 1"),
    },
    (lambda op: op(X, UP, IDS), lambda op: op.shard, lambda op: op.check()),
    waits=False,
    options={"max_topk": 3},
)
COMBINE = Refusing(
    SCATTERING,
    (8, 6),
    OF_COMBINE,
    OF_EXPERTS | {"n": ({"n": 0}, "n=0: must be at least 1")},
    (lambda op: op(Y, DOWN, IDS, WEIGHTS),),
    waits=True,
    options={"max_topk": 3},
)

ALL = [GATHER, SCATTER, REDUCE, DISPATCH, COMBINE]
EACH = pytest.mark.parametrize("of", ALL, ids=lambda of: of.name)


@pytest.mark.parametrize(
    ("of", "name"), [pytest.param(of, name, id=f"{of.name}, {name}") for of in ALL for name in of.wrong]
)
def test_a_wrong_argument_raises_with_its_values_and_the_operation_stays_usable(of, name):
    call, text = of.wrong[name]
    with of.runs.begun(), of.open() as op:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
            call(op)
        assert op._calls == 0  # no peer has heard of it
        assert of.runs.call_and_compare(op, [4], 5) < 1


@pytest.mark.parametrize(
    ("of", "name"), [pytest.param(of, name, id=f"{of.name}, {name}") for of in ALL for name in of.unopened]
)
def test_an_operation_that_cannot_be_is_refused(of, name):
    changed, text = of.unopened[name]
    with pytest.raises((ValueError, TypeError), match=text):
        of.open(**changed)


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
    "shape of scale_a": ({"scale_a": SCALE}, r"scale_a has shape \(20,\); it must be \(16,\) or \(16, 1\)"),
    "shape of scale_weight": (
        {"scale_weight": SCALE[:16]}, r"scale_weight has shape \(16,\); it must be \(20,\) or \(20, 1\)"
    ),
    "type": ({"scale_weight": SCALE.double()}, "scale_weight is torch.float64; it must be"),
    "gradient": ({"scale_weight": SCALE.clone().requires_grad_()}, "has no backward, .* by scale_weight"),
    "out": ({"out": zeros(16, 20)}, "out is torch.float16 on cpu; this operation"),
    "by columns": ({"weight": WEIGHT.T.contiguous().T}, "the rows of weight are not contiguous"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_FP8)
@pytest.mark.parametrize("runs", [GATHERING_ROWS, SCATTERING_SUMS], ids=lambda runs: runs.name)
def test_what_cannot_be_scaled_is_told_with_its_values_before_the_call(runs, name):
    wrong, text = OF_FP8[name]
    with runs.alone(16, runs.sizes(32, 20)[0], FP8) as op:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
            op(ROWS, **{"weight": WEIGHT} | wrong)
        assert op._calls == 0


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


# ---- a launch that fails


def failing_launch(rank, of):
    """Break rank 1's launch after its peer has heard of the call."""
    of.runs.begin(rank)
    op = of.runs.open(8, 16)
    call = functools.partial(of.runs.fresh_call, op, [4, 4])
    if of.waits:
        op._patience_ticks = as_patience(1.0)
    if rank == 1:
        for kernel, _ in of.runs.kernels:
            kernel.configs = []
    first = message_of(call)
    op._patience_ticks = as_patience(1.0)
    return first, message_of(call), message_of(op.close)


@pytest.mark.parametrize("of", ALL, ids=[of.name for of in ALL])
def test_a_launch_that_fails_breaks_the_operation_and_nobody_hangs(of):
    peer, failed = values(failing_launch, 2, of)
    broken = f"RuntimeError: {of.name}, rank 1: call 1 was not carried out: IndexError"
    assert failed[0].startswith("IndexError")
    assert failed[1].startswith(broken)
    assert failed[2] == failed[1]
    assert peer[0] == peer[1] if of.waits else peer[0] == "nothing was raised"
    assert peer[1].startswith(f"PeerTimeout: {of.name}, rank 0: rank 1")
    assert peer[2] == peer[1]


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


def test_a_row_with_a_stride_of_zero_overlaps_what_it_shares_elements_with():
    line = zeros(12)
    a, out, beside = (line.as_strided((1, 6), (0, 1), begin) for begin in (0, 4, 6))
    with pytest.raises(ValueError, match="out overlaps a"):
        Apart(out, a=a).check(out, a)
    Apart(beside, a=a).check(beside, a)
