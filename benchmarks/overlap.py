"""A GEMM beside an all-reduce: what tuning it in the step makes of the step.

    ./launch.sh -m benchmarks.overlap [--m M] [--n N] [--k K] [--mib MIB] [--shapes published]
                                      [--json FILE]

The step is that of `examples/overlap.py`, and so are the candidates: tiles and numbers of programs. It is
tuned three times, each time from nothing. Then all picks are timed, interleaved:

    alone, step          the pick of tuning the GEMM alone, in the whole step
    kernel, step         the pick by the GEMM's own time in the step
    run, step            the pick by the run time of the step, objective="thunk"
    alone, GEMM          the same kernels with nothing beside them; and kernel, run
    cuBLAS, step         torch.matmul in place of the kernel
    all-reduce           nothing beside it

Protocol and traps: `common/arms.py`. Without GPUs a tiny shape runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.arms import Arm, Plan, measure
from benchmarks.common.cases import Benchmark, Ratio, case_record
from benchmarks.common.examples import load_example
from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks
from benchmarks.common.records import add_run_options
from benchmarks.common.tuned import tuned_record
from benchmarks.operations.products import explained_error, product_arm, relative_error

LIMIT_S = 600.0  # for everything about one case, tuning and compiling included
PICKS = ("alone", "kernel", "run")  # the kernel's three tunings of the example, in its order


@dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    mib: float  # of the all-reduce, on each rank

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}, {self.mib:g} MiB"


PUBLISHED = (Case(8192, 3584, 8192, 256), Case(8192, 8192, 4096, 512), Case(4096, 4096, 4096, 128))
DEFAULT = PUBLISHED[0] if ON_GPU else Case(48, 40, 32, 0.25)


def product(step: Any, name: str, call: Callable[[], object]) -> Arm:
    """Return the arm of a call that leaves the product in the step's `c`."""
    m, n, k = *step.c.shape, step.a.shape[1]

    def error(result: torch.Tensor) -> float:
        return relative_error(result, step.a.float() @ step.b.float().T)

    def run() -> torch.Tensor:
        call()
        return step.c

    of_product = {"limit": explained_error(step.c.dtype, k), "gigaflop": 2e-9 * m * n * k}
    return product_arm(name, lambda: run, step.c, error=error, **of_product)


def arms_of(step: Any, configs: dict[str, Any]) -> list[Arm]:
    """Return the arms: each config in the step and without it, cuBLAS in the step, the all-reduce."""

    def all_reduce() -> torch.Tensor:
        dist.all_reduce(step.bucket, op=dist.ReduceOp.MAX)
        return step.bucket

    def beside_cublas() -> None:
        work = dist.all_reduce(step.bucket, op=dist.ReduceOp.MAX, async_op=True)
        torch.matmul(step.a, step.b.T, out=step.c)
        work.wait()

    return [
        *(
            product(step, f"{name}, step", lambda config=config: step(config))
            for name, config in configs.items()
        ),
        *(
            product(step, f"{name}, GEMM", lambda config=config: step.gemm(config))
            for name, config in configs.items()
        ),
        product(step, "cuBLAS, step" if ON_GPU else "torch, step", beside_cublas),
        Arm(
            name="all-reduce",
            prepare=lambda: all_reduce,
            error=lambda result: float(result.isnan().any()),
            limit=0.0,
            work=1e-6 * step.bucket.numel() * step.bucket.element_size(),
            rate="GB/s",
        ),
    ]


def run_case(case: Case, options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of one case."""
    example = load_example("overlap")
    step = example.Step(case.m, case.n, case.k, case.mib, ranks.device)

    def refresh() -> None:
        for tensor in (step.a, step.b, step.bucket):
            tensor.normal_()

    reports = example.tuned_three_ways(step, retune=True)
    configs = dict(zip(PICKS, example.picks_of(reports).values(), strict=True))
    measured = measure(arms_of(step, configs), ranks, refresh, plan)
    texts = [
        (context, f"{name}: {example.label(context.config)}")
        for name, report in zip(PICKS, reports.values(), strict=True)
        for context in report.contexts
    ]
    return case_record(case, measured, ranks, tuned=tuned_record(list(reports.values()), texts))


def parse() -> argparse.Namespace:
    parser = new_parser(__doc__)
    for name, text in (("m", "rows of the product"), ("n", "its columns"), ("k", "inner dimension")):
        parser.add_argument(f"--{name}", type=int, default=getattr(DEFAULT, name), help=text)
    parser.add_argument("--mib", type=float, default=DEFAULT.mib, help="of the all-reduce on each rank")
    parser.add_argument("--shapes", choices=["published"], help="three published cases, instead of one")
    add_run_options(parser, warm_ups=120)
    options = parser.parse_args()
    if options.shapes and not ON_GPU:
        parser.error("--shapes published needs GPUs: the interpreter would take days")
    options.cases = PUBLISHED if options.shapes else (Case(options.m, options.n, options.k, options.mib),)
    return options


def main() -> None:
    options = parse()
    Benchmark(
        op="overlap",
        title="A GEMM beside an all-reduce",
        case_title="M x N x K, all-reduce",
        ratios=[
            Ratio(name="step: alone / run", of="alone, step", to="run, step"),
            Ratio(name="step: kernel / run", of="kernel, step", to="run, step"),
            Ratio(name="GEMM: run / alone", of="run, GEMM", to="alone, GEMM"),
        ],
        limit_s=LIMIT_S,
    ).start(options, options.cases, run_case)


if __name__ == "__main__":
    main()
