"""One call of `AllGatherGemm`, tile by tile: when each was loaded and stored, and what it waited for.

    ./launch.sh -m benchmarks.operations.ag_gemm_timeline [--m M] [--n N] [--k K] [--pieces P] [--json FILE]

M is the number of rows of all ranks together, N that of columns on each rank. The warp-specialised consumer
is tuned, called until the clocks have settled, and then called once more, with stamps in the kernel and
events around the copies. `timeline.py` makes a picture of the record.

Traps: stamps are stores beside the kernel's own, and events cost the copies a little, so the traced call is
slower than the others, whose median is printed too. Under the profiler it would take twice as long: CUPTI
delays copies (seen on two H200). All ranks' devices sleep before the call, as in `common/arms.py`, so that no
host is late. Needs as many Hopper or Blackwell GPUs as ranks: there is nothing to see in the interpreter.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.arms import GpuClock, Plan
from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks, run_on_ranks, time_limit
from benchmarks.common.records import add_run_options, clocks_seen, describe_run, leave_record
from benchmarks.operations.timeline import read, table

import triton  # isort: skip  after common, which chooses the interpreter where there is no GPU
import triton.language as tl  # isort: skip

from dist_autotune import contextual_autotune
from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.signals import nanoseconds

PATIENCE_S, LIMIT_S = 60.0, 480.0
WARM_UPS = 100  # with stamps, behind their compiling: links that have been idle copy at half their speed
LEAD_MS = 5.0  # of the device's sleep before the traced call


def parse() -> argparse.Namespace:
    parser = new_parser(__doc__)
    for name, size, text in (
        *(("m", 8192, "rows of all ranks"), ("n", 1792, "columns of each rank")),
        *(("k", 4096, "inner dimension"), ("pieces", 1, "in which each chunk is copied")),
    ):
        parser.add_argument(f"--{name}", type=int, default=size, help=text)
    add_run_options(parser, warm_ups=200)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if options.m % ranks:
        parser.error(f"M must be a multiple of the {ranks} ranks; {options.m} is not")
    return options


@triton.jit
def read_clock(to_ptr):
    tl.store(to_ptr, nanoseconds())


class CopyEvents:
    """While it is entered, puts events around the copies of an operation's side stream."""

    def __init__(self, op: AllGatherGemm) -> None:
        self._memory = op._memory
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> CopyEvents:
        copy = self._memory.copy

        def marked(dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
            queue = torch.cuda.ExternalStream(stream.handle)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(queue)
            copy(dst, src, stream)
            end.record(queue)
            self._marks.append((f"{dst.numel() * dst.element_size()} bytes", begin, end))

        self._memory.copy = marked  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._memory.copy

    def spans_us(self, origin: torch.cuda.Event) -> list[tuple[str, float, float]]:
        """Return (size, begin, end) of each copy, in us from `origin`; all of them must be over."""
        return [
            (name, origin.elapsed_time(begin) * 1e3, origin.elapsed_time(end) * 1e3)
            for name, begin, end in self._marks
        ]


def trace(op: AllGatherGemm, weight: torch.Tensor, rows: int, ranks: Ranks) -> dict[str, Any]:
    """Return what one call leaves on this rank."""
    token = torch.zeros(1, device=ranks.device)
    clock = torch.zeros(1, dtype=torch.int64, device=ranks.device)
    read_clock[(1,)](clock)
    op.trace(op.shard[:rows], weight)  # the kernel with stamps is another binary: compile and load it first
    ranks.synchronize()
    ranks.gather(None)
    gpu = GpuClock()
    for _ in range(WARM_UPS):
        gpu.time(lambda: op.trace(op.shard[:rows], weight)[0])
    origin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with CopyEvents(op) as copies:
        torch.cuda._sleep(int(LEAD_MS * 2_000_000))
        dist.all_reduce(token)
        read_clock[(1,)](clock)
        origin.record()
        _, stamps = op.trace(op.shard[:rows], weight)
        end.record()
        ranks.synchronize()
    return {
        "rank": ranks.rank,
        "origin_ns": int(clock),
        "stamps": stamps.tolist(),
        "copies_us": copies.spans_us(origin),
        "call_us": origin.elapsed_time(end) * 1e3,
    }


def run(options: argparse.Namespace, ranks: Ranks, record: dict[str, Any]) -> None:
    rows = options.m // ranks.world_size
    weight = torch.randn(options.n, options.k, dtype=torch.bfloat16, device=ranks.device)
    with AllGatherGemm(
        *(rows, options.k, torch.bfloat16),
        timeout_s=PATIENCE_S,
        consumer="specialized",
        pieces=options.pieces,
    ) as op:
        op.shard.normal_()
        tuned = contextual_autotune(is_dist=True, watch=False, name="ag_gemm timeline")(
            lambda: op(op.shard[:rows], weight)
        )
        tuned()
        clock = GpuClock()
        times_ms = [clock.time(tuned).ms for _ in range(options.warm_ups + options.iterations)]
        median_ms = statistics.median(times_ms[options.warm_ups :])
        record["ms"] = max(ranks.gather(median_ms))
        record["tuned"] = str(tuned.report)
        op.check()
        record["timelines"] = ranks.gather(trace(op, weight, rows, ranks))
        record["clocks"] = clocks_seen(ranks)
    timelines = [read(of_rank, ranks.world_size) for of_rank in record["timelines"]]
    record["table"] = table(timelines)
    record["table"]["notes"].append(
        f"Without stamps a call takes {record['ms']:.3f} ms (median, slowest rank)."
    )


def main() -> None:
    options = parse()
    if not ON_GPU:
        raise SystemExit("the timeline is of GPUs: the interpreter runs one program after the other")

    def body(ranks: Ranks) -> int:
        plan = Plan(warm_ups=options.warm_ups, iterations=options.iterations, limit_s=LIMIT_S)
        record = describe_run(
            ranks,
            op="ag_gemm_timeline",
            title="All-gather + GEMM, tile by tile",
            commit=options.commit,
            plan=plan,
        )
        record["shape"] = f"{options.m} x {options.n} x {options.k}, chunks in {options.pieces} pieces"
        with time_limit(LIMIT_S):
            run(options, ranks, record)
        leave_record(record, options, ranks)
        return 0

    run_on_ranks(body)


if __name__ == "__main__":
    main()
