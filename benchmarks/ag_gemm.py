"""All-gather + GEMM: ours against NCCL and cuBLAS in sequence, torch's fused operation, and the parts alone.

    ./launch.sh -m benchmarks.ag_gemm [--m M] [--n N] [--k K] [--shapes few|public|wide]
                                      [--json FILE]

M is the number of rows of all ranks together, N that of columns on each rank. Ours is `AllGatherGemm`, tuned
first, inside `contextual_autotune(is_dist=True)`, with what the host may choose: `ours` may have found that
no overlap is best. In place means that the caller has written `op.shard`.

    ours                 in place, eager
    ours, copied         the shard lies elsewhere and is copied first
    ours, no overlap     in place, eager: collective=True, a collective and cuBLAS
    ours, low latency    in place: low_latency=True, up to 64 rows of each rank; as a graph, too
    ours, by stores      in place: by_stores=True, up to 2048 rows of each rank; as a graph, too
    ours, graph          in place, as a CUDA graph; and copied
    ours, by replays     the same, tuned with objective="graph" in a session of its own
    NCCL + GEMM          all_gather_into_tensor, then torch.matmul (gloo on CPU ranks)
    NCCL + own GEMM      the same with `persistent_matmul`, tuned in this sequence
    torch fused          torch.ops.symm_mem.fused_all_gather_matmul
    ..., graph           the last three as CUDA graphs
    GEMM                 torch.matmul on data that is gathered already
    copies               the all-gather by copy engines alone: no signals between the ranks
    NCCL gather          all_gather_into_tensor alone

Protocol and traps: `common/arms.py`. Without GPUs a tiny shape runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.arms import Arm, Plan
from benchmarks.common.cases import Benchmark, Ratio
from benchmarks.common.ranks import COLLECTIVES, ON_GPU, Ranks, run_on_ranks
from benchmarks.common.tuned import BY_REPLAYS, Prepare, Tuned, in_both_ways
from benchmarks.operations.harness import DTYPES, LIMIT_S, OURS, PATIENCE_S, measured_case, parse
from benchmarks.operations.peers import all_gather, fused_by_torch
from benchmarks.operations.products import (
    BLOCK,
    Shape,
    explained_error,
    product_arm,
    relative_error,
    relative_error_of_blocks,
)
from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.exchange.mail import MOST_ROWS
from dist_autotune.kernels.persistent_gemm import persistent_matmul
from dist_autotune.kernels.symm import SymmetricMemory, open_symmetric_memory

PUBLIC = (
    Shape(8192, 14336, 8192),
    Shape(8192, 3584, 8192),
    Shape(8192, 1792, 4096),
    Shape(8192, 6656, 16384),
    Shape(2048, 3584, 8192),
    Shape(512, 3584, 8192),
)
FEW = tuple(Shape(m, 3584, 8192) for m in (16, 32, 64, 128, 256, 512, 1024))
WIDE = tuple(Shape(m, n, 8192) for m in (16, 128, 1024, 4096, 16384) for n in (1024, 3584, 14336))
LISTS = {"few": FEW, "public": PUBLIC, "wide": WIDE}
DEFAULT = Shape(8192, 3584, 8192) if ON_GPU else Shape(64, 48, 32)
SEQUENCE, OWN_GEMM = f"{COLLECTIVES} + GEMM", f"{COLLECTIVES} + own GEMM"
SIZES = {"m": "rows of all ranks", "n": "columns of each rank", "k": "inner dimension"}

BENCHMARK = Benchmark(
    op="ag_gemm",
    title="All-gather + GEMM",
    case_title="M x N x K",
    ratios=[
        Ratio(of=SEQUENCE, to=OURS),
        Ratio(of=f"{SEQUENCE}, graph", to="ours, graph", name=f"graph: {SEQUENCE} / ours"),
        Ratio(of=OWN_GEMM, to=OURS),
        Ratio(of="torch fused", to=OURS, name="fused / ours"),
        Ratio(of="ours, graph", to=f"ours, {BY_REPLAYS}", name="graph: judged eagerly / by replays"),
        Ratio(of=OURS, to="GEMM"),
        Ratio(of="ours, graph", to="GEMM", name="graph / GEMM"),
    ],
    limit_s=LIMIT_S,
    needed=(OURS,),
)


class Problem:
    """The tensors of one shape on this rank, and what the right results are."""

    def __init__(self, shape: Shape, dtype: torch.dtype, ranks: Ranks) -> None:
        self.rows = shape.m // ranks.world_size
        options = {"dtype": dtype, "device": ranks.device}
        self.a = torch.empty(self.rows, shape.k, **options)
        self.weight = torch.randn(shape.n, shape.k, **options)
        self.gathered = torch.empty(shape.m, shape.k, **options)
        self.reference = torch.empty_like(self.gathered)  # the shards of all ranks, of the present inputs
        self.out = torch.empty(shape.m, shape.n, **options)
        self.places: list[torch.Tensor] = []  # where else the shard of this rank is wanted
        self.limit = explained_error(dtype, shape.k)
        self.gigaflop = 2e-9 * shape.m * shape.n * shape.k
        self.copied_mb = 1e-6 * (shape.m - self.rows) * shape.k * dtype.itemsize

    def refresh(self) -> None:
        """Take new random inputs."""
        self.a.normal_()
        for place in self.places:
            place.copy_(self.a)
        all_gather(self.reference, self.a)

    def product_error(self, result: torch.Tensor) -> float:
        weight = self.weight.float()
        blocks = zip(result.split(BLOCK), self.reference.split(BLOCK), strict=True)
        return relative_error_of_blocks((found, rows.float() @ weight.T) for found, rows in blocks)

    def product(self, name: str, prepare: Prepare) -> Arm:
        """Return an arm that computes the product, into `out` or into a tensor of its own."""
        of_product = {"error": self.product_error, "limit": self.limit, "gigaflop": self.gigaflop}
        return product_arm(name, prepare, self.out, **of_product)

    def gather(self, name: str, prepare: Prepare, poison: Callable[[], object]) -> Arm:
        """Return an arm that gathers, and no more."""
        return Arm(
            name=name,
            prepare=prepare,
            error=lambda result: relative_error(result, self.reference),
            limit=0.0,
            work=self.copied_mb,
            rate="GB/s",
            poison=poison,
        )


# ---- ours


class Ours(Tuned):
    """`AllGatherGemm` in place and copied, tuned in context."""

    def __init__(
        self,
        problem: Problem,
        backend: str,
        *,
        retune: bool,
        **way: bool,
    ) -> None:
        self.op = AllGatherGemm(
            problem.rows,
            problem.a.shape[1],
            problem.a.dtype,
            backend=backend,
            timeout_s=PATIENCE_S,
            **way,
        )
        problem.places.append(self.op.shard)

        def call(a_shard: torch.Tensor) -> torch.Tensor:
            return self.op(a_shard, problem.weight, problem.out)

        name = f"ag_gemm benchmark, {' '.join(way) or 'any way'}"
        super().__init__(call, check=self.op.check, name=name, retune=retune)


MOST_STORED = 2048  # rows of a rank


def on_request(problem: Problem, backend: str, *, retune: bool) -> dict[str, Ours]:
    """Return ours of ways that calls take on request alone, where the rows are few enough."""
    few = {"low latency": ({"low_latency": True}, MOST_ROWS)}
    few["by stores"] = ({"by_stores": True, "collective": False}, MOST_STORED)
    return {
        f"ours, {name}": Ours(problem, backend, retune=retune, **way)
        for name, (way, most) in few.items()
        if problem.rows <= most
    }


# ---- baselines


class CopyEngines:
    """The all-gather as copies from the peers' memory, in the order rank + 1, rank + 2, ..."""

    def __init__(self, memory: SymmetricMemory, elements: int, dtype: torch.dtype) -> None:
        self.backend = memory.name
        self._memory = memory
        self._flat = memory.allocate((elements,), dtype)
        self._stream = memory.side_stream()

    def gather(self, problem: Problem) -> Arm:
        """Return the arm; the shard goes to its place in the gathered rows."""
        memory, shape = self._memory, (self._memory.world_size, *problem.a.shape)
        elements = problem.a.numel() * memory.world_size
        here = self._flat.local[:elements].view(shape)
        there = [peer[:elements].view(shape) for peer in self._flat.peers]
        problem.places.append(here[memory.rank])
        peers = [(memory.rank + step) % memory.world_size for step in range(1, memory.world_size)]

        def poison() -> None:
            for peer in peers:
                here[peer].fill_(math.nan)

        def call() -> torch.Tensor:
            self._stream.fork()
            for peer in peers:
                memory.copy(here[peer], there[peer][peer], self._stream)
            self._stream.join()
            return here.view(-1, shape[2])

        return problem.gather("copies", lambda: call, poison)


def gather_then_matmul(problem: Problem) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        all_gather(problem.gathered, problem.a)
        return torch.matmul(problem.gathered, problem.weight.T, out=problem.out)

    return call


def gather_then_own_matmul(problem: Problem, *, retune: bool) -> Tuned:
    def call() -> torch.Tensor:
        all_gather(problem.gathered, problem.a)
        return persistent_matmul(problem.gathered, problem.weight.T, problem.out)

    return Tuned(call, check=lambda: None, name="ag_gemm benchmark, own GEMM", retune=retune)


def torch_fused(problem: Problem) -> Callable[[], torch.Tensor]:
    fused, group_name = fused_by_torch("fused_all_gather_matmul")
    columns = problem.weight.T

    def call() -> torch.Tensor:
        _, (product,) = fused(problem.a, [columns], gather_dim=0, group_name=group_name)
        return product

    return call


def baselines_of(problem: Problem, own: Tuned, ranks: Ranks) -> list[tuple[str, Prepare]]:
    """Return names and preparations of what computes the same, eager and as graphs."""
    baselines = {
        SEQUENCE: lambda: gather_then_matmul(problem),
        OWN_GEMM: own.eager,
        "torch fused": lambda: torch_fused(problem),
    }
    return [way for baseline in baselines.items() for way in in_both_ways(*baseline)]


def matmul_alone(problem: Problem) -> Callable[[], torch.Tensor]:
    return lambda: torch.matmul(problem.reference, problem.weight.T, out=problem.out)


def gather_alone(problem: Problem) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        all_gather(problem.gathered, problem.a)
        return problem.gathered

    return call


# ---- the program


def run_shape(
    shape: Shape, options: argparse.Namespace, plan: Plan, engines: CopyEngines, ranks: Ranks
) -> dict[str, Any]:
    """Return the record of one shape."""
    problem = Problem(shape, DTYPES[options.dtype], ranks)
    ours = Ours(problem, engines.backend, retune=options.retune)
    waiting = Ours(problem, engines.backend, retune=options.retune, collective=True)
    # Apart from the eager one, which a replay that fails would break too.
    captured = Ours(problem, engines.backend, retune=False) if ON_GPU else ours
    few = on_request(problem, engines.backend, retune=options.retune)
    own = gather_then_own_matmul(problem, retune=options.retune)
    arms = [
        problem.product(OURS, lambda: ours.eager(ours.op.shard)),
        problem.product("ours, copied", lambda: ours.eager(problem.a)),
        problem.product("ours, no overlap", lambda: waiting.eager(waiting.op.shard)),
        *(
            problem.product(*way)
            for name, each in few.items()
            for way in in_both_ways(name, lambda each=each: each.eager(each.op.shard))
        ),
        problem.product("ours, graph", lambda: captured.graph(captured.op.shard)),
        problem.product(f"ours, {BY_REPLAYS}", lambda: captured.by_replays(captured.op.shard)),
        problem.product("ours, copied, graph", lambda: captured.graph(problem.a)),
        *(problem.product(*way) for way in baselines_of(problem, own, ranks)),
        problem.product("GEMM", lambda: matmul_alone(problem)),
        engines.gather(problem),
        problem.gather(
            f"{COLLECTIVES} gather", lambda: gather_alone(problem), lambda: problem.gathered.fill_(math.nan)
        ),
    ]
    return measured_case(
        shape,
        plan,
        ranks,
        arms,
        refresh=problem.refresh,
        tuned={"tuned": ours, "tuned_own_gemm": own},
        operations=[each.op for each in (captured, *few.values(), waiting, ours)],
        dtype=options.dtype,
        rows_per_rank=problem.rows,
    )


def main() -> None:
    options = parse(__doc__, SIZES, lists=LISTS, default=DEFAULT, shared=("m",))

    def body(ranks: Ranks) -> int:
        elements = max(shape.m * shape.k for shape in options.shapes)
        # Open as long as the program runs, so that NVSHMEM is set up once.
        with open_symmetric_memory(None, options.backend, ranks.device, timeout_s=PATIENCE_S) as memory:
            engines = CopyEngines(memory, elements, DTYPES[options.dtype])
            return BENCHMARK.run(
                options,
                ranks,
                options.shapes,
                lambda shape, plan: run_shape(shape, options, plan, engines, ranks),
                symmetric_memory={"backend": memory.name, "reason": memory.reason},
            )

    run_on_ranks(body)


if __name__ == "__main__":
    main()
