"""Calls of operations as rank 1 of two, whose peer is not there, on a device that runs nothing."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from dist_autotune.kernels.gemm_ar import GemmAllReduce, low_latency, pull, rows
from dist_autotune.kernels.gemm_ar import operation as of_rows
from dist_autotune.kernels.gemm_ar.ways import LOW_LATENCY, ONE_SHOT
from dist_autotune.kernels.gemm_rs import plain as of_scatter
from dist_autotune.kernels.gemm_rs import specialized as of_specialized_scatter
from dist_autotune.kernels.launches.settled import BlocksOf
from dist_autotune.kernels.moe import ag_moe, moe_rs
from dist_autotune.kernels.moe.launch import with_fields
from dist_autotune.kernels.symm import SymmetricMemory, SymmetricTensor
from dist_autotune.kernels.symm.ranks import SharingRanks


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
    make: Callable[[int], Caller]  # of a rank
    unlike: tuple[str, ...] = ()  # arguments that differ from call to call
    blocks_of: BlocksOf = lambda constants: {}  # of the descriptors that the host makes


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


CAPACITY, WORLD, N, K, EXPERTS = 1024, 2, 256, 128, 4
DTYPE = torch.bfloat16


@contextmanager
def in_a_group(rank: int) -> Iterator[None]:
    """Have operations be opened as on that rank of two, on such a device."""
    memory, facts = MemoryOfAGroup(rank, WORLD), operation.DeviceFacts(False, 132, True, needs_fence=True)
    with (
        mock.patch.object(operation, "open_symmetric_memory", return_value=memory),
        mock.patch.object(operation.DeviceFacts, "of", return_value=facts),
    ):
        yield


class RunsCaller:
    def __init__(self, runs: Runs, names: str, rank: int, rows: int) -> None:
        self.runs, self.rows = runs, [rows] * WORLD
        of_operation, of_call = runs.sizes(K, N)
        with (
            in_a_group(rank),
            mock.patch.object(expert_runs, "of_all_ranks", lambda value, group=None: [value] * WORLD),
        ):
            op = self.operation = runs.open(CAPACITY, of_operation, DTYPE, collective=False)
            self._operands = left, weight, *_ = runs.operands(op, self.rows, of_call, EXPERTS)
        self._out = runs.new_out(op, self.rows, self._operands)
        given = {"a": left, "b": weight, "c": self._out}
        self.tensors = {name: given[name] for name in names}

    def call(self) -> None:
        self.runs.call(self.operation, self._operands, self._out, self.rows)


def _of_runs(
    runs: Runs, module: Any, names: str, tiles: list[Any], others: Any, unlike: tuple[str, ...] = ()
) -> Launches:
    """Return how an operation launches whose kernel is given the tensors `names` of its caller."""
    make = lambda rank: RunsCaller(runs, names, rank, 64)  # noqa: E731
    return Launches(runs.kernel, module, tiles, others, make, unlike)


BY_TMA = candidate((64, 64, 64), 8, warps=4, stages=2, tma=True)
BY_TMA_OTHERS = candidate((64, 128, 64), 4, warps=4, stages=3, tma=True)
BY_POINTERS = candidate((64, 64, 32), 8, warps=4, stages=2, tma=False)
TILES = [candidate((32, 64, 64), 8, warps=4, stages=2, tma=tma) for tma in (True, False)]
OTHER_TILES = candidate((16, 128, 64), 4, warps=4, stages=2, tma=True)


def with_all(fields: dict[str, Any]) -> list[triton.Config]:
    return [with_fields(each, **fields) for each in TILES]


GATHERING_PLAINLY = GatheringRows(consumer="plain", pieces=1)
SUMS = _of_runs(SCATTERING_SUMS, of_scatter, "abc", [BY_TMA, BY_POINTERS], BY_TMA_OTHERS)
WITH_DESCRIPTORS = {
    "AllGatherGemm": _of_runs(GATHERING_PLAINLY, of_gather, "bc", [BY_TMA, BY_POINTERS], BY_TMA_OTHERS),
    "GemmReduceScatter": SUMS,
    "AllGatherMoE": _of_runs(
        GATHERING, ag_moe, "bc", with_all({"BY_ARRIVAL": True}), with_fields(OTHER_TILES, BY_ARRIVAL=False)
    ),
    "MoEReduceScatter": _of_runs(
        SCATTERING,
        moe_rs,
        "abc",
        with_all({"COMBINE_M": 16}),
        with_fields(OTHER_TILES, COMBINE_M=16),
        unlike=("products_ptr",),
    ),
}


# ---- warp-specialised kernels, whose descriptors the host makes


def _of_specialized(runs: Runs, module: Any, names: str) -> Launches:
    """Return how the specialised kernel of an operation launches, on Hopper."""
    pingpong = {
        (config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]): config
        for config in reversed(module.CANDIDATES)
        if config.kwargs["VARIANT"] == "pingpong" and not config.kwargs["JOINED"]
    }
    tiles, others = [pingpong[64, 128], pingpong[128, 128]], pingpong[64, 256]
    make = lambda rank: RunsCaller(runs, names, rank, 192)  # noqa: E731
    return Launches(module.tuned, module, tiles, others, make, blocks_of=blocks_of)


GATHERING_SPECIALIZED = GatheringRows(consumer="specialized", pieces=1)
SPECIALIZED = {
    "AllGatherGemm, specialized": _of_specialized(GATHERING_SPECIALIZED, of_specialized_gather, "bc"),
    "GemmReduceScatter, specialized": _of_specialized(SCATTERING_SUMS, of_specialized_scatter, "abc"),
}


# ---- GemmAllReduce


class RowsCaller:
    """Calls an operation, all of it but the agreement on a way; each call adds up a product of zeros."""

    def __init__(self, way: str, rank: int, *, has_norm: bool = True) -> None:
        ways = types.SimpleNamespace(
            options=lambda rows, **can: (way,),
            choose=lambda ways, key: way,
            settle=lambda key, way, *_, **__: way,
        )
        with in_a_group(rank), mock.patch.object(of_rows, "Ways", return_value=ways):
            op = self.operation = GemmAllReduce(16, N, DTYPE, way=way)
        own = {"table": op._rows.table_of_parts, **op._rows.held._asdict()}
        if way == LOW_LATENCY:
            assert op._rows.mail is not None
            own = {"part": op._parts, **op._rows.mail._asdict()}
        of_norm = {"residual": matrix(8, N, DTYPE), "weight": matrix(1, N, DTYPE)[0]} if has_norm else {}
        self.tensors = own | of_norm | {"out": matrix(8, N, DTYPE)}
        self.factors = torch.zeros(8, 8, dtype=DTYPE), torch.zeros(N, 8, dtype=DTYPE)

    def call(self) -> None:
        ending = [self.tensors.get(name) for name in ("out", "residual", "weight")]
        self.operation(*self.factors, *ending, eps=0.5)


def _of_rows(kernel: Any, module: Any, way: str) -> Launches:
    tiles = [rows.candidate(64, 1, 4), rows.candidate(32, 2, 4)]
    make = lambda rank: RowsCaller(way, rank)  # noqa: E731
    return Launches(kernel, module, tiles, rows.candidate(128, 1, 4), make, unlike=("sum_ptr",))


STAMPED = _of_rows(low_latency.exchange_rows, low_latency, LOW_LATENCY)
PULLING = _of_rows(pull.add_rows, pull, ONE_SHOT)
ALL = WITH_DESCRIPTORS | SPECIALIZED
ALL |= {"GemmAllReduce, low-latency": STAMPED, "GemmAllReduce, one-shot": PULLING}
