"""GEMM + all-reduce, and with residual and RMSNorm: ours against cuBLAS and NCCL, and torch's all-reduces.

    ./launch.sh -m benchmarks.gemm_ar [--m M] [--n N] [--k K] [--shapes decode|prefill]
                                      [--json FILE]

M is the number of rows, K the inner dimension of all ranks together: each multiplies [M, K / W] by
[K / W, N]. Ours is `GemmAllReduce`, tuned first, inside `contextual_autotune(is_dist=True)`.

    ours                        eager; and as a CUDA graph
    ours, by replays            as a graph, tuned with objective="graph" in a session of its own
    ours, WAY, graph            the same with a way that is fixed; its kernel tuned
    GEMM + NCCL                 torch.matmul, then all_reduce (gloo on CPU ranks)
    torch one-shot, two-shot    torch.matmul into symmetric memory, then torch.ops.symm_mem's all-reduce
    ..., norm                   the same with residual and RMSNorm: ours in one call, else by torch
    ..., graph                  as CUDA graphs
    GEMM, graph                 torch.matmul alone

Protocol and traps: `common/arms.py`. Without GPUs a tiny shape runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.arms import Arm, Plan
from benchmarks.common.cases import Benchmark, Ratio
from benchmarks.common.ranks import COLLECTIVES, ON_GPU, Ranks
from benchmarks.common.tuned import BY_REPLAYS, Tuned, in_both_ways
from benchmarks.operations.harness import DTYPES, LIMIT_S, OURS, PATIENCE_S, measured_case, parse
from benchmarks.operations.peers import fused_by_torch
from benchmarks.operations.products import Shape, explained_error, product_arm, relative_error
from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.gemm_ar.ways import WAYS

EPS = 1e-5
Call = Callable[[], torch.Tensor]


DECODE = tuple(Shape(m, 8192, k) for k in (28672, 8192) for m in (1, 8, 64, 256))
PREFILL = tuple(Shape(m, 8192, k) for k in (28672, 8192) for m in (1024, 4096, 16384))
DEFAULT = DECODE[2] if ON_GPU else Shape(6, 48, 64)
SEQUENCE = f"GEMM + {COLLECTIVES}"
SIZES = {"m": "rows", "n": "columns", "k": "inner dimension of all ranks together"}
TORCH = {"torch one-shot": "one_shot_all_reduce", "torch two-shot": "two_shot_all_reduce_"}

BENCHMARK = Benchmark(
    op="gemm_ar",
    title="GEMM + all-reduce",
    case_title="M x N x K",
    ratios=[
        Ratio(of=f"{of}{norm}{graph}", to=f"{OURS}{norm}{graph}")
        for of in (SEQUENCE, *TORCH)
        for norm in ("", ", norm")
        for graph in ("", ", graph")
        if graph or of == SEQUENCE
    ]
    + [
        Ratio(
            of=f"{OURS}{norm}, graph",
            to=f"{OURS}{norm}, {BY_REPLAYS}",
            name=f"graph{norm}: judged eagerly / by replays",
        )
        for norm in ("", ", norm")
    ],
    limit_s=LIMIT_S,
    needed=(OURS,),
)


class Problem:
    """The tensors of one shape on this rank, and what the right results are."""

    def __init__(self, shape: Shape, dtype: torch.dtype, ranks: Ranks) -> None:
        k, options = shape.k // ranks.world_size, {"dtype": dtype, "device": ranks.device}
        self.a = torch.empty(shape.m, k, **options)
        self.weight = torch.randn(shape.n, k, **options)
        self.out = torch.empty(shape.m, shape.n, **options)
        # As large as a sum, equal on all ranks.
        self.residual = shape.k**0.5 * torch.randn(shape.m, shape.n, **options)
        self.norm_weight = torch.randn(shape.n, **options)
        for equal in (self.residual, self.norm_weight):
            dist.broadcast(equal, 0)
        # Each rank's part is rounded once and the sum once; a ring adds in `dtype`, rounding at every hop.
        # With residual, norm and product with the weight there are three roundings more.
        self.limit = explained_error(dtype, shape.k, roundings=max(2, ranks.world_size) + 3)
        self.gigaflop = 2e-9 * shape.m * shape.n * k

    def sum_of_all(self) -> torch.Tensor:
        """Return the right sum, in float32."""
        right = self.a.float() @ self.weight.float().T
        dist.all_reduce(right)
        return right

    def sum_error(self, result: torch.Tensor) -> float:
        return relative_error(result, self.sum_of_all())

    def norm_error(self, result: torch.Tensor) -> float:
        sums = self.sum_of_all() + self.residual.float()
        right = torch.nn.functional.rms_norm(sums, sums.shape[-1:], self.norm_weight.float(), EPS)
        return relative_error(result, right)

    def product_error(self, result: torch.Tensor) -> float:
        return relative_error(result, self.a.float() @ self.weight.float().T)

    def arm(self, name: str, prepare: Callable[[], Call], error: Callable[[torch.Tensor], float]) -> Arm:
        of_product = {"limit": self.limit, "gigaflop": self.gigaflop}
        return product_arm(name, prepare, self.out, error=error, **of_product)


# ---- what is timed


def ours(problem: Problem, op: GemmAllReduce, *, norm: bool) -> Call:
    p = problem
    if norm:
        return lambda: op(p.a, p.weight, p.out, p.residual, p.norm_weight, EPS)[0]
    return lambda: op(p.a, p.weight, p.out)


def matmul_alone(problem: Problem) -> Call:
    return lambda: torch.matmul(problem.a, problem.weight.T, out=problem.out)


def then_all_reduce(problem: Problem) -> Call:
    def call() -> torch.Tensor:
        torch.matmul(problem.a, problem.weight.T, out=problem.out)
        dist.all_reduce(problem.out)
        return problem.out

    return call


def by_torch(problem: Problem, name: str) -> Call:
    """Multiply into torch's symmetric memory and all-reduce there; what is in place has its copy."""
    all_reduce, group_name = fused_by_torch(name)
    import torch.distributed._symmetric_memory as symmetric_memory

    part = symmetric_memory.empty(problem.out.shape, dtype=problem.out.dtype, device=problem.out.device)
    symmetric_memory.rendezvous(part, group_name)

    def call() -> torch.Tensor:
        torch.matmul(problem.a, problem.weight.T, out=part)
        return all_reduce(part, "sum", group_name)

    return call


def then_norm(problem: Problem, call: Call) -> Call:
    """Return the call with what follows it in a transformer, by torch."""
    size = problem.out.shape[-1:]

    def whole() -> torch.Tensor:
        sums = call() + problem.residual
        return torch.nn.functional.rms_norm(sums, size, problem.norm_weight, EPS)

    return whole


# ---- the program


def run_shape(shape: Shape, options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of one shape."""
    dtype = DTYPES[options.dtype]
    problem, tuned = Problem(shape, dtype, ranks), {}
    ways = (None, *WAYS)
    ops = {
        way: GemmAllReduce(shape.m, shape.n, dtype, backend=options.backend, timeout_s=PATIENCE_S, way=way)
        for way in ways
    }
    arms = []
    for ending, error in (("", problem.sum_error), (", norm", problem.norm_error)):
        norm = bool(ending)
        for way, op in ops.items():
            name = f"{OURS}{f', {way}' if way else ''}{ending}"
            call = ours(problem, op, norm=norm)
            one = Tuned(call, check=op.check, name=f"gemm_ar benchmark, {name}", retune=options.retune)
            tuned[name] = one
            if way is None:
                arms.append(problem.arm(name, one.eager, error))
                arms.append(problem.arm(f"{name}, {BY_REPLAYS}", one.by_replays, error))
            arms.append(problem.arm(f"{name}, graph", one.graph, error))
        baselines: dict[str, Callable[[], Call]] = {
            SEQUENCE: lambda: then_all_reduce(problem),
            **{name: lambda name=name: by_torch(problem, TORCH[name]) for name in TORCH},
        }
        for name, make in baselines.items():
            prepare = (lambda make=make: then_norm(problem, make())) if norm else make
            arms += [problem.arm(*way, error) for way in in_both_ways(f"{name}{ending}", prepare)]
    arms += [
        problem.arm(*way, problem.product_error)
        for way in in_both_ways("GEMM", lambda: matmul_alone(problem))
    ]
    return measured_case(
        shape,
        plan,
        ranks,
        arms,
        refresh=lambda: problem.a.normal_(),
        tuned={"tuned" if name == OURS else f"tuned {name}": one for name, one in tuned.items()},
        operations=list(ops.values()),
        dtype=options.dtype,
        symmetric_memory=ops[None].backend,
    )


def main() -> None:
    lists = {"decode": DECODE, "prefill": PREFILL}
    options = parse(__doc__, SIZES, lists=lists, default=DEFAULT, shared=("k",))

    BENCHMARK.start(options, options.shapes, run_shape)


if __name__ == "__main__":
    main()
