"""One call of `AllGatherGemm`, tile by tile: when each was loaded and stored, and what it waited for.

    ./launch.sh benchmarks/ag_gemm_timeline.py [--m M] [--n N] [--k K] [--pieces P] [--json FILE]

M is the number of rows of all ranks together, N that of columns on each rank. The warp-specialised consumer
is tuned, called until the clocks have settled, and then called once more with stamps, under the profiler,
which knows the copies. `timeline.py` makes a picture of the record.

Traps: the stamps are stores beside the kernel's own, so the traced call is a little slower than the others,
whose median is printed too; the profiler delays the host, so all ranks' devices sleep before the call, as in
`common.py`. Needs as many Hopper or Blackwell GPUs as ranks: there is nothing to see in the interpreter.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import torch
import torch.distributed as dist

from common import (
    ON_GPU,
    GpuClock,
    Plan,
    Ranks,
    add_run_options,
    clocks_seen,
    describe_run,
    run_on_ranks,
    time_limit,
    write_json,
)
from dist_autotune import contextual_autotune
from dist_autotune.kernels.ag_gemm import AllGatherGemm
from render import summary
from timeline import read, table

PATIENCE_S, LIMIT_S = 60.0, 480.0
KERNEL = "specialized_all_gather_gemm"
LEAD_MS = 5.0  # of the device's sleep before the traced call: the profiler's work comes on top of ours


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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


def spans(events: list[Any]) -> tuple[list[int], list[tuple[str, int, int]]]:
    """Return (begin, end) of the kernel and (name, begin, end) of the copies in a profile, in ns."""
    found = [(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()) for event in events]
    kernels = [[begin, end] for name, begin, end in found if name.startswith(KERNEL)]
    if len(kernels) != 1:
        names = sorted({name for name, _, _ in found})
        raise RuntimeError(
            f"{len(kernels)} launches of {KERNEL} in the profile, not 1; it holds {names[:20]}"
        )
    return kernels[0], [span for span in found if span[0].startswith("Memcpy")]


def trace(op: AllGatherGemm, weight: torch.Tensor, rows: int, ranks: Ranks) -> dict[str, Any]:
    """Return what one call leaves on this rank."""
    from torch.profiler import ProfilerActivity, profile

    token = torch.zeros(1, device=ranks.device)
    op.trace(op.shard[:rows], weight)  # the kernel with stamps is another binary: compile and load it first
    ranks.synchronize()
    ranks.gather(None)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(int(LEAD_MS * 2_000_000))
        dist.all_reduce(token)
        _, stamps = op.trace(op.shard[:rows], weight)
        ranks.synchronize()
    kernel, copies = spans(profiler.profiler.kineto_results.events())
    return {"rank": ranks.rank, "stamps": stamps.tolist(), "kernel": kernel, "copies": copies}


def run(options: argparse.Namespace, ranks: Ranks, record: dict[str, Any]) -> None:
    rows = options.m // ranks.world_size
    weight = torch.randn(options.n, options.k, dtype=torch.bfloat16, device=ranks.device)
    with AllGatherGemm(
        *(rows, options.k, torch.bfloat16),
        timeout_s=PATIENCE_S,
        graphs=False,
        consumer="specialized",
        pieces=options.pieces,
    ) as op:
        op.shard.normal_()
        tuned = contextual_autotune(is_dist=True, watch=False, name="ag_gemm timeline")(
            lambda: op(op.shard[:rows], weight)
        )
        tuned()
        clock = GpuClock()
        times_ms = [clock.time(tuned)[0] for _ in range(options.warm_ups + options.iterations)]
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
        if options.json is not None and ranks.rank == 0:
            write_json(options.json, record)
        ranks.say(f"\n{summary(record)}")
        return 0

    run_on_ranks(body)


if __name__ == "__main__":
    main()
