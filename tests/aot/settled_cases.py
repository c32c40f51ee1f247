"""Calls of operations, each of which differs from the plain one in something that its launch depends on."""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy
import torch
import triton
from launch_path import matrix

from dist_autotune.kernels.configs import candidate
from dist_autotune.kernels.gemm_ar import GemmAllReduce, low_latency, pull, rows
from dist_autotune.kernels.gemm_ar.ways import LOW_LATENCY, ONE_SHOT
from dist_autotune.kernels.gemm_rs import plain
from dist_autotune.kernels.gemm_rs.call import ScatterMemory, ScatterOperands
from dist_autotune.kernels.gemm_rs.operation import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.plain import gemm_reduce_scatter
from dist_autotune.kernels.moe import ag_moe, moe_rs
from dist_autotune.kernels.moe.ag_moe_kernel import all_gather_moe
from dist_autotune.kernels.moe.launch import HEIGHTS, with_fields
from dist_autotune.kernels.moe.moe_rs_kernel import moe_reduce_scatter


class Caller(Protocol):
    """The part of an operation that launches, with the operands of a call."""

    tensors: dict[str, torch.Tensor]  # the kernel's, by their names in it

    def call(self) -> None: ...


@dataclass(frozen=True)
class Launches:
    """How one of the operations launches its kernel."""

    kernel: Any
    module: Any  # which has its settled launches as _SETTLED
    tiles: list[triton.Config]  # by TMA, and by pointers
    others: triton.Config  # with tiles of 128 columns
    make: Any
    plain: Any
    cases: dict[str, Any]
    descriptors: int  # that the plain call makes
    own: dict[str, Any]  # changes that take the short way, by the arguments that they are
    unlike: tuple[str, ...] = ()  # arguments that each call allocates
    odd: Any = None  # a call with strides of its own, and its arguments but for the tensors
    odd_grid: int = 0


def _cases(plain_case: Any, changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {"plain": plain_case} | {name: replace(plain_case, **change) for name, change in changes.items()}


# ---- GemmReduceScatter


@dataclass(frozen=True)
class Sum:
    """What a call depends on; pads and shifts, in elements, are of a, weight, out and of what is held."""

    m: int = 256
    n: int = 256
    k: int = 128
    dtype: torch.dtype = torch.bfloat16
    world: int = 2
    capacity: int = 256
    programs: int = 132
    pads: tuple[int, int, int] = (0, 0, 0)
    shifts: tuple[int, int, int] = (0, 0, 0)
    held_shifts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    rank: int = 1
    patience_ticks: int = 99
    has_tma: bool = True
    upcasts: bool = False
    scaled: tuple[bool, bool] = (False, False)  # the rows of a, those of the weight


class SumCaller:
    def __init__(self, case: Sum) -> None:
        world, slots = case.world, max(1, case.world - 1)
        a, weight, out = case.pads
        shifts, held = case.shifts, case.held_shifts
        self.operands = [
            matrix(case.m // world * world, case.k, case.dtype, a, shifts[0]),
            matrix(case.n, case.k, case.dtype, weight, shifts[1]),
            matrix(case.m // world, case.n, case.dtype, out, shifts[2]),
        ]
        self.held = ScatterMemory(
            *(
                matrix(slots * case.capacity, case.n, case.dtype, shift=shift).unflatten(0, (slots, -1))
                for shift in held[:2]
            ),
            matrix(4, world, torch.int32, shift=held[2]),
            matrix(1, world, torch.int32, shift=held[3]),
            matrix(1, world, torch.int64, shift=held[4]),
        )
        self.tensors = dict(zip("abc", self.operands, strict=True)) | self.held._asdict()
        op = self.operation = object.__new__(GemmReduceScatter)
        op._hold(self.held)
        op._capacity, op.rank, op.world_size = case.capacity, case.rank % world, world
        op._sms, op._has_tma, op._upcasts = case.programs, case.has_tma, case.upcasts
        op._patience_ticks, op._body = case.patience_ticks, "plain"
        counts = zip(case.scaled, (case.m, case.n), strict=True)
        scales = (torch.ones(count) if is_scaled else None for is_scaled, count in counts)
        self.given = ScatterOperands(*self.operands, None, *scales)
        self.body = op._make_body(self.given)

    def call(self) -> None:
        self.operation._launch(self.body, self.given)


BY_TMA = candidate((64, 64, 64), 8, warps=4, stages=2, tma=True)
BY_TMA_OTHERS = candidate((64, 128, 64), 4, warps=4, stages=3, tma=True)
BY_POINTERS = candidate((64, 64, 32), 8, warps=4, stages=2, tma=False)
CHANGES_OF_SUMS = {
    "rows": {"m": 192},
    "rows that are no multiple of 16": {"m": 250},
    "columns": {"n": 192},
    "columns that are no multiple of 16": {"n": 250},
    "columns alone": {"n": 192, "pads": (0, 0, 64)},
    "one column": {"n": 1},
    "inner dimension": {"k": 192},
    "inner dimension alone": {"k": 64, "pads": (64, 64, 0)},
    "inner dimension that is no multiple of 16": {"k": 104},
    "inner dimension that TMA cannot address": {"k": 100},
    "inner dimension of one": {"k": 1},
    "float16": {"dtype": torch.float16},
    "world size": {"world": 4},
    "world of one": {"world": 1},
    "capacity": {"capacity": 131},
    "number of programs": {"programs": 3},
    "no TMA": {"has_tma": False},
    "products in float32": {"upcasts": True},
    "scales of rows": {"scaled": (True, False)},
    "scales of columns": {"scaled": (False, True)},
    "scales of both": {"scaled": (True, True)},
}
for place, name in enumerate(("a", "weight", "out")):
    for pad in (64, 8, 1) if name != "out" else (64, 1):  # multiples of 16 elements, of 16 bytes, and neither
        pads = tuple(pad if each == place else 0 for each in range(3))
        CHANGES_OF_SUMS[f"{name}'s stride, {pad} more"] = {"pads": pads}
    CHANGES_OF_SUMS[f"{name}'s alignment"] = {"shifts": tuple(int(each == place) for each in range(3))}
CHANGES_OF_SUMS["alignment of a and weight"] = {"shifts": (1, 1, 0)}
for place, name in enumerate(ScatterMemory._fields):
    shifts = tuple(int(each == place) for each in range(5))
    CHANGES_OF_SUMS[f"alignment of {name}"] = {"held_shifts": shifts}

PLAIN_SUM = Sum()
SUMS = Launches(
    gemm_reduce_scatter,
    plain,
    [BY_TMA, BY_POINTERS],
    BY_TMA_OTHERS,
    SumCaller,
    PLAIN_SUM,
    _cases(PLAIN_SUM, CHANGES_OF_SUMS),
    descriptors=2,  # of A and of B
    own={"rank": 0, "patience_ticks": 5},
    odd=(
        replace(PLAIN_SUM, m=250, n=192, k=104, capacity=131, pads=(8, 16, 24)),
        {"M": 250, "N": 192, "K": 104, "capacity": 131, "rank": 1, "patience_ticks": 99}
        | {"first": 0, "chunks": 2, "size_class": 128, "stride_am": 112, "stride_b": 120, "stride_cm": 216}
        | {"WORLD": 2, "TMA_LEGAL": True, "BY_COLUMNS": False, "HAS_ADDEND": False, "UPCAST": False},
    ),
    odd_grid=2 * 2 * 3,  # chunks, tiles of rows, of columns
)


# ---- the operations over experts


@dataclass(frozen=True)
class Choices:
    """What a call depends on; pads and shifts are elements, `shifted` names tensors that are not aligned."""

    choices: int = 256
    n: int = 256
    k: int = 128
    experts: int = 4
    dtype: torch.dtype = torch.bfloat16
    world: int = 2
    programs: int = 132
    row_pad: int = 0  # of the weight
    expert_pad: int = 0  # rows between experts
    y_pad: int = 0
    out_pad: int = 0
    shifted: frozenset[str] = frozenset()
    rank: int = 1
    topk: int = 2
    table_blocks: int = 77
    tokens_per_rank: int = 64
    patience_ticks: int = 99
    has_tma: bool = True
    upcasts: bool = False
    is_sorted: bool = False


TILES = [candidate((32, 64, 64), 8, warps=4, stages=2, tma=tma) for tma in (True, False)]
OTHER_TILES = candidate((16, 128, 64), 4, warps=4, stages=2, tma=True)
GATHERED = ["a", "b", "c", "rows", "sources", "ends", "tables", "flags", "errors"]
SCATTERED = ["a", "b", "c", "partial", "staged", "weights", "rows", "sources", "offsets"]
SCATTERED += ["ends", "tables", "counters", "flags", "errors"]
CHANGES_OF_CHOICES = {
    "choices of another size": {"choices": 300},
    "choices of the same size, fewer tiles": {"choices": 160},
    "many choices": {"choices": 300, "programs": 1},
    "many choices of another size": {"choices": 600, "programs": 1},
    "columns": {"n": 192},
    "columns alone": {"n": 192, "expert_pad": 64, "out_pad": 64},
    "columns that are no multiple of 16": {"n": 250},
    "inner dimension": {"k": 192},
    "inner dimension alone": {"k": 64, "row_pad": 64, "y_pad": 64},
    "inner dimension that TMA cannot address": {"k": 100},
    "experts": {"experts": 3},
    "one expert": {"experts": 1},
    "float16": {"dtype": torch.float16},
    "world size": {"world": 4},
    "number of programs": {"programs": 3},
    "a weight's rows apart": {"row_pad": 64},
    "a weight's rows apart, which TMA cannot address": {"row_pad": 1},
    "experts apart": {"expert_pad": 64},
    "a stride of out": {"out_pad": 64},
    "a stride of out, no multiple of 16": {"out_pad": 1},
    "no TMA": {"has_tma": False},
    "products in float32": {"upcasts": True},
    "rows in the order of experts": {"is_sorted": True},
}
OF_Y = {
    "sorted rows of y that TMA cannot address": {"is_sorted": True, "y_pad": 1},
    "a stride of y": {"y_pad": 64},
    "a stride of y, no multiple of 16": {"y_pad": 1},
}


class ChoicesCaller:
    def __init__(self, names: list[str], case: Choices) -> None:
        self.case, self.scatters = case, names is SCATTERED
        slots = max(1, case.world - 1) * case.tokens_per_rank
        shapes = {
            "a": (case.choices, case.k, case.dtype, case.y_pad if self.scatters else 0),
            "b": (case.experts * (case.n + case.expert_pad), case.k, case.dtype, case.row_pad),
            "c": (case.tokens_per_rank if self.scatters else case.choices, case.n, case.dtype, case.out_pad),
            "partial": (slots, case.n, case.dtype),
            "staged": (slots, case.n, case.dtype),
            "weights": (1, case.choices, torch.float32),
            "errors": (1, case.world, torch.int64),
        }
        self.tensors = {
            each: matrix(*shapes.get(each, (1, 512, torch.int32)), shift=int(each in case.shifted))
            for each in names
        }
        rows, pitch = case.n + case.expert_pad, case.k + case.row_pad
        flat = self.tensors["b"]
        self.weight = flat.as_strided((case.experts, case.n, case.k), (rows * pitch, pitch, 1))
        assert self.weight.data_ptr() == flat.data_ptr()
        self.plan = types.SimpleNamespace(capacity=case.table_blocks, **self.tensors)
        self._furnish()

    def _furnish(self) -> None:
        case = self.case
        op = self.operation = object.__new__(
            moe_rs.MoEReduceScatter if self.scatters else ag_moe.AllGatherMoE
        )
        op.rank, op.world_size, op._patience_ticks = case.rank, case.world, case.patience_ticks
        op._sms, op._has_tma, op._upcasts = case.programs, case.has_tma, case.upcasts
        op._capacity, op._n, op._errors = case.tokens_per_rank, case.n, self.tensors["errors"]
        op._shapes = {}

        def symmetric(name: str) -> Any:
            return types.SimpleNamespace(local=self.tensors[name])

        op._flags = symmetric("flags")
        if self.scatters:
            op._partial, op._staged = self.tensors["partial"], symmetric("staged")
            op._weights = symmetric("weights")
        else:
            op._gather = symmetric("a")

    def call(self) -> None:
        case, plan, out = self.case, self.plan, self.tensors["c"]
        if not self.scatters:
            self.operation._launch(self.weight, out, plan, case.topk, is_sorted=case.is_sorted)
            return
        products = out.new_empty((case.choices, case.n))
        of_plan = (plan, self.tensors["weights"], plan.offsets, plan.ends, plan.tables, plan.counters)
        choices = moe_rs._Choices(*of_plan, (), case.topk, case.is_sorted)
        self.operation._launch(self.tensors["a"], self.weight, out, products, choices)


def _of_experts(
    kernel: Any, module: Any, names: list[str], by_kind: dict[str, Any], **given: Any
) -> Launches:
    plain_case = Choices()
    changes = CHANGES_OF_CHOICES | (OF_Y if names is SCATTERED else {})
    changes |= {f"alignment of {each}": {"shifted": frozenset({each})} for each in names}
    fields = {"BY_ARRIVAL": True} if names is GATHERED else {"AHEAD": 1, "COMBINE_M": 16}
    changed = {"BY_ARRIVAL": False} if names is GATHERED else {"AHEAD": 2}
    odd = {"size_class": 256, "N": 192, "K": 104, "experts": 4, "topk": 2, "capacity": 77, "stride_b": 112}
    odd |= {"stride_be": 192 * 112, "stride_cm": 216, "rank": 1, "patience_ticks": 99, "SORTED": False}
    odd |= {"WORLD": 2, "TMA_LEGAL": True, "BY_COLUMNS": False, "UPCAST": False}
    return Launches(
        kernel,
        module,
        [with_fields(each, **fields) for each in TILES],
        with_fields(OTHER_TILES, **fields | changed),
        lambda case: ChoicesCaller(names, case),
        plain_case,
        _cases(plain_case, changes),
        descriptors=1,  # of B; where rows are sorted the scatter has one of A beside it
        odd=(replace(plain_case, n=192, k=104, row_pad=8, y_pad=16, out_pad=24), odd | by_kind),
        odd_grid=min(132, (256 // 32 + 4 + 1) * 3),  # blocks of all experts, tiles of columns
        **given,
    )


OWN = {"rank": 0, "topk": 3, "table_blocks": 5, "patience_ticks": 7}
GATHER = _of_experts(all_gather_moe, ag_moe, GATHERED, {"HEIGHTS": HEIGHTS}, own=OWN)
SCATTER = _of_experts(
    moe_reduce_scatter,
    moe_rs,
    SCATTERED,
    {"tokens_per_rank": 64, "stride_am": 120, "first_part": 0, "parts": 2, "A_TMA_LEGAL": False},
    own=OWN | {"tokens_per_rank": 32},
    unlike=("products_ptr",),
)

# ---- GemmAllReduce


@dataclass(frozen=True)
class Rows:
    """What a call depends on; pads, in elements, are of residual and out, `shifted` names unaligned ones."""

    m: int = 8
    n: int = 256
    dtype: torch.dtype = torch.bfloat16
    world: int = 2
    programs: int = 132
    pads: tuple[int, int] = (0, 0)
    shifted: frozenset[str] = frozenset()
    has_norm: bool = True
    rank: int = 1
    patience_ticks: int = 99


MAIL = ["part", "table", "mail", "ticket", "lost", "errors"]
PULLED = ["table", "words_table", "words", "ticket", "errors"]
ENDS = ["residual", "weight", "out"]
CHANGES_OF_ROWS = {
    "rows": {"m": 5},
    "columns": {"n": 192, "pads": (64, 64)},
    "columns that are no multiple of 16": {"n": 250},
    "float16": {"dtype": torch.float16},
    "world size": {"world": 4},
    "number of programs": {"programs": 3},
    "no norm": {"has_norm": False},
    "a stride of the residual": {"pads": (64, 0)},
    "a stride of out": {"pads": (0, 64)},
    "a stride of out, no multiple of 16": {"pads": (0, 1)},
}


class RowsCaller:
    """Calls an operation, all of it but the agreement on a way; each call adds up a product of zeros."""

    def __init__(self, way: str, case: Rows) -> None:
        held = MAIL if way == LOW_LATENCY else PULLED
        op = self.operation = object.__new__(GemmAllReduce)
        op.rank, op.world_size, op._patience_ticks, op._sms = (
            case.rank, case.world, case.patience_ticks, case.programs
        )  # fmt: skip
        op._m, op._n, op._dtype, op.device = 16, case.n, case.dtype, torch.device("cpu")
        op._on_gpu = False
        op._is_closed, op._broken_by, op._calls, op._meeting, op._scatter = False, "", 0, None, None
        op._error_records, op._no_errors, op._layouts = numpy.zeros(1), bytes(8), {}
        op._ways = types.SimpleNamespace(
            options=lambda rows, **can: (way,), choose=lambda ways, key: way, settle=lambda way, *a, **b: way
        )
        self.tensors = {
            name: matrix(1, 512, torch.int64, shift=int(name in case.shifted)) for name in held
        } | {
            "residual": matrix(case.m, case.n, case.dtype, case.pads[0], int("residual" in case.shifted)),
            "weight": matrix(1, case.n, case.dtype, shift=int("weight" in case.shifted))[0],
            "out": matrix(case.m, case.n, case.dtype, case.pads[1], int("out" in case.shifted)),
        }
        parts = torch.zeros(16, case.n, dtype=case.dtype)
        op._parts = types.SimpleNamespace(local=parts)
        if way == LOW_LATENCY:
            self.tensors["part"] = parts
            table, *others = [self.tensors[name] for name in held[1:]]
            mail = others[0].as_strided((2, case.world, 16, case.n // 2), (0, 0, 0, 1))
            op._mail = low_latency.MailMemory(table, mail, *others[1:])
        else:
            op._table_of_parts, *others = [self.tensors[name] for name in held]
            op._held = pull.PullMemory(*others)
        self.factors = torch.zeros(case.m, 8, dtype=case.dtype), torch.zeros(case.n, 8, dtype=case.dtype)
        self.has_norm = case.has_norm
        if not case.has_norm:
            del self.tensors["residual"], self.tensors["weight"]

    def call(self) -> None:
        ending = [self.tensors.get(name) for name in ("out", "residual", "weight")]
        self.operation(*self.factors, *ending, eps=0.5)


def _of_rows(kernel: Any, module: Any, way: str, by_kind: dict[str, Any], held: list[str]) -> Launches:
    plain_case = Rows()
    changes = CHANGES_OF_ROWS | {
        f"alignment of {each}": {"shifted": frozenset({each})} for each in (*held, *ENDS) if each != "part"
    }
    return Launches(
        kernel,
        module,
        [rows.candidate(64, 1, 4), rows.candidate(32, 2, 4)],
        rows.candidate(128, 1, 4),
        lambda case: RowsCaller(way, case),
        plain_case,
        _cases(plain_case, changes),
        descriptors=0,
        own={"rank": 0, "patience_ticks": 7},
        unlike=("sum_ptr",),
        odd=(
            replace(plain_case, m=5, n=192, pads=(8, 24)),
            {"rows": 5, "size_class": 16, "N": 192, "stride_residual": 200, "stride_out": 216, "rank": 1}
            | {"patience_ticks": 99, "eps": 0.5, "WORLD": 2, "HAS_RESIDUAL": True, "NORM": True, "ROW": 256}
            | by_kind,
        ),
        odd_grid=5 * 3,  # rows, blocks of columns
    )


STAMPED = _of_rows(low_latency.exchange_rows, low_latency, LOW_LATENCY, {"capacity": 16, "PACK": 2}, MAIL)
PULLING = _of_rows(pull.add_rows, pull, ONE_SHOT, {"first": 0, "m": 5, "chunk": 1, "OWNER": False}, PULLED)
WITH_DESCRIPTORS = {"GemmReduceScatter": SUMS, "AllGatherMoE": GATHER, "MoEReduceScatter": SCATTER}
ALL = WITH_DESCRIPTORS | {"GemmAllReduce, low-latency": STAMPED, "GemmAllReduce, one-shot": PULLING}
