"""elementwise_add against torch.add and the bandwidth of a copy, on one GPU.

    ./launch.sh --nproc 1 -m benchmarks.operations.elementwise_add [--rows R] [--columns C]
                                                        [--dtype fp32|fp16|bf16]

The rate of a sum counts two reads and one write, that of the copy one of each. The tensors are larger than
the L2 cache. Protocol and traps: `common/arms.py`; results must have the bits of torch's. Without a GPU
a tiny shape runs in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.arms import Arm, Plan, measure
from benchmarks.common.cases import Benchmark, Ratio, case_record
from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks
from benchmarks.common.records import add_run_options
from dist_autotune import contextual_autotune
from dist_autotune.kernels.elementwise_add import elementwise_add

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LIMIT_S = 600.0
COPY, TORCH = "copy", "torch.add"
OURS = "ours"


def bits_differ(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return 0.0 if the two are equal bit by bit, else how many elements are not."""
    return float((result != wanted).sum())


def arms_of(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Arm]:
    """Return what is timed."""
    megabytes = 1e-6 * a.numel() * a.element_size()

    def arm(
        name: str, call: Callable[[], torch.Tensor], wanted: Callable[[], torch.Tensor], tensors: int
    ) -> Arm:
        return Arm(
            name=name,
            prepare=lambda: call,
            error=lambda result: bits_differ(result, wanted()),
            limit=0.0,
            work=tensors * megabytes,
            rate="GB/s",
            poison=lambda: out.fill_(math.nan),
        )

    ours = contextual_autotune(lambda: elementwise_add(a, b, out), name="elementwise_add benchmark")
    return [
        arm(COPY, lambda: out.copy_(a), lambda: a, 2),
        arm(TORCH, lambda: torch.add(a, b, out=out), lambda: a + b, 3),
        arm(OURS, ours, lambda: a + b, 3),
    ]


def parse() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--rows", type=int, default=32768 if ON_GPU else 8, help="of the tensors")
    parser.add_argument("--columns", type=int, default=32768 if ON_GPU else 64, help="of the tensors")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the tensors")
    add_run_options(parser, warm_ups=40)
    return parser.parse_args()


def run_case(case: str, options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of the case."""
    tensors = {"dtype": DTYPES[options.dtype], "device": ranks.device}
    a, b, out = (torch.empty(options.rows, options.columns, **tensors) for _ in range(3))

    def refresh() -> None:
        a.normal_()
        b.normal_()

    measured = measure(arms_of(a, b, out), ranks, refresh, plan)
    nothing = {"contexts": [], "runs": 0, "seconds": 0.0}
    return case_record(case, measured, ranks, tuned=nothing, dtype=options.dtype)


def main() -> None:
    options = parse()
    Benchmark(
        op="elementwise_add",
        title="Elementwise add",
        case_title="shape",
        ratios=[Ratio(of=TORCH, to=OURS)],
        limit_s=LIMIT_S,
        needed=(OURS,),
    ).start(options, [f"{options.rows} x {options.columns}"], run_case)


if __name__ == "__main__":
    main()
