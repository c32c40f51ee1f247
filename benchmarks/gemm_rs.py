"""GEMM + reduce-scatter: ours against cuBLAS and NCCL in sequence, torch's fused operation, the parts alone.

    ./launch.sh -m benchmarks.gemm_rs [--m M] [--n N] [--k K] [--shapes few|public|wide] [--fp8]
                                      [--by-stores] [--json FILE]

M is the number of rows, K the inner dimension of all ranks together: each multiplies [M, K / W] by
[K / W, N]. Ours is `GemmReduceScatter`, tuned first, inside `contextual_autotune(is_dist=True)`.

    ours                 eager; and as a CUDA graph
    ours, by replays     as a graph, tuned with objective="graph" in a session of its own
    ours, fp8            with --fp8: the same of rows in fp8 with scales; the rounding is not timed
    ours, by stores      with --by-stores: ours whose kernel stores to the peers
    ours, fp8, by stores with both: on Hopper by the warp-specialised kernel, too
    GEMM + NCCL          torch.matmul, then reduce_scatter_tensor (gloo on CPU ranks)
    own GEMM + NCCL      the same with `persistent_matmul`, tuned in this sequence
    torch fused          torch.ops.symm_mem.fused_matmul_reduce_scatter
    ..., graph           the last three as CUDA graphs
    GEMM                 torch.matmul alone
    NCCL scatter         reduce_scatter_tensor alone

Protocol and traps: `common/arms.py`. Without GPUs a tiny shape runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.arms import Arm, Plan
from benchmarks.common.cases import Benchmark, Ratio
from benchmarks.common.ranks import COLLECTIVES, ON_GPU, Ranks
from benchmarks.common.tuned import BY_REPLAYS, Tuned, in_both_ways
from benchmarks.operations.harness import (
    DTYPES,
    LIMIT_S,
    OURS,
    OURS_BY_STORES,
    PATIENCE_S,
    collective_arm,
    measured_case,
    parse,
)
from benchmarks.operations.peers import fused_by_torch, reduce_scatter
from benchmarks.operations.products import (
    BLOCK,
    Shape,
    explained_error,
    product_arm,
    relative_error,
    relative_error_of_blocks,
)
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.persistent_gemm import persistent_matmul
from dist_autotune.kernels.tensors import FP8
from dist_autotune.kernels.tp.operators import rows_in_fp8

PUBLIC = (
    Shape(8192, 8192, 28672),
    Shape(8192, 12288, 49152),
    Shape(8192, 4096, 11008),
    Shape(2048, 8192, 28672),
    Shape(512, 8192, 28672),
)
FEW = tuple(Shape(m, 8192, 28672) for m in (16, 32, 64, 128, 256, 512, 1024))
MODELS = ((4096, 14336), (8192, 28672), (16384, 53248))  # N and K
WIDE = tuple(Shape(m, n, k) for m in (16, 128, 1024, 4096, 16384) for n, k in MODELS)
LISTS = {"few": FEW, "public": PUBLIC, "wide": WIDE}
DEFAULT = PUBLIC[0] if ON_GPU else Shape(64, 48, 64)
SEQUENCE, OWN_GEMM = f"GEMM + {COLLECTIVES}", f"own GEMM + {COLLECTIVES}"
OURS_IN_FP8 = f"{OURS}, fp8"
STORES_IN_FP8 = f"{OURS_IN_FP8}, by stores"
OF_FP8 = 0.05  # the error of products whose factors are rounded to 4 bits, relative
SIZES = {"m": "rows", "n": "columns", "k": "inner dimension of all ranks together"}

BENCHMARK = Benchmark(
    op="gemm_rs",
    title="GEMM + reduce-scatter",
    case_title="M x N x K",
    ratios=[
        Ratio(of=SEQUENCE, to=OURS),
        Ratio(of=f"{SEQUENCE}, graph", to="ours, graph", name=f"graph: {SEQUENCE} / ours"),
        Ratio(of="ours, graph", to=f"ours, {BY_REPLAYS}", name="graph: judged eagerly / by replays"),
        Ratio(of=OWN_GEMM, to=OURS),
        Ratio(of="torch fused", to=OURS, name="fused / ours"),
        Ratio(of=OURS, to="GEMM"),
        Ratio(of=OURS, to=OURS_IN_FP8),
        Ratio(of=OURS_IN_FP8, to=STORES_IN_FP8),
        Ratio(of=OURS, to=OURS_BY_STORES),
    ],
    limit_s=LIMIT_S,
    needed=(OURS,),
)


class Problem:
    """The tensors of one shape on this rank, and what the right results are."""

    def __init__(self, shape: Shape, dtype: torch.dtype, ranks: Ranks) -> None:
        self.ranks, self.shape = ranks, shape
        k, options = shape.k // ranks.world_size, {"dtype": dtype, "device": ranks.device}
        self.a = torch.empty(shape.m, k, **options)
        self.weight = torch.randn(shape.n, k, **options)
        self.product = torch.empty(shape.m, shape.n, **options)
        self.out = torch.empty(shape.m // ranks.world_size, shape.n, **options)
        # Each rank's part is rounded once and the sum once; a ring adds in `dtype`, rounding at every hop.
        self.limit = explained_error(dtype, shape.k, roundings=max(2, ranks.world_size))
        self.gigaflop = 2e-9 * shape.m * shape.n * k
        self.sent_mb = 1e-6 * (shape.m - self.out.shape[0]) * shape.n * dtype.itemsize

    def refresh(self) -> None:
        """Take new random inputs."""
        self.a.normal_()
        torch.matmul(self.a, self.weight.T, out=self.product)

    def sum_error(self, result: torch.Tensor) -> float:
        def wanted(weight: torch.Tensor) -> torch.Tensor:
            right = torch.empty(len(self.out), len(weight), device=weight.device)
            reduce_scatter(right, self.a.float() @ weight.float().T)
            return right

        blocks = zip(result.split(BLOCK, dim=1), self.weight.split(BLOCK), strict=True)
        return relative_error_of_blocks((found, wanted(weight)) for found, weight in blocks)

    def product_error(self, result: torch.Tensor) -> float:
        return relative_error(result[:256], self.a[:256].float() @ self.weight.float().T)

    def arm(
        self,
        name: str,
        prepare: Callable[[], Callable[[], torch.Tensor]],
        *,
        of_product: bool = False,
        more_error: float = 0.0,
    ) -> Arm:
        """Return an arm that computes this rank's rows of the sum, or of the product alone."""
        written, error = (self.product, self.product_error) if of_product else (self.out, self.sum_error)
        checked = {"error": error, "limit": self.limit + more_error}
        return product_arm(name, prepare, written, **checked, gigaflop=self.gigaflop)


class InFp8(Tuned):
    """Ours of the same factors in fp8, with a scale for each row."""

    def __init__(self, problem: Problem, options: argparse.Namespace, *, by_stores: bool) -> None:
        m, n = problem.shape.m, problem.shape.n
        place = {"backend": options.backend, "timeout_s": PATIENCE_S}
        self.op = op = GemmReduceScatter(m, n, FP8, by_stores=by_stores, **place)
        self._problem, self._name = problem, STORES_IN_FP8 if by_stores else OURS_IN_FP8
        self._a, (weight, scale_weight) = (
            rows_in_fp8(each.bfloat16()) for each in (problem.a, problem.weight)
        )

        def call() -> torch.Tensor:
            a, scale_a = self._a
            return op(a, weight, problem.out, scale_a=scale_a, scale_weight=scale_weight)

        name = f"gemm_rs benchmark, {self._name}"
        super().__init__(call, check=op.check, name=name, retune=options.retune)

    def arms(self) -> list[Arm]:
        ways = {self._name: self.eager, f"{self._name}, graph": self.graph}
        return [self._problem.arm(name, way, more_error=OF_FP8) for name, way in ways.items()]

    def refresh(self) -> None:
        """Take the inputs of the problem, in place, for graphs."""
        for held, new in zip(self._a, rows_in_fp8(self._problem.a.bfloat16()), strict=True):
            held.copy_(new)


class ByStores(Tuned):
    """Ours whose kernel stores its sums into the peers' memory."""

    def __init__(self, problem: Problem, options: argparse.Namespace) -> None:
        place = {"backend": options.backend, "timeout_s": PATIENCE_S, "collective": False}
        m, n, self._problem = problem.shape.m, problem.shape.n, problem
        self.op = op = GemmReduceScatter(m, n, DTYPES[options.dtype], by_stores=True, **place)

        def call() -> torch.Tensor:
            return op(problem.a, problem.weight, problem.out)

        super().__init__(call, check=op.check, name="gemm_rs benchmark, by stores", retune=options.retune)

    def arms(self) -> list[Arm]:
        ways = {OURS_BY_STORES: self.eager, f"{OURS_BY_STORES}, graph": self.graph}
        return [self._problem.arm(name, way) for name, way in ways.items()]


# ---- baselines


def matmul_alone(problem: Problem) -> Callable[[], torch.Tensor]:
    return lambda: torch.matmul(problem.a, problem.weight.T, out=problem.product)


def then_scatter(problem: Problem, multiply: Callable[[], object]) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        multiply()
        reduce_scatter(problem.out, problem.product)
        return problem.out

    return call


def own_then_scatter(problem: Problem, *, retune: bool) -> Tuned:
    call = then_scatter(problem, lambda: persistent_matmul(problem.a, problem.weight.T, problem.product))
    return Tuned(call, check=lambda: None, name="gemm_rs benchmark, own GEMM", retune=retune)


def scatter_alone(problem: Problem) -> torch.Tensor:
    """Scatter the product that the refresh left, or another arm since."""
    reduce_scatter(problem.out, problem.product)
    return problem.out


def torch_fused(problem: Problem) -> Callable[[], torch.Tensor]:
    fused, group_name = fused_by_torch("fused_matmul_reduce_scatter")
    columns = problem.weight.T
    return lambda: fused(problem.a, columns, "sum", 0, group_name)


# ---- the program


def run_shape(shape: Shape, options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of one shape."""
    dtype = DTYPES[options.dtype]
    problem = Problem(shape, dtype, ranks)
    op = GemmReduceScatter(shape.m, shape.n, dtype, backend=options.backend, timeout_s=PATIENCE_S)
    ways = {"tuned_fp8": False} | ({"tuned_fp8_by_stores": True} if options.by_stores else {})
    in_fp8 = {name: InFp8(problem, options, by_stores=stores) for name, stores in ways.items() if options.fp8}
    further: dict[str, InFp8 | ByStores] = {**in_fp8}
    if options.by_stores:
        further["tuned_by_stores"] = ByStores(problem, options)

    def call() -> torch.Tensor:
        return op(problem.a, problem.weight, problem.out)

    ours = Tuned(call, check=op.check, name="gemm_rs benchmark", retune=options.retune)
    own = own_then_scatter(problem, retune=options.retune)
    baselines = {
        SEQUENCE: lambda: then_scatter(problem, matmul_alone(problem)),
        OWN_GEMM: own.eager,
        "torch fused": lambda: torch_fused(problem),
    }
    arms = [
        problem.arm(OURS, ours.eager),
        problem.arm("ours, graph", ours.graph),
        problem.arm(f"ours, {BY_REPLAYS}", ours.by_replays),
        *(arm for each in further.values() for arm in each.arms()),
        *(problem.arm(*way) for baseline in baselines.items() for way in in_both_ways(*baseline)),
        problem.arm("GEMM", lambda: matmul_alone(problem), of_product=True),
        collective_arm(
            f"{COLLECTIVES} scatter",
            lambda: scatter_alone(problem),
            megabytes=problem.sent_mb,
            poison=lambda: torch.matmul(problem.a, problem.weight.T, out=problem.product),
        ),
    ]

    def refresh() -> None:
        problem.refresh()
        for each in in_fp8.values():
            each.refresh()

    return measured_case(
        shape,
        plan,
        ranks,
        arms,
        refresh=refresh,
        tuned={"tuned": ours, "tuned_own_gemm": own, **further},
        operations=[*(each.op for each in further.values()), op],
        dtype=options.dtype,
        symmetric_memory=op.backend,
    )


def main() -> None:
    def add_ways(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--fp8", action="store_true", help="time ours of rows in fp8, too")
        parser.add_argument(
            "--by-stores", action="store_true", help="time ours that stores to the peers, too"
        )

    options = parse(__doc__, SIZES, lists=LISTS, default=DEFAULT, shared=("m", "k"), add_more=add_ways)
    if options.fp8 and options.dtype != "bf16":
        raise SystemExit(f"--fp8 has results in bf16, and --dtype is {options.dtype}; leave one of them out")
    BENCHMARK.start(options, options.shapes, run_shape)


if __name__ == "__main__":
    main()
