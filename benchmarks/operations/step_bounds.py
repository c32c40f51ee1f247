"""What bounds a step: the host that enqueues it, the device's kernels, or the links; and how much was found.

One profile tells when kernels and collectives ran. A collective counts from its launch, a wait for its peer
included, so the figures are those of the rank that waited least.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common.arms import CYCLES_PER_MS, LONGEST_LEAD_MS
from benchmarks.common.ranks import ON_GPU, Ranks

ENQUEUED_CALLS = 9 if ON_GPU else 1
NO_KERNELS = ("spin_kernel", "FSDP::", "nccl:")  # the sleep before a call, and names of regions


@dataclass(frozen=True)
class Busy:
    """Milliseconds of one call on the device, from its first kernel to its last."""

    span_ms: float
    kernels_ms: float  # in which a kernel ran that is no collective
    links_ms: float  # in which a collective ran
    both_ms: float  # in which both did


def busy_of(ran: Iterable[tuple[str, float, float]]) -> Busy | None:
    """Return how busy a call kept the device; ran: name, begin and end in ms. None: nothing ran."""
    kept = [each for each in ran if not any(text in each[0] for text in NO_KERNELS)]
    if not kept:
        return None
    of_links, of_kernels = [], []
    for name, begin, end in kept:
        (of_links if name.startswith("nccl") else of_kernels).append((begin, end))
    kernels_ms, links_ms = union_ms(of_kernels), union_ms(of_links)
    span_ms = max(end for _, _, end in kept) - min(begin for _, begin, _ in kept)
    return Busy(span_ms, kernels_ms, links_ms, kernels_ms + links_ms - union_ms(of_kernels + of_links))


def union_ms(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of what the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def profiled(call: Callable[[], object], ranks: Ranks) -> Busy | None:
    """Return how busy a call keeps the device; None without a GPU. It comes last: launches cost more then."""
    if not ON_GPU:
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    call()
    ranks.synchronize()
    ranks.gather(None)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        torch.cuda._sleep(int(LONGEST_LEAD_MS * CYCLES_PER_MS))  # the host, which now is slower, runs ahead
        call()
        ranks.synchronize()
    events = profiler.profiler.kineto_results.events()
    found = busy_of(
        (event.name(), event.start_ns() / 1e6, (event.start_ns() + event.duration_ns()) / 1e6)
        for event in events
        if event.device_type() == DeviceType.CUDA
    )
    known = [each for each in ranks.gather(found) if each is not None]
    return min(known, key=lambda busy: busy.links_ms) if known else None


def enqueued_ms(call: Callable[[], object], ranks: Ranks) -> float:
    """Return what the slowest host takes to enqueue a call, as the median of some."""
    times = []
    for _ in range(ENQUEUED_CALLS):
        ranks.synchronize()
        ranks.gather(None)
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return max(ranks.gather(statistics.median(times)))


def bounds(parts_ms: dict[str, float]) -> dict[str, Any]:
    """Return what a record says of the parts of a step: each, and the longest, which bounds the step."""
    told = {f"{name}_ms": round(ms, 3) for name, ms in parts_ms.items()}
    return {**told, "bound_by": max(parts_ms, key=parts_ms.__getitem__)}


def gain_found_percent(alone_ms: float, found_ms: float, best_ms: float) -> float | None:
    """Return which part of the best plan's gain over tuning alone was found; None: there is no gain."""
    gain_ms = alone_ms - best_ms
    return round(100 * (alone_ms - found_ms) / gain_ms, 1) if gain_ms > 0 else None
