"""What the benchmarks share: ranks, checks before timing, interleaved timing, the record that a run leaves.

Protocol: every arm is checked against a reference on fresh random inputs, before the timing and, with other
inputs, after it. Then all arms are timed in one process group, in rounds: each arm once, every second round
in reverse order, new inputs in every round. A round begins with a call that is not timed, of the arm that
comes last: so each call that is timed follows a call of another arm, and none finds the cache full of new
inputs that memory has yet to be told of. On GPUs a time is what CUDA events around one call say. Before
each call, of every arm alike, the device sleeps while the host runs ahead, so that what is timed is the
device's work and not the host's, and an all-reduce lets the ranks start together. The figure of an arm is
the median of each rank's times, then the slowest rank. Where arms are captured, the others are timed before
that, too: an operation of which a graph is there must be none the slower. Host time is told of these calls,
which find the host's caches full of other arms' work, and of calls in a row (hot).

Traps: figures of different processes differ by more than what is looked for (clocks, power), so compare
inside one run; zeros as inputs are up to 40 % too fast on an H200; a result that is checked once may be a
stale one.

On CPU ranks the same code runs with wall clocks. Such figures show behaviour, not speed, and are labelled.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.common.ranks import ON_GPU, Ranks, Unsupported, time_limit

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
CYCLES_PER_MS = 2_000_000  # of an SM at 2 GHz; at lower clocks a sleep lasts longer
FIRST_LEAD_MS, SHORTEST_LEAD_MS, LONGEST_LEAD_MS = 1.0, 0.2, 5.0
HOT_CALLS = 9 if ON_GPU else 1  # in a row: what they enqueue fits the device's queues
MOST_LATE = 0.1  # of an arm's calls, which the device had to wait for


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One thing to time.

    `prepare` does once what need not be timed and returns the call to time, which works on the current
    stream and returns its result. It raises Unsupported where this arm cannot run.
    """

    name: str
    prepare: Callable[[], Callable[[], torch.Tensor]]
    error: Callable[[torch.Tensor], float]  # of a result, relative to the reference
    limit: float  # of that error
    work: float = 0.0  # of one call, in units of `rate` times milliseconds
    rate: str = ""  # "TFLOP/s" or "GB/s"
    poison: Callable[[], object] = lambda: None  # fills what a call writes with NaN, before a check

    @property
    def is_captured(self) -> bool:
        """Return whether it replays a graph, as `in_both_ways` names such arms."""
        return self.name.endswith(", graph")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How often each arm is called."""

    warm_ups: int  # calls of all arms together
    iterations: int  # timed calls of each arm
    limit_s: float  # of everything together


def measure(arms: Sequence[Arm], ranks: Ranks, refresh: Callable[[], None], plan: Plan) -> dict[str, Any]:
    """Check all arms, time those that work, interleaved, and return what a record holds of them."""
    with time_limit(plan.limit_s):
        unavailable: dict[str, str] = {}
        calls: dict[str, Callable[[], torch.Tensor]] = {}
        errors: dict[str, float] = {}
        _renew(refresh, ranks)
        before: dict[str, list[Timed]] = {}  # a capture
        for arm in sorted(arms, key=lambda arm: arm.is_captured):
            if arm.is_captured and not before:
                ready = [name for name in calls if not unavailable[name]]
                found, _ = _time([calls[name] for name in ready], ranks, refresh, plan)
                before = dict(zip(ready, found, strict=True))
                _renew(refresh, ranks)

            def prepare(arm: Arm = arm) -> None:
                calls[arm.name] = arm.prepare()

            unavailable[arm.name] = ranks.attempt(prepare) or _check(arm, calls, errors, ranks)
        live = [arm for arm in arms if not unavailable[arm.name]]
        times, lead_ms = _time([calls[arm.name] for arm in live], ranks, refresh, plan)
        hot = {arm.name: _hot_ms(calls[arm.name], ranks) for arm in live}
        _renew(refresh, ranks)
        for arm in live:
            unavailable[arm.name] = _check(arm, calls, errors, ranks)
        timed = dict(zip((arm.name for arm in live), times, strict=True))
        rows = [
            {"name": arm.name, "unavailable": unavailable[arm.name]}
            if unavailable[arm.name]
            else _row(arm, timed[arm.name], max(ranks.gather(errors[arm.name])), lead_ms, ranks)
            | {"host_hot_ms": hot[arm.name]}
            | _before_capture(before.get(arm.name, []), ranks)
            for arm in arms
        ]
    return {"arms": rows, "lead_ms": lead_ms}


def _check(
    arm: Arm, calls: dict[str, Callable[[], torch.Tensor]], errors: dict[str, float], ranks: Ranks
) -> str:
    """Return what is wrong with the arm's result on some rank, if anything."""

    def call() -> None:
        error = arm.error(calls[arm.name]())
        errors[arm.name] = max(error, errors.get(arm.name, 0.0))
        if not error <= arm.limit:  # NaN too
            raise Unsupported(
                f"wrong result: relative error {error:.1e}, at most {arm.limit:.1e} is explained"
            )

    return ranks.attempt(arm.poison) or ranks.attempt(call)


def _time(
    calls: Sequence[Callable[[], torch.Tensor]], ranks: Ranks, refresh: Callable[[], None], plan: Plan
) -> tuple[list[list[Timed]], float]:
    """Return the times of each timed call of each arm, and how far ahead the host was."""
    clock = GpuClock() if ON_GPU else WallClock(ranks)
    warm_ups = _rounds(calls, clock, refresh, ranks, math.ceil(plan.warm_ups / max(1, len(calls))))
    settled = [timed.ahead_ms for times in warm_ups for timed in times[len(times) // 2 :]]
    clock.settle(max(ranks.gather(max(settled, default=0.0))))
    times = _rounds(calls, clock, refresh, ranks, plan.iterations)
    return times, clock.lead_ms


def _rounds(
    calls: Sequence[Callable[[], torch.Tensor]],
    clock: GpuClock | WallClock,
    refresh: Callable[[], None],
    ranks: Ranks,
    count: int,
) -> list[list[Timed]]:
    times: list[list[Timed]] = [[] for _ in calls]
    order = list(range(len(calls)))
    for number in range(count):
        _renew(refresh, ranks)
        turns = order if number % 2 == 0 else order[::-1]
        for index in turns[-1:]:
            clock.time(calls[index])
        for index in turns:
            times[index].append(clock.time(calls[index]))
    return times


def _renew(refresh: Callable[[], None], ranks: Ranks) -> None:
    """Change the inputs, which a peer may have been reading until now and may read from now on."""
    ranks.gather(None)
    refresh()
    ranks.synchronize()
    ranks.gather(None)


class Timed(NamedTuple):
    """A call: what it took, its host part alone, and that with what went before it while the device slept."""

    ms: float
    host_ms: float
    ahead_ms: float


class GpuClock:
    """Times one call with CUDA events, its host part with the wall clock."""

    def __init__(self) -> None:
        self.lead_ms = FIRST_LEAD_MS
        self._token = torch.zeros(1, device="cuda")

    def time(self, call: Callable[[], torch.Tensor]) -> Timed:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        asleep = time.perf_counter()
        torch.cuda._sleep(int(self.lead_ms * CYCLES_PER_MS))
        dist.all_reduce(self._token)
        begin.record()
        began = time.perf_counter()
        call()
        done = time.perf_counter()
        end.record()
        end.synchronize()
        return Timed(begin.elapsed_time(end), (done - began) * 1e3, (done - asleep) * 1e3)

    def settle(self, slowest_ms: float) -> None:
        """Choose the lead by how long the slowest call kept the slowest host."""
        self.lead_ms = min(max(1.5 * slowest_ms, SHORTEST_LEAD_MS), LONGEST_LEAD_MS)


class WallClock:
    """Times one call that is done when it returns."""

    lead_ms = 0.0

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def time(self, call: Callable[[], torch.Tensor]) -> Timed:
        self._ranks.gather(None)  # the ranks start together
        began = time.perf_counter()
        call()
        ms = (time.perf_counter() - began) * 1e3
        return Timed(ms, ms, 0.0)

    def settle(self, slowest_ms: float) -> None:
        """Nothing to choose."""


def _row(arm: Arm, times: list[Timed], error: float, lead_ms: float, ranks: Ranks) -> dict[str, Any]:
    ms, host_ms = [timed.ms for timed in times], [timed.host_ms for timed in times]
    late = statistics.mean(timed.ahead_ms > lead_ms for timed in times)
    everyone = ranks.gather((statistics.median(ms), statistics.median(host_ms), late, quantiles(ms)))
    slowest_ms, slowest_host_ms, latest = (max(of_rank[part] for of_rank in everyone) for part in range(3))
    return {
        "name": arm.name,
        "ms": slowest_ms,
        "host_ms": slowest_host_ms,
        "host_bound": latest > MOST_LATE,  # then gaps of the host are in the figure
        "rate": arm.work / slowest_ms if arm.rate else None,
        "rate_unit": arm.rate,
        "error": error,
        "ranks_ms": [of_rank for _, _, _, of_rank in everyone],
    }


def _hot_ms(call: Callable[[], torch.Tensor], ranks: Ranks) -> float:
    """Return the host's ms of a call among others like it, while the device sleeps; of the slowest rank."""
    ranks.gather(None)
    times_ms = []
    if ON_GPU:
        torch.cuda._sleep(int(LONGEST_LEAD_MS * CYCLES_PER_MS))
    for _ in range(HOT_CALLS):
        began = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - began) * 1e3)
    ranks.synchronize()
    return max(ranks.gather(statistics.median(times_ms)))


def _before_capture(times: Sequence[Timed], ranks: Ranks) -> dict[str, float]:
    """Return device and host time, of the slowest rank, of calls before any arm was captured."""
    if not times:
        return {}
    of_device, of_host = ([each[part] for each in times] for part in range(2))
    everyone = ranks.gather((statistics.median(of_device), statistics.median(of_host)))
    ms, host_ms = (max(of_rank[part] for of_rank in everyone) for part in range(2))
    return {"before_capture_ms": ms, "before_capture_host_ms": host_ms}


def quantiles(values: Sequence[float]) -> list[float]:
    """Return the QUANTILES of the values, interpolated."""
    ordered = sorted(values)
    found = []
    for quantile in QUANTILES:
        position = quantile * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        found.append(round(ordered[low] + (ordered[high] - ordered[low]) * (position - low), 6))
    return found
