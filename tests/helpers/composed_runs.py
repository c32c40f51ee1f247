"""All operations by turns, with each other, torch's kernels and graphs, all memory between canaries."""

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from dense_runs import REDUCING, SCATTERING_SUMS, GatheringRows, Reducing
from expert_runs import GATHERING, SCATTERING
from operation_runs import device, tuned_in_context
from operations import DenseRuns, Given, Runs
from torch import Tensor

from dist_autotune.kernels.ag_gemm import plain as of_gather
from dist_autotune.kernels.symm import SymmetricTensor
from dist_autotune.kernels.symm.base import SymmetricMemory

FENCE_BYTES, CANARY = 4096, 0xA5
PATIENCE_S = 60.0  # of a rank for its peers
KINDS = ("any", "one", "same", "none")  # of choices: one expert has all, no expert has any


class Fences:
    """Memory between canaries: tensors of a test, and what operations share or keep."""

    def __init__(self) -> None:
        self._rooms: list[Tensor] = []

    def copy_of(self, tensor: Tensor) -> Tensor:
        size = 2 * FENCE_BYTES + tensor.numel() * tensor.itemsize
        room = torch.full((size,), CANARY, dtype=torch.uint8, device=tensor.device)
        self._rooms.append(room)
        return room[FENCE_BYTES:-FENCE_BYTES].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    @contextlib.contextmanager
    def around_operations(self) -> Iterator[None]:
        """Fence what operations allocate, and let go of it at the end: operations are closed behind it."""
        allocate, hold = SymmetricMemory.allocate, SymmetricMemory.hold

        def fenced(memory: SymmetricMemory, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
            beside = FENCE_BYTES // dtype.itemsize
            whole = allocate(memory, (math.prod(shape) + 2 * beside,), dtype)
            room = whole.local.view(torch.uint8)
            room[:FENCE_BYTES].fill_(CANARY)
            room[-FENCE_BYTES:].fill_(CANARY)
            self._rooms.append(room)
            peers = tuple(each[beside:-beside].view(tuple(shape)) for each in whole.peers)
            return SymmetricTensor(peers[memory.rank], peers)

        def held(memory: SymmetricMemory, tensor: Tensor) -> Tensor:
            is_plain = tensor.device == memory.device and not hasattr(tensor, "points_to")
            hold(memory, tensor)  # not all who ask for it use what is returned
            return hold(memory, self.copy_of(tensor)) if is_plain else tensor

        with mock.patch.multiple(SymmetricMemory, allocate=fenced, hold=held):
            yield
        self._rooms.clear()

    def broken(self) -> int:
        """Return how many canaries are gone."""
        ends = (end for room in self._rooms for end in (room[:FENCE_BYTES], room[-FENCE_BYTES:]))
        return sum(int((end != CANARY).any()) for end in ends)


@dataclass(frozen=True)
class Sizes:
    rows: int  # of a shard
    k: int
    n: int
    of_all: int  # rows of GemmAllReduce
    experts: int

    def part_of(self, number: int) -> int:
        """Return a number of rows of that call: all, or an odd part."""
        return (self.rows, self.rows // 2 + 1, self.rows // 4 + 1)[number % 3]

    def tokens(self, number: int, world: int) -> list[int]:
        """Return the tokens of each rank: none on the last one, or on all, at times."""
        counts = [self.part_of(number + rank) for rank in range(world)]
        return [0] * world if number % 7 == 3 else [*counts[:-1], 0 if number % 3 == 1 else counts[-1]]


SMALL = Sizes(rows=12, k=16, n=24, of_all=4, experts=3)
LARGE = Sizes(rows=512, k=512, n=640, of_all=16, experts=8)


@dataclass(frozen=True)
class Part:
    """An operation that is called by turns."""

    name: str
    runs: Runs
    op: Any
    sizes: Sizes
    world: int

    def rows(self, number: int) -> list[int]:
        """Return the rows of each rank in that call."""
        if isinstance(self.runs, Reducing):
            return [1 + number % self.sizes.of_all] * self.world
        if isinstance(self.runs, DenseRuns):
            return [self.sizes.part_of(number)] * self.world
        return self.sizes.tokens(number, self.world)

    def given(self, number: int) -> Given:
        """Return the operands of that call."""
        _, of_call = self.runs.sizes(self.sizes.k, self.sizes.n)
        kind = KINDS[number % len(KINDS)]
        return self.runs.operands(self.op, self.rows(number), of_call, self.sizes.experts, 2, kind)

    def call(self, number: int, given: Given, out: Tensor) -> None:
        self.runs.call(self.op, given, out, self.rows(number))


def kernels_of_torch() -> None:
    """Multiply, and add over all ranks, as a program does between operations."""
    rows = torch.ones(256, 256, device=device())
    torch.mm(rows, rows)
    dist.all_reduce(rows)


def parts_of(rank: int, sizes: Sizes, world: int) -> list[Part]:
    """Open all operations; those kernels that a session tunes keep two candidates, the others one."""
    every = {"ag_gemm, plain": GatheringRows(consumer="plain")}
    if device() != "cpu":  # the warp-specialised kernel, where the GPU has one
        every["ag_gemm"] = GatheringRows()
    every |= {"gemm_rs": SCATTERING_SUMS, "gemm_ar": REDUCING[None]}
    every |= {runs.name: runs for runs in (GATHERING, SCATTERING)}
    REDUCING[None].begin(rank)
    of_gather.all_gather_gemm.configs = of_gather.CANDIDATES[:1]
    for runs in (SCATTERING_SUMS, GATHERING, SCATTERING):
        runs.begin(rank, 0)
    for runs in (SCATTERING_SUMS, GATHERING):
        runs.kernel.configs = runs.candidates[:2]
    parts = []
    for name, runs in every.items():
        rows = sizes.of_all if isinstance(runs, Reducing) else sizes.rows
        of_operation, _ = runs.sizes(sizes.k, sizes.n)
        op = runs.open(rows, of_operation, timeout_s=PATIENCE_S)
        parts.append(Part(name, runs, op, sizes, world))
    return parts


# ---- on a rank


class Turns:
    """Calls of parts by turns; their results are kept, and compared at the end."""

    def __init__(self, parts: list[Part], fences: Fences) -> None:
        self.parts, self._fences = parts, fences
        self._kept: list[tuple[Part, list[Tensor]]] = []
        self._graphs: list[tuple[Part, int, Given, Tensor, torch.cuda.CUDAGraph]] = []

    def fenced(self, part: Part, number: int) -> tuple[Given, Tensor]:
        given = tuple(map(self._fences.copy_of, part.given(number)))
        return given, self._fences.copy_of(part.runs.new_out(part.op, part.rows(number), given))

    def call(self, part: Part, number: int) -> None:
        """Call with operands in new places, and leave NaN in these."""
        given, out = self.fenced(part, number)
        part.call(number, given, out)
        self._keep(part, given, out)
        for each in given:
            if each.is_floating_point():
                each.fill_(math.nan)

    def capture(self, part: Part, number: int) -> None:
        given, out = self.fenced(part, number)
        part.call(number, given, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            part.call(number, given, out)
        self._graphs.append((part, number, given, out, graph))

    def replay(self, index: int) -> None:
        """Replay with other operands in the places that were captured; memory that is free changes hands."""
        for size in (64, 1024, 8192, 1 << 20):  # of what a graph reads and nobody holds
            torch.full((size,), -1, device=device(), dtype=torch.int32)
        part, number, given, out, graph = self._graphs[index % len(self._graphs)]
        for place, fresh in zip(given, part.given(number), strict=True):
            place.copy_(fresh)
        out.fill_(math.nan)
        graph.replay()
        self._keep(part, given, out)

    def _keep(self, part: Part, given: Given, out: Tensor) -> None:
        self._kept.append((part, [each.clone() for each in (out, *given)]))

    def wrong(self) -> list[str]:
        """Return what was not right, and canaries that are gone."""
        for part in self.parts:
            part.op.check()
        self._graphs.clear()  # before their communicators
        errors = [(part.name, part.runs.error_ratio(*tensors)) for part, tensors in self._kept]
        found = [
            f"call {call}, {name}: {error}" for call, (name, error) in enumerate(errors) if not error < 1
        ]
        broken = self._fences.broken()
        return found + [f"{broken} canaries are gone"] * bool(broken)


@contextlib.contextmanager
def opened(rank: int, sizes: Sizes) -> Iterator[Turns]:
    """Open the operations between canaries; close them once all ranks are here."""
    fences, world = Fences(), dist.get_world_size()
    with fences.around_operations():
        turns = Turns(parts_of(rank, sizes, world), fences)
        yield turns
    for part in turns.parts:
        part.op.close()


def by_turns(rank: int, sizes: Sizes, turns: int, captured: bool) -> list[str]:
    """Call and replay in a random order, the same on all ranks, with a session of the tuner in the middle.

    Ranks wait for each other where choices of all are needed for operands, and in torch's all-reduce.
    """
    order = random.Random(7)
    with opened(rank, sizes) as every:
        torch.manual_seed(rank)
        tuned = [part for part in every.parts if part.name in ("gemm_rs", GATHERING.name)]
        session, _ = tuned_in_context(lambda: [every.call(part, i) for i, part in enumerate(tuned)])
        if captured:
            for number, part in enumerate(every.parts):
                every.capture(part, number)
        parts = shuffled_rounds(every.parts, order)
        for number in range(turns):
            if number == turns // 2:
                session()
            if captured and order.randrange(8) == rank:
                torch.cuda._sleep(1_000_000)
            if captured and order.random() < 0.5:
                every.replay(order.randrange(turns))
            else:
                every.call(next(parts), number)
                kernels_of_torch()
        assert session.settled, session.report
        return every.wrong()


def shuffled_rounds(parts: list[Part], order: random.Random) -> Iterator[Part]:
    while True:
        yield from order.sample(parts, len(parts))
