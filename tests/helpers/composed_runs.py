"""All operations by turns, with each other, torch's kernels and graphs, all memory between canaries."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ag_gemm_runs
import gemm_ar_runs
import gemm_rs_runs
import torch
import torch.distributed as dist
from ag_moe_runs import GATHERING
from moe_rs_runs import SCATTERING
from moe_runs import ExpertRuns
from operation_runs import device
from torch import Tensor

from dist_autotune import contextual_autotune
from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm import plain as of_gather
from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.symm import SymmetricTensor
from dist_autotune.kernels.symm.base import SymmetricMemory

HALF = torch.float16
FENCE_BYTES, CANARY = 4096, 0xA5
KINDS = ("any", "one", "same", "none")  # of choices: one expert has all, no expert has any
Given = tuple[Tensor, ...]


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
        before = SymmetricMemory.allocate, SymmetricMemory.hold
        allocate, hold = before

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

        SymmetricMemory.allocate, SymmetricMemory.hold = fenced, held  # type: ignore[method-assign]
        try:
            yield
        finally:
            SymmetricMemory.allocate, SymmetricMemory.hold = before  # type: ignore[method-assign]
            self._rooms.clear()

    def broken(self) -> int:
        """Return how many canaries are gone."""
        ends = (end for room in self._rooms for end in (room[:FENCE_BYTES], room[-FENCE_BYTES:]))
        return sum(int((end != CANARY).any()) for end in ends)


@dataclass(frozen=True)
class Part:
    """What is called by turns: an operation, or kernels of torch."""

    name: str
    op: Any  # None: torch's
    operands: Callable[[int], Given]  # fresh ones; the number decides shapes and routing
    result: Callable[[int, Given], Tensor]  # an output for them
    call: Callable[[int, Given, Tensor], object]
    error: Callable[..., float]  # of the result, then the operands


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


def nans(*shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=HALF, device=device())


def gather_part(name: str, sizes: Sizes, world: int, **options: Any) -> Part:
    op = AllGatherGemm(sizes.rows, sizes.k, HALF, timeout_s=60.0, **options)
    return Part(
        name,
        op,
        lambda number: ag_gemm_runs.tensors(sizes.part_of(number), sizes.n, sizes.k, HALF),
        lambda _, given: nans(world * len(given[0]), sizes.n),
        lambda _, given, out: op(*given, out),
        lambda out, a, weight: ag_gemm_runs.error_ratio(out, ag_gemm_runs.gathered_by_torch(a), weight),
    )


def scatter_part(sizes: Sizes, world: int) -> Part:
    op = GemmReduceScatter(world * sizes.rows, sizes.n, HALF, timeout_s=60.0)
    return Part(
        "gemm_rs",
        op,
        lambda number: gemm_rs_runs.operands(world * sizes.part_of(number), sizes.n, sizes.k, HALF),
        lambda _, given: nans(len(given[0]) // world, sizes.n),
        lambda _, given, out: op(*given, out),
        gemm_rs_runs.error_ratio,
    )


def sum_part(sizes: Sizes) -> Part:
    """Return GemmAllReduce with a norm; its result is the norm, then the sum."""
    op = GemmAllReduce(sizes.of_all, sizes.n, HALF, timeout_s=60.0)

    def operands(number: int) -> Given:
        m = 1 + number % sizes.of_all
        of_all = gemm_ar_runs.of_all(m, sizes.n, HALF, number)
        return *gemm_ar_runs.operands(m, sizes.n, sizes.k, HALF), *of_all

    def call(_: int, given: Given, out: Tensor) -> None:
        a, weight, residual, norm_weight = given
        out[1].copy_(op(a, weight, out[0], residual, norm_weight, gemm_ar_runs.EPS)[1])

    def result(_: int, given: Given) -> Tensor:
        return nans(2, len(given[0]), sizes.n)

    return Part("gemm_ar", op, operands, result, call, gemm_ar_runs.norm_error_ratio)


def experts_part(runs: ExpertRuns, sizes: Sizes, world: int) -> Part:
    """Return an operation over experts; what is routed where changes from call to call."""
    of_operation, of_call = runs.sizes(sizes.k, sizes.n)
    op = runs.open(sizes.rows, of_operation, HALF, timeout_s=60.0)

    def operands(number: int) -> Given:
        tokens, kind = sizes.tokens(number, world), KINDS[number % len(KINDS)]
        return runs.operands(op, tokens, of_call, sizes.experts, 2, kind)

    return Part(
        runs.name,
        op,
        operands,
        lambda number, given: runs.new_out(op, sizes.tokens(number, world), given),
        lambda number, given, out: op(*given, out, tokens=sizes.tokens(number, world)),
        runs.error_ratio,
    )


def torch_parts(sizes: Sizes, world: int) -> list[Part]:
    def sum_error(out: Tensor, a: Tensor) -> float:
        wanted = ag_gemm_runs.gathered_by_torch(a).float().view(world, *a.shape).sum(0)
        return float((out.float() - wanted).abs().max()) / (world * 2**-8)

    def sum_up(_: int, given: Given, out: Tensor) -> None:
        dist.all_reduce(out.copy_(given[0]))

    product = Part(
        "torch.mm",
        None,
        lambda number: ag_gemm_runs.tensors(sizes.part_of(number), sizes.n, sizes.k, HALF),
        lambda _, given: nans(len(given[0]), sizes.n),
        lambda _, given, out: torch.mm(given[0], given[1].T, out=out),
        ag_gemm_runs.error_ratio,
    )
    collective = Part(
        "all_reduce",
        None,
        lambda number: (torch.randn(sizes.part_of(number), sizes.n, device=device()).to(HALF),),
        lambda _, given: torch.empty_like(given[0]),
        sum_up,
        sum_error,
    )
    return [product, collective]


def parts_of(rank: int, sizes: Sizes, world: int) -> list[Part]:
    """Open all operations; those kernels that a session tunes keep two candidates, the others one."""
    gemm_ar_runs.begin(rank)
    of_gather.all_gather_gemm.configs = of_gather.CANDIDATES[:1]
    gemm_rs_runs.begin(rank, 0)
    for runs in (GATHERING, SCATTERING):
        runs.begin(rank, 0)
    gemm_rs_runs.gemm_reduce_scatter.configs = gemm_rs_runs.CANDIDATES[:2]
    GATHERING.kernel.configs = GATHERING.candidates[:2]
    own = [gather_part("ag_gemm, plain", sizes, world, consumer="plain")]
    if device() != "cpu":  # the warp-specialised kernel, where the GPU has one, and pushes
        own += [gather_part("ag_gemm, pushed", sizes, world, producer="push")]
    own += [scatter_part(sizes, world), sum_part(sizes)]
    own += [experts_part(runs, sizes, world) for runs in (GATHERING, SCATTERING)]
    return own + torch_parts(sizes, world)


# ---- on a rank


class Turns:
    """Calls of parts by turns; their results are kept, and compared at the end."""

    def __init__(self, parts: list[Part], fences: Fences) -> None:
        self.parts, self._fences = parts, fences
        self._kept: list[tuple[Part, list[Tensor]]] = []
        self._graphs: list[tuple[Part, int, Given, Tensor, torch.cuda.CUDAGraph]] = []

    def fenced(self, part: Part, number: int) -> tuple[Given, Tensor]:
        given = tuple(self._fences.copy_of(each) for each in part.operands(number))
        return given, self._fences.copy_of(part.result(number, given))

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
        """Replay with other operands in the places that were captured."""
        part, number, given, out, graph = self._graphs[index % len(self._graphs)]
        for place, fresh in zip(given, part.operands(number), strict=True):
            place.copy_(fresh)
        out.fill_(math.nan)
        graph.replay()
        self._keep(part, given, out)

    def _keep(self, part: Part, given: Given, out: Tensor) -> None:
        self._kept.append((part, [each.clone() for each in (out, *given)]))

    def wrong(self) -> list[str]:
        """Return what was not right, and canaries that are gone."""
        for part in self.parts:
            if part.op is not None:
                part.op.check()
        self._graphs.clear()  # before their communicators
        errors = [(part.name, part.error(*tensors)) for part, tensors in self._kept]
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
        if part.op is not None:
            part.op.close()


def by_turns(rank: int, sizes: Sizes, turns: int, captured: bool) -> list[str]:
    """Call and replay in a random order, the same on all ranks, with a session of the tuner in the middle.

    Ranks wait for each other where choices of all are needed for operands, and in torch's all-reduce.
    """
    order = random.Random(7)
    with opened(rank, sizes) as every:
        tuned = [part for part in every.parts if part.name in ("gemm_rs", GATHERING.name)]

        @contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1, cache=False, log_dir=None, progress=False)
        def session() -> None:
            for number, part in enumerate(tuned):
                every.call(part, number)

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
        assert session.settled, session.report
        return every.wrong()


def shuffled_rounds(parts: list[Part], order: random.Random) -> Iterator[Part]:
    while True:
        yield from order.sample(parts, len(parts))


def on_two_streams(rank: int, sizes: Sizes, rounds: int) -> list[str]:
    """Call on two streams, each late by turns, while torch multiplies on a third.

    This ends. Of the kernels that may fill a device while they wait, all are on one stream, in one order on
    all ranks. That of GemmAllReduce has fewer programs than a device has SMs, as it has few rows. So whatever
    runs, each device has an SM for the next product, copy or program, and that is all that a peer waits for.
    """
    with opened(rank, sizes) as every:
        parts = {part.name: part for part in every.parts}
        large = [part for name, part in parts.items() if name.startswith(("ag_gemm", "gemm_rs"))]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for number in range(rounds):
            for late, (stream, part) in enumerate(
                zip(streams, (large[number % len(large)], parts["gemm_ar"]), strict=True)
            ):
                with torch.cuda.stream(stream):
                    if (number + late) % 4 == rank:
                        torch.cuda._sleep(2_000_000)
                    every.call(part, number)
            every.call(parts["torch.mm"], number)
        torch.cuda.synchronize()
        return every.wrong()
