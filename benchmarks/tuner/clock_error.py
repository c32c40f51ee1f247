"""How far the times that the tuner takes in context are from the GPU's own durations of the same kernel.

    ./launch.sh --nproc 1 -m benchmarks.tuner.clock_error [--microseconds 2 10 100] [--json FILE]

A kernel of arithmetic alone, made to last 2 us to 5 ms, is tuned (two configs) in two functions: one that
waits for its result after each launch, so that the stream is idle when the next begins, and one whose
stream is kept at work. Each is tuned with and without the tuner's feeding of idle streams. Then the settled
function runs under torch.profiler, which has the kernel's duration from CUPTI.

    clock     the time the tuner reports for its winner: events, median of the samples
    GPU       CUPTI's duration of that winner in the same function, median
    error     of the clock against the GPU
    verdict   of kernels of at least 10 us: `ok` within 3 %, `flagged` as launch-bound, else `MISSED`

Traps: profiling slows launches down, so it comes after all of the tuner's own samples; two events with
nothing between them read more than 0, which the table's note tells and the clock takes off.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.common.arms import CYCLES_PER_MS, Plan
from benchmarks.common.options import add_record_options, new_parser
from benchmarks.common.ranks import ON_GPU, Ranks, run_on_ranks, time_limit
from benchmarks.common.records import clocks_seen, describe_run, leave_record

import triton  # isort: skip  after common, which chooses the interpreter where there is no GPU
import triton.language as tl  # isort: skip

from dist_autotune import EventClock, TuningReport, contextual_autotune

DURATIONS_US = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)
JUDGED_FROM_US, ALLOWED_PERCENT = 10.0, 3.0
PROGRAMS, BLOCK = 64, 1024
BUSY_MS = 2.0  # of the stream that is kept at work: more than a launch takes on any host
PAIRS = 21
LIMIT_S = 540.0


def make_kernel() -> Any:
    """Return a fresh tunable kernel whose duration is proportional to `iterations`."""

    @triton.autotune([triton.Config({}, num_warps=warps) for warps in (4, 8)], key=["iterations"])
    @triton.jit
    def spend(x_ptr, iterations, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs)
        for _ in range(iterations):
            x = x * 0.999 + 0.5
        tl.store(x_ptr + offs, x)

    return spend


# ---- what is measured, as values


@dataclass(frozen=True)
class Row:
    """One duration in one function, with or without feeding."""

    wanted_us: float
    function: str
    feeds: bool
    clock_us: float
    gpu_us: float
    launch_bound: bool

    @property
    def error_percent(self) -> float:
        return (self.clock_us / self.gpu_us - 1) * 100

    @property
    def verdict(self) -> str:
        if self.gpu_us < JUDGED_FROM_US:
            return "flagged" if self.launch_bound else ""
        if abs(self.error_percent) <= ALLOWED_PERCENT:
            return "ok"
        return "flagged" if self.launch_bound else "MISSED"


def table(rows: Sequence[Row], nothing_us: float) -> dict[str, Any]:
    """Return the table that a record holds and `render` shows."""
    cells = [
        (
            f"{row.wanted_us:g}",
            row.function,
            "fed" if row.feeds else "not fed",
            f"{row.clock_us:.2f}",
            f"{row.gpu_us:.2f}",
            f"{row.error_percent:+.1f}",
            f"{row.clock_us - row.gpu_us:+.2f}",
            row.verdict,
        )
        for row in rows
    ]
    missed = sum(row.verdict == "MISSED" for row in rows)
    judged = sum(bool(row.verdict) and row.gpu_us >= JUDGED_FROM_US for row in rows)
    return {
        "columns": ("us", "stream", "feeding", "clock us", "GPU us", "error %", "error us", "verdict"),
        "figures": ("us", "clock us", "GPU us", "error %", "error us"),
        "rows": cells,
        "notes": [
            "clock: the tuner's time in context, from events. GPU: the kernel's duration by CUPTI "
            "(torch.profiler), in the same function, settled.",
            f"Two events with nothing between them, on a busy stream, read {nothing_us:.2f} us (median).",
            f"Of {judged} rows of at least {JUDGED_FROM_US:g} us, {missed} are further off than "
            f"{ALLOWED_PERCENT:g} % and not flagged as launch-bound.",
        ],
    }


def iterations_for(wanted_us: float, few: tuple[int, float], many: tuple[int, float]) -> int:
    """Return the iterations for a duration, from (iterations, us) of two measured ones."""
    slope = (many[1] - few[1]) / (many[0] - few[0])
    start_us = few[1] - slope * few[0]
    return max(1, round((wanted_us - start_us) / slope))


# ---- measuring


def functions(launch: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """Return the two functions that the kernel is tuned in."""

    def idle() -> None:
        launch()
        torch.cuda.synchronize()

    def busy() -> None:
        torch.cuda._sleep(int(BUSY_MS * CYCLES_PER_MS))
        launch()
        torch.cuda.synchronize()

    return {"idle": idle, "busy": busy}


def tune(function: Callable[[], None], feeds: bool, repeats: int) -> tuple[Callable[[], None], TuningReport]:
    """Return `function` tuned, and the report."""
    tuned = contextual_autotune(
        function, n_warmup=3, n_repeat=repeats, clock=EventClock(feeds=feeds), cache=False, log_dir=None,
        progress=False, name="clock error",
    )  # fmt: skip
    tuned()
    return tuned, tuned.report


def event_us(call: Callable[[], object]) -> float:
    """Return what two events around `call` read on a busy stream, median."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(PAIRS)]
    call()
    for begin, end in pairs:
        torch.cuda._sleep(int(BUSY_MS * CYCLES_PER_MS))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in pairs)


def gpu_us(function: Callable[[], None], repeats: int) -> float:
    """Return the median duration by CUPTI of the kernel in `repeats` calls."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    return median_us(profiler.profiler.kineto_results.events(), "spend", repeats)


def median_us(events: Sequence[Any], name: str, repeats: int) -> float:
    """Return the median duration of the kernels called `name` among the profiler's events."""
    durations = [event.duration_ns() / 1e3 for event in events if event.name() == name]
    if len(durations) < repeats:
        found = sorted({event.name() for event in events})
        raise RuntimeError(f"{len(durations)} of {repeats} launches of {name} in the profile: {found[:20]}")
    return statistics.median(durations)


def measure(durations_us: Sequence[float], repeats: int) -> tuple[list[Row], float]:
    """Return all rows, and what two events with nothing between read.

    The profiler comes last: once it has run, launches of the process may cost more.
    """
    x = torch.randn(PROGRAMS * BLOCK, device="cuda")

    def launcher(kernel: Any, iterations: int) -> Callable[[], None]:
        return lambda: kernel[(PROGRAMS,)](x, iterations, BLOCK=BLOCK)

    bare = make_kernel().fn
    points = (10_000, 100_000, 10_000, 100_000)  # the first two warm the clocks up
    known = [
        (count, event_us(lambda count=count: bare[(PROGRAMS,)](x, count, BLOCK=BLOCK, num_warps=4)))
        for count in points
    ]
    nothing_us = event_us(lambda: None)
    settled = []
    for wanted_us in durations_us:
        iterations = iterations_for(wanted_us, *known[-2:])
        for name in ("idle", "busy"):
            for feeds in (False, True):
                function = functions(launcher(make_kernel(), iterations))[name]
                settled.append((wanted_us, name, feeds, *tune(function, feeds, repeats)))
    rows = [
        Row(wanted_us, name, feeds, context.ms * 1e3, gpu_us(tuned, repeats), context.launch_bound)
        for wanted_us, name, feeds, tuned, report in settled
        for context in report.contexts
    ]
    return rows, nothing_us


def parse() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--microseconds", type=float, nargs="+", default=DURATIONS_US, help="of the kernels")
    parser.add_argument(
        "--iterations", type=int, default=15, help="samples of each config, and profiled calls"
    )
    add_record_options(parser)
    options = parser.parse_args()
    if not ON_GPU:
        parser.error("needs a GPU: kernels in the interpreter have no duration of their own")
    return options


def main() -> None:
    options = parse()

    def body(ranks: Ranks) -> int:
        with time_limit(LIMIT_S):
            rows, nothing_us = measure(options.microseconds, options.iterations)
        plan = Plan(warm_ups=3, iterations=options.iterations, limit_s=LIMIT_S)
        title = "The clock in context against CUPTI"
        record = describe_run(ranks, op="clock_error", title=title, commit=options.commit, plan=plan)
        record["clocks"] = clocks_seen(ranks)
        record["measured"] = [{**asdict(row), "error_percent": row.error_percent} for row in rows]
        record["table"] = table(rows, nothing_us)
        leave_record(record, options, ranks)
        return int(any(row.verdict == "MISSED" for row in rows))

    run_on_ranks(body)


if __name__ == "__main__":
    main()
