"""Calls of operations, each of which differs from the plain one in something that its launch depends on."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from unittest import mock

import expert_runs
import torch
import triton
from dense_runs import SCATTERING_SUMS, GatheringRows
from expert_runs import GATHERING, SCATTERING
from launch_path import matrix
from operations import Runs

from dist_autotune.kernels.ag_gemm import plain as of_gather
from dist_autotune.kernels.ag_gemm import specialized as of_specialized_gather
from dist_autotune.kernels.configs import candidate
from dist_autotune.kernels.exchange import operation
from dist_autotune.kernels.gemm.configs import blocks_of
from dist_autotune.kernels.gemm_ar import GemmAllReduce, low_latency, pull, rows, sending
from dist_autotune.kernels.gemm_ar import operation as of_rows
from dist_autotune.kernels.gemm_ar.ways import LOW_LATENCY, ONE_SHOT
from dist_autotune.kernels.gemm_rs import plain as of_scatter
from dist_autotune.kernels.gemm_rs import specialized as of_specialized_scatter
from dist_autotune.kernels.launches.settled import BlocksOf
from dist_autotune.kernels.moe import ag_moe, moe_rs
from dist_autotune.kernels.moe.launch import with_fields
from dist_autotune.kernels.symm import SymmetricMemory, SymmetricTensor
from dist_autotune.kernels.symm.ranks import SharingRanks
from dist_autotune.kernels.tensors import FP8


class Caller(Protocol):
    """A call of an operation."""

    tensors: dict[str, torch.Tensor]  # the caller's, by their names in the kernel

    def call(self) -> None: ...


@dataclass(frozen=True)
class Launches:
    """How one of the operations launches its kernel."""

    kernel: Any
    module: Any  # which has it as _KERNEL
    tiles: list[triton.Config]  # of two kinds: by TMA, and by pointers, where there are both
    others: triton.Config  # with tiles of 128 columns, or more
    make: Callable[[Any], Caller]
    plain: Any
    changes: dict[str, dict[str, Any]]
    descriptors: int  # that the kernel of a plain call makes
    unlike: tuple[str, ...] = ()  # arguments that differ from call to call
    blocks_of: BlocksOf = lambda constants: {}  # of the descriptors that the host makes

    @property
    def cases(self) -> dict[str, Any]:
        return {"plain": self.plain} | {
            name: replace(self.plain, **change) for name, change in self.changes.items()
        }


# ---- operations that gather or scatter, in a group whose other ranks are not there


class MemoryOfAGroup(SymmetricMemory):
    """Memory of all ranks in this process; what streams are told is not done."""

    name = "a group"

    def __init__(self, rank: int, world: int) -> None:
        ranks = SharingRanks()
        ranks.rank, ranks.world_size, ranks.members = rank, world, tuple(range(world))
        ranks.exchange = lambda step, value: [value] * world  # type: ignore[method-assign]
        super().__init__(ranks, torch.device("cpu"), "for a test")

    def side_stream(self) -> Any:
        return types.SimpleNamespace(fork=lambda: None, join=lambda: None)

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        peers = tuple(torch.zeros(shape, dtype=dtype) for _ in range(self.world_size))
        return SymmetricTensor(peers[self.rank], peers)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None: ...

    def write_signal(self, word: torch.Tensor, value: int, stream: Any) -> None: ...

    def wait_signal(self, word: torch.Tensor, value: int, stream: Any) -> None: ...

    def _synchronize(self) -> None: ...

    def _release(self) -> None: ...


@dataclass(frozen=True)
class Call:
    """What a call depends on."""

    rows: int = 64
    n: int = 256
    k: int = 128
    experts: int = 4
    dtype: torch.dtype = torch.bfloat16
    rank: int = 1
    world: int = 2
    programs: int = 132
    has_tma: bool = True
    upcasts: bool = False
    by_columns: bool = False
    options: tuple[str, ...] = ()  # further arguments, see OPTIONS


CAPACITY = 1024


@contextmanager
def in_a_group(case: Any, **device: Any) -> Iterator[None]:
    """Have operations be opened as on that rank of so many, on such a device."""
    memory, device = MemoryOfAGroup(case.rank, case.world), {"_sms": case.programs} | device
    with (
        mock.patch.object(operation, "open_symmetric_memory", return_value=memory),
        mock.patch.object(operation.Operation, "_read_device", lambda op, dtype: vars(op).update(device)),
    ):
        yield


class RunsCaller:
    def __init__(self, runs: Runs, names: str, case: Call) -> None:
        self.runs, self.rows, world = runs, [case.rows] * case.world, case.world
        of_operation, of_call = runs.sizes(case.k, case.n)
        with (
            in_a_group(case, _has_tma=case.has_tma, _upcasts=case.upcasts, _needs_fence=True),
            mock.patch.object(expert_runs, "of_all_ranks", lambda value, group=None: [value] * world),
        ):
            op = self.operation = runs.open(CAPACITY, of_operation, case.dtype, collective=False)
            left, weight, *rest = runs.operands(op, self.rows, of_call, case.experts)
        if case.by_columns:
            weight = weight.mT.contiguous().mT
        given = {"a": left, "b": weight, "c": runs.new_out(op, self.rows, (left, weight, *rest))}
        if case.dtype == FP8:
            given["c"] = given["c"].bfloat16()
        self.tensors = {name: given[name] for name in names}
        named = (OPTIONS[option](given["a"], given["b"]) for option in case.options)
        self._named = {name: value for each in named for name, value in each.items()}
        self._operands, self._out = (given["a"], given["b"], *rest), given["c"]

    def call(self) -> None:
        if self._named:
            self.operation(*self._operands, self._out, **self._named)
        else:
            self.runs.call(self.operation, self._operands, self._out, self.rows)


OPTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]] = {
    "addend": lambda a, b: {"addend": torch.zeros(len(a), len(b), dtype=a.dtype)},
    "bias": lambda a, b: {"bias": torch.zeros(len(b), dtype=a.dtype)},
    "gelu": lambda a, b: {"activation": "gelu"},
    "scales of rows": lambda a, b: {"scale_a": torch.ones(len(a))},
    "scales of columns": lambda a, b: {"scale_weight": torch.ones(len(b))},
}
IN_FP8 = {"fp8": {"dtype": FP8, "options": ("scales of rows", "scales of columns")}}
CHANGES: dict[str, dict[str, Any]] = {
    "rows of another class": {"rows": 75},
    "columns that are no multiple of 16": {"n": 250},
    "inner dimension that TMA cannot address": {"k": 100},
    "no TMA": {"has_tma": False},
    "a weight by columns": {"by_columns": True},
}
OF_SUMS = IN_FP8 | {"an addend": {"options": ("addend",)}}
OF_ROWS = {"fp8": {"dtype": FP8, "options": ("scales of columns",)}}  # rows always have scales
OF_ROWS |= {name: {"options": (name,)} for name in ("bias", "gelu")}


def _of_runs(runs: Runs, module: Any, names: str, tiles: Any, others: Any, **given: Any) -> Launches:
    """Return how an operation launches whose kernel is given the tensors `names` of its caller."""
    changes = CHANGES | {of_gather: OF_ROWS, of_scatter: OF_SUMS}.get(module, {})
    return Launches(
        runs.kernel,
        module,
        tiles,
        others,
        lambda case: RunsCaller(runs, names, case),
        Call(),
        changes,
        **given,
    )


BY_TMA = candidate((64, 64, 64), 8, warps=4, stages=2, tma=True)
BY_TMA_OTHERS = candidate((64, 128, 64), 4, warps=4, stages=3, tma=True)
BY_POINTERS = candidate((64, 64, 32), 8, warps=4, stages=2, tma=False)
TILES = [candidate((32, 64, 64), 8, warps=4, stages=2, tma=tma) for tma in (True, False)]
OTHER_TILES = candidate((16, 128, 64), 4, warps=4, stages=2, tma=True)


def with_all(fields: dict[str, Any]) -> list[triton.Config]:
    return [with_fields(each, **fields) for each in TILES]


GATHERING_PLAINLY = GatheringRows(consumer="plain", pieces=1)
SUMS = _of_runs(SCATTERING_SUMS, of_scatter, "abc", [BY_TMA, BY_POINTERS], BY_TMA_OTHERS, descriptors=2)
WITH_DESCRIPTORS = {
    "AllGatherGemm": _of_runs(
        GATHERING_PLAINLY,
        of_gather,
        "bc",
        [BY_TMA, BY_POINTERS],
        BY_TMA_OTHERS,
        descriptors=3,
    ),
    "GemmReduceScatter": SUMS,
    "AllGatherMoE": _of_runs(
        GATHERING,
        ag_moe,
        "bc",
        with_all({"BY_ARRIVAL": True}),
        with_fields(OTHER_TILES, BY_ARRIVAL=False),
        descriptors=1,
    ),
    "MoEReduceScatter": _of_runs(
        SCATTERING,
        moe_rs,
        "abc",
        with_all({"COMBINE_M": 16}),
        with_fields(OTHER_TILES, COMBINE_M=16),
        descriptors=1,
        unlike=("products_ptr",),
    ),
}


# ---- warp-specialised kernels, whose descriptors the host makes

OF_TMA: dict[str, dict[str, Any]] = {"rows of another class": {"rows": 300}}
OF_TMA |= {"a weight by columns": CHANGES["a weight by columns"]}


def _of_specialized(runs: Runs, module: Any, names: str, changes: dict[str, Any]) -> Launches:
    """Return how the specialised kernel of an operation launches, on Hopper."""
    pingpong = {
        (config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]): config
        for config in reversed(module.CANDIDATES)
        if config.kwargs["VARIANT"] == "pingpong" and not config.kwargs["JOINED"]
    }
    return Launches(
        module.tuned,
        module,
        [pingpong[64, 128], pingpong[128, 128]],
        pingpong[64, 256],
        lambda case: RunsCaller(runs, names, case),
        Call(rows=192),
        OF_TMA | changes,
        descriptors=0,
        blocks_of=blocks_of,
    )


SPECIALIZED = {
    "AllGatherGemm, specialized": _of_specialized(
        GatheringRows(consumer="specialized", pieces=1),
        of_specialized_gather,
        "bc",
        OF_ROWS,
    ),
    "GemmReduceScatter, specialized": _of_specialized(
        SCATTERING_SUMS,
        of_specialized_scatter,
        "abc",
        {"an addend": OF_SUMS["an addend"]},
    ),
}


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


CHANGES_OF_ROWS = {
    "columns that are no multiple of 16": {"n": 250},
    "no norm": {"has_norm": False},
    "strides of the residual and of out": {"pads": (64, 1)},
    "alignment of out": {"shifted": frozenset({"out"})},
}


class RowsCaller:
    """Calls an operation, all of it but the agreement on a way; each call adds up a product of zeros."""

    def __init__(self, way: str, case: Rows) -> None:
        ways = types.SimpleNamespace(
            options=lambda rows, **can: (way,),
            choose=lambda ways, key: way,
            settle=lambda key, way, *_, **__: way,
        )
        with in_a_group(case), mock.patch.object(of_rows, "Ways", return_value=ways):
            op = self.operation = GemmAllReduce(16, case.n, case.dtype, way=way)
        own = {"table": op._rows.table_of_parts, **op._rows.held._asdict()}
        if way == LOW_LATENCY:
            assert op._rows.mail is not None
            own = {"part": op._parts, **op._rows.mail._asdict()}
        self.tensors = own | {
            "residual": matrix(case.m, case.n, case.dtype, case.pads[0], int("residual" in case.shifted)),
            "weight": matrix(1, case.n, case.dtype, shift=int("weight" in case.shifted))[0],
            "out": matrix(case.m, case.n, case.dtype, case.pads[1], int("out" in case.shifted)),
        }
        self.factors = torch.zeros(case.m, 8, dtype=case.dtype), torch.zeros(case.n, 8, dtype=case.dtype)
        if not case.has_norm:
            del self.tensors["residual"], self.tensors["weight"]

    def call(self) -> None:
        ending = [self.tensors.get(name) for name in ("out", "residual", "weight")]
        self.operation(*self.factors, *ending, eps=0.5)


def _of_rows(kernel: Any, module: Any, way: str) -> Launches:
    return Launches(
        kernel,
        module,
        [rows.candidate(64, 1, 4), rows.candidate(32, 2, 4)],
        rows.candidate(128, 1, 4),
        lambda case: RowsCaller(way, case),
        Rows(),
        CHANGES_OF_ROWS,
        descriptors=0,
        unlike=("sum_ptr",),
    )


@dataclass(frozen=True)
class Products:
    """What the product of few rows depends on; pads, in elements, are of its operands."""

    m: int = 8
    n: int = 256
    k: int = 128
    dtype: torch.dtype = torch.bfloat16
    world: int = 2
    programs: int = 132
    pads: tuple[int, int] = (0, 0)
    rank: int = 1


CHANGES_OF_PRODUCTS = {"inner dimension": {"k": 80}, "strides of a and the weight": {"pads": (8, 16)}}


class ProductCaller:
    """Sends products, of operands that lie as those of the first did, by an operation's memory."""

    def __init__(self, case: Products) -> None:
        op = RowsCaller(LOW_LATENCY, Rows(n=case.n, dtype=case.dtype, world=case.world)).operation
        pad_a, pad_weight = case.pads
        a, weight = (
            matrix(case.m, case.k, case.dtype, pad_a),
            matrix(case.n, case.k, case.dtype, pad_weight),
        )
        assert sending.can_send(a, weight)
        self.launch = sending.prepare(case.rank, case.world, 16, op._rows.sending, a, weight)
        self.tensors = {**op._rows.sending._asdict(), "a": a, "weight": weight}

    def call(self) -> None:
        self.launch((), (self.tensors["a"], self.tensors["weight"]), ())


STAMPED = _of_rows(low_latency.exchange_rows, low_latency, LOW_LATENCY)
PULLING = _of_rows(pull.add_rows, pull, ONE_SHOT)
SENDING = Launches(
    sending.multiply_and_send,
    sending,
    [sending.candidate(32, 64, 32, split, 2) for split in (1, 2)],
    sending.candidate(32, 128, 32, 2, 2),
    ProductCaller,
    Products(),
    CHANGES_OF_PRODUCTS,
    descriptors=0,
)
ALL = WITH_DESCRIPTORS | SPECIALIZED
ALL |= {"GemmAllReduce, low-latency": STAMPED, "GemmAllReduce, one-shot": PULLING}
ALL |= {"GemmAllReduce, product of few rows": SENDING}
