"""GEMM + reduce-scatter: ours against cuBLAS and NCCL in sequence, torch's fused operation, the parts alone.

    ./launch.sh -m benchmarks.operations.gemm_rs [--m M] [--n N] [--k K] [--shapes public] [--json FILE]

M is the number of rows, K the inner dimension of all ranks together: each multiplies [M, K / W] by
[K / W, N]. Ours is `GemmReduceScatter`, tuned first, inside `contextual_autotune(is_dist=True)`.

    ours                 eager; and as a CUDA graph
    GEMM + NCCL          torch.matmul, then reduce_scatter_tensor (gloo on CPU ranks); and as a CUDA graph
    torch fused          torch.ops.symm_mem.fused_matmul_reduce_scatter
    GEMM                 torch.matmul alone
    NCCL scatter         reduce_scatter_tensor alone

Protocol and traps: `common/arms.py`. Without GPUs a tiny shape runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.arms import Arm
from benchmarks.common.ranks import ON_GPU, Ranks, Unsupported, run_on_ranks
from benchmarks.common.tuned import Tuned, capture
from benchmarks.operations.harness import (
    DTYPES,
    OURS,
    PATIENCE_S,
    collective_arm,
    measured_case,
    new_record,
    parse,
    reduce_scatter,
    run_shapes,
)
from dist_autotune.kernels.gemm_rs import GemmReduceScatter


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    k: int  # of all ranks

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


PUBLIC = (
    Shape(8192, 8192, 28672),
    Shape(8192, 12288, 49152),
    Shape(8192, 4096, 11008),
    Shape(2048, 8192, 28672),
    Shape(512, 8192, 28672),
)
DEFAULT = PUBLIC[0] if ON_GPU else Shape(64, 48, 64)
SIZES = {"m": "rows", "n": "columns", "k": "inner dimension of all ranks together"}


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
        roundings = max(2, ranks.world_size)
        explained = shape.k**0.5 * torch.finfo(torch.float32).eps
        self.limit = roundings * torch.finfo(dtype).eps + explained
        self.gigaflop = 2e-9 * shape.m * shape.n * k
        self.sent_mb = 1e-6 * (shape.m - self.out.shape[0]) * shape.n * dtype.itemsize

    def refresh(self) -> None:
        """Take new random inputs."""
        self.a.normal_()
        torch.matmul(self.a, self.weight.T, out=self.product)

    def sum_error(self, result: torch.Tensor) -> float:
        """Return the error against float32, a block of columns at a time: the whole could be too large."""
        squares = torch.zeros(2, dtype=torch.float64, device=result.device)
        for block, weight in zip(result.split(1024, dim=1), self.weight.split(1024), strict=True):
            right = torch.empty(block.shape, device=block.device)
            reduce_scatter(right, self.a.float() @ weight.float().T)
            squares += torch.stack([(block.float() - right).square().sum(), right.square().sum()]).double()
        return float((squares[0] / squares[1]).sqrt())

    def product_error(self, result: torch.Tensor) -> float:
        right = self.a[:256].float() @ self.weight.float().T
        return float((result[:256].float() - right).norm() / right.norm())

    def arm(
        self, name: str, prepare: Callable[[], Callable[[], torch.Tensor]], *, of_product: bool = False
    ) -> Arm:
        """Return an arm that computes this rank's rows of the sum, or of the product alone."""
        written = self.product if of_product else self.out
        return Arm(
            name=name,
            prepare=prepare,
            error=self.product_error if of_product else self.sum_error,
            limit=self.limit,
            work=self.gigaflop,
            rate="TFLOP/s",
            poison=lambda: written.fill_(math.nan),
        )


# ---- baselines


def matmul_alone(problem: Problem) -> Callable[[], torch.Tensor]:
    return lambda: torch.matmul(problem.a, problem.weight.T, out=problem.product)


def matmul_then_scatter(problem: Problem) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        torch.matmul(problem.a, problem.weight.T, out=problem.product)
        reduce_scatter(problem.out, problem.product)
        return problem.out

    return call


def matmul_then_scatter_in_graph(problem: Problem) -> Callable[[], torch.Tensor]:
    call = matmul_then_scatter(problem)
    call()  # what is set up at a first call is no part of the graph
    return capture(call)


def scatter_alone(problem: Problem) -> torch.Tensor:
    """Scatter the product that the refresh left, or another arm since."""
    reduce_scatter(problem.out, problem.product)
    return problem.out


def torch_fused(problem: Problem) -> Callable[[], torch.Tensor]:
    if not ON_GPU:
        raise Unsupported("torch's symmetric memory needs GPUs")
    import torch.distributed._symmetric_memory  # registers the operation

    group = dist.group.WORLD
    assert group is not None
    fused, columns = torch.ops.symm_mem.fused_matmul_reduce_scatter, problem.weight.T
    return lambda: fused(problem.a, columns, "sum", 0, group.group_name)


# ---- the program


def run_shape(shape: Shape, options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Return the record of one shape."""
    dtype = DTYPES[options.dtype]
    problem = Problem(shape, dtype, ranks)
    op = GemmReduceScatter(shape.m, shape.n, dtype, backend=options.backend, timeout_s=PATIENCE_S)

    def call() -> torch.Tensor:
        return op(problem.a, problem.weight, problem.out)

    ours = Tuned(call, check=op.check, name="gemm_rs benchmark", retune=options.retune)
    collectives = ranks.collectives
    arms = [
        problem.arm(OURS, ours.eager),
        problem.arm("ours, graph", ours.graph),
        problem.arm(f"GEMM + {collectives}", lambda: matmul_then_scatter(problem)),
        problem.arm(f"GEMM + {collectives}, graph", lambda: matmul_then_scatter_in_graph(problem)),
        problem.arm("torch fused", lambda: torch_fused(problem)),
        problem.arm("GEMM", lambda: matmul_alone(problem), of_product=True),
        collective_arm(
            f"{collectives} scatter",
            lambda: scatter_alone(problem),
            megabytes=problem.sent_mb,
            poison=lambda: torch.matmul(problem.a, problem.weight.T, out=problem.product),
        ),
    ]
    return measured_case(
        shape,
        options,
        ranks,
        arms,
        refresh=problem.refresh,
        tuned={"tuned": ours},
        operations=[op],
        symmetric_memory=op.backend,
    )


def main() -> None:
    options = parse(__doc__, SIZES, public=PUBLIC, default=DEFAULT, shared=("m", "k"))

    def body(ranks: Ranks) -> int:
        sequence = f"GEMM + {ranks.collectives}"
        ratios = [
            (f"{sequence} / ours", sequence, OURS),
            (f"graph: {sequence} / ours", f"{sequence}, graph", "ours, graph"),
            ("fused / ours", "torch fused", OURS),
            ("ours / GEMM", OURS, "GEMM"),
        ]
        record = new_record(
            options, ranks, op="gemm_rs", title="GEMM + reduce-scatter", case_title="M x N x K", ratios=ratios
        )
        return run_shapes(record, options, ranks, lambda shape: run_shape(shape, options, ranks))

    run_on_ranks(body)


if __name__ == "__main__":
    main()
