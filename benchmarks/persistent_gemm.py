"""persistent_matmul, every variant, against cuBLAS (torch.matmul), eager and as CUDA graphs, on one GPU.

    ./launch.sh --nproc 1 -m benchmarks.persistent_gemm [--m M --n N --k K]
            [--shapes table|ragged|tests|all] [--parts] [--dtype bf16|fp16|fp8] [--json FILE]

    cuBLAS                torch.matmul(a, b, out=out); of fp8 torch._scaled_mm, with fast accumulation
    ours                  variant="auto", tuned first, by one session of contextual_autotune for each shape
    pipelined, ...        one variant, tuned among its own candidates
    ..., graph            the same as a CUDA graph of one call
    --parts               cooperative and ping-pong as arms of their own

a is [M, K] by rows; b is [K, N] by columns, which is a weight [N, K] as layers hold it, or by rows with
--b-rows. Inputs are random normal and new in every round. Protocol and traps: `common/arms.py`. What a shape
is tuned over is the same for all shapes. With fp8, each row of a and column of b has a scale, and b lies by
columns. Without a GPU a tiny shape runs in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.arms import Arm, Plan, measure
from benchmarks.common.cases import Benchmark, Ratio, case_record
from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks
from benchmarks.common.records import add_run_options
from benchmarks.common.tuned import Tuned, in_graph, tuned_record
from benchmarks.operations.products import (
    BLOCK,
    Shape,
    explained_error,
    product_arm,
    relative_error_of_blocks,
)
from dist_autotune import ContextualAutotuner
from dist_autotune.kernels.matrices import as_matrix
from dist_autotune.kernels.persistent_gemm import PARTS, VARIANTS, persistent_matmul

FP8 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8}
LIMIT_S = 1800.0  # for everything about one shape, tuning and compiling included
CUBLAS, OURS, WAYS = "cuBLAS", "ours", ("", ", graph")

Call = Callable[[], torch.Tensor]


TABLE = tuple(Shape(8192, 8192, k) for k in (512, 1024, 2048, 4096, 8192, 16384))
TESTS = (Shape(208, 416, 304), Shape(2000, 1000, 2000))
# Ragged and skinny; sizes that TMA can address (multiples of 8) and, at the end, some that it cannot.
RAGGED = (
    Shape(16, 8192, 8192),
    Shape(64, 14336, 4096),
    Shape(128, 4096, 14336),
    Shape(200, 6144, 4096),
    Shape(304, 5120, 5120),
    Shape(512, 28672, 4096),
    Shape(720, 3072, 3072),
    Shape(1000, 8192, 1024),
    Shape(1304, 2056, 7168),
    Shape(1536, 1536, 1536),
    Shape(2040, 4104, 1368),
    Shape(2500, 2504, 2504),
    Shape(3000, 11008, 4096),
    Shape(3333, 3336, 3336),
    Shape(4096, 152, 8192),
    Shape(4100, 4104, 4104),
    Shape(5000, 5000, 400),
    Shape(6000, 1024, 16384),
    Shape(8192, 320, 8192),
    Shape(8200, 8200, 520),
    Shape(12345, 1032, 2056),
    Shape(16384, 64, 4096),
    Shape(30000, 768, 768),
    Shape(65536, 256, 128),
    Shape(1021, 1021, 1021),
    Shape(4001, 2003, 999),
)
LISTS = {"table": TABLE, "tests": TESTS, "ragged": RAGGED, "all": TABLE + TESTS + RAGGED}
DEFAULT = Shape(8192, 8192, 4096) if ON_GPU else Shape(48, 40, 32)


class Problem:
    """The tensors of one shape, and how far from the right product a result may be."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, *, b_rows: bool) -> None:
        options = {"dtype": dtype, "device": device}
        self.a = torch.empty(shape.m, shape.k, **options)
        self.b = (
            torch.empty(shape.k, shape.n, **options) if b_rows else torch.empty(shape.n, shape.k, **options).T
        )
        is_fp8 = dtype == FP8
        self.out = torch.empty(shape.m, shape.n, device=device, dtype=torch.bfloat16 if is_fp8 else dtype)
        self.scale_a, self.scale_b = (
            torch.ones(shape.m, 1, device=device),
            torch.ones(1, shape.n, device=device),
        )
        self.scales = {"scale_a": self.scale_a, "scale_b": self.scale_b} if is_fp8 else {}
        self.limit = explained_error(self.out.dtype, shape.k)
        if is_fp8:  # each instruction, of 32 products, cuts off what is behind 13 bits
            self.limit += shape.k / 32 * 2**-13
        self.gigaflop = 2e-9 * shape.m * shape.n * shape.k
        self.tuned: list[ContextualAutotuner[..., Any]] = []

    def refresh(self) -> None:
        """Take new random inputs."""
        for operand in (self.a, self.b):
            operand.copy_(torch.randn(operand.shape, dtype=torch.bfloat16, device=operand.device))
        for scale in self.scales.values():
            scale.uniform_(0.5, 2)

    def error(self, result: torch.Tensor) -> float:
        columns = self.b.float() * self.scale_b
        blocks = zip(*(tensor.split(BLOCK) for tensor in (result, self.a, self.scale_a)), strict=True)
        return relative_error_of_blocks(
            (found, rows.float() @ columns * scales) for found, rows, scales in blocks
        )

    def arm(self, name: str, prepare: Callable[[], Call]) -> Arm:
        of_product = {"error": self.error, "limit": self.limit, "gigaflop": self.gigaflop}
        return product_arm(name, prepare, self.out, **of_product)

    def cublas(self) -> Call:
        if self.scales:
            options = {**self.scales, "out_dtype": self.out.dtype, "use_fast_accum": True, "out": self.out}
            return lambda: torch._scaled_mm(self.a, self.b, **options)
        return lambda: torch.matmul(self.a, self.b, out=self.out)

    def ours(self, variant: str, *, retune: bool) -> Call:
        """Tune in one session; return the call as a user makes it, which then takes the short way."""

        def call() -> torch.Tensor:
            return persistent_matmul(self.a, self.b, self.out, variant, **self.scales)

        name = f"persistent_gemm benchmark {variant}"
        tuned = Tuned(call, check=lambda: None, name=name, retune=retune)
        self.tuned.append(tuned.call)
        return tuned.then(call)()


def arms_of(problem: Problem, options: argparse.Namespace) -> list[Arm]:
    """Return what is timed for one shape."""

    def ours(variant: str = "auto") -> Callable[[], Call]:
        return lambda: problem.ours(variant, retune=options.retune)

    arms = [problem.arm(CUBLAS, problem.cublas), problem.arm(OURS, ours())]
    if ON_GPU:  # elsewhere all variants are one body
        kinds = [name for name in VARIANTS if name != "auto"]
        arms += [problem.arm(name, ours(name)) for name in (*kinds, *(PARTS if options.parts else ()))]
    arms.append(problem.arm(f"{CUBLAS}, graph", in_graph(problem.cublas)))
    arms.append(problem.arm(f"{OURS}, graph", in_graph(ours())))
    return arms


def what_was_tuned(problem: Problem) -> dict[str, Any]:
    """Return what the record says of the tuning of all arms of a shape."""
    reports = [each.report for each in problem.tuned if each.report is not None]
    contexts = [context for report in reports for context in report.contexts]
    record = tuned_record(reports, [(context, str(context.config)) for context in contexts])
    matrices = {"a": problem.a, "b": problem.b, "out": problem.out}
    copied = [name for name, matrix in matrices.items() if as_matrix(matrix) is None]
    for told, context in zip(record["contexts"], contexts, strict=True):
        told["key"] = [str(part) for part in context.key]
        told["copied"] = copied if context.kernel == "gemm" else []  # through scratch memory
    return record


def run_shape(shape: Shape, options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of one shape."""
    problem = Problem(shape, DTYPES[options.dtype], ranks.device, b_rows=options.b_rows)
    measured = measure(arms_of(problem, options), ranks, problem.refresh, plan)
    return case_record(
        shape,
        measured,
        ranks,
        tuned=what_was_tuned(problem),
        dtype=options.dtype,
        b="rows" if options.b_rows else "columns",
    )


def parse() -> argparse.Namespace:
    parser = new_parser(__doc__)
    for name, text in (("m", "rows of a"), ("n", "columns of b"), ("k", "inner dimension")):
        parser.add_argument(f"--{name}", type=int, default=getattr(DEFAULT, name), help=text)
    parser.add_argument("--shapes", choices=LISTS, help="a list of shapes, instead of one")
    parser.add_argument("--parts", action="store_true", help="time parts of variants")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the operands")
    parser.add_argument("--b-rows", action="store_true", help="b contiguous by rows, not by columns")
    parser.add_argument("--retune", action="store_true", help="ignore what the cache holds")
    add_run_options(parser, warm_ups=120)
    options = parser.parse_args()
    if options.dtype == "fp8" and options.b_rows:
        parser.error("--dtype fp8 --b-rows: operands in fp8 lie along K")
    if options.shapes and not ON_GPU:
        parser.error(f"--shapes {options.shapes} needs a GPU: the interpreter would take days")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("this benchmark is for one GPU: ./launch.sh --nproc 1 ...")
    options.shapes = LISTS[options.shapes] if options.shapes else (Shape(options.m, options.n, options.k),)
    return options


def main() -> None:
    options = parse()
    Benchmark(
        op="persistent_gemm",
        title="Persistent GEMM",
        case_title="M x N x K",
        ratios=[Ratio(of=f"{CUBLAS}{way}", to=f"{OURS}{way}") for way in WAYS],
        limit_s=LIMIT_S,
        needed=(OURS,),
    ).start(options, options.shapes, run_shape)


if __name__ == "__main__":
    main()
