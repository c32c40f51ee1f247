"""Times launches: by CUDA events on the launch's own stream, or by the wall clock.

Two events around a launch time the kernel alone only if the launch is queued before the device reaches the
first event. If the stream ran dry, the interval holds up to the whole host time between the marks
(`EventClock.gap_ms`). A filler before the run keeps the device behind the host (`stream_filler`).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ..errors import LaunchTimeout
from .device_errors import as_launch_failed
from .stream_filler import CYCLES_PER_MS, StreamFiller

POLL_INTERVAL_S = 50e-6


@runtime_checkable
class Clock(Protocol):
    """Times one launch. `start` and `stop` surround it on its stream and device."""

    def start(self) -> Any:
        """Mark the moment just before a launch and return the mark."""

    def stop(self, mark: Any) -> None:
        """Complete `mark` just after the launch."""

    def read_ms(self, mark: Any) -> float:
        """Return the milliseconds between start and stop; may wait for the device."""


class WallClock:
    """Wall-clock time around the launch: right where a launch returns when its work is done."""

    def start(self) -> list[float]:
        return [time.perf_counter()]

    def stop(self, mark: list[float]) -> None:
        mark.append(time.perf_counter())

    def read_ms(self, mark: list[float]) -> float:
        return (mark[1] - mark[0]) * 1e3


@dataclass(slots=True)
class EventMark:
    device: int
    stream: torch.cuda.Stream
    begin: torch.cuda.Event
    end: torch.cuda.Event
    began_ns: int  # on the host
    host_ms: float = 0.0  # from the first mark to the second, on the host
    was_fed: bool = False  # all of it was queued before the device came to the first event


class EventClock:
    """Times launches by CUDA events on the current stream, and subtracts the cost of two events.

    Nothing waits for the device until `read_ms`, which polls, so that Ctrl-C works and a stuck kernel becomes
    a `LaunchTimeout` after `timeout_s`. An error that the device reports is a `LaunchFailed`.

    feeds: keep an idle stream busy before a run while the host prepares it; see `stream_filler`.
    """

    def __init__(self, timeout_s: float = 300.0, *, feeds: bool = True) -> None:
        self.timeout_s = timeout_s
        self.feeds = feeds
        self._free: dict[int, list[torch.cuda.Event]] = {}  # by device
        self._costs: dict[int, EventCost] = {}  # by device; on these a filler loads nothing any more

    def start(self) -> EventMark:
        with as_launch_failed():
            device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
            begin, end = self._event(device), self._event(device)
            mark = EventMark(device, stream, begin, end, time.perf_counter_ns())
            begin.record(stream)
        return mark

    def _event(self, device: int) -> torch.cuda.Event:
        """Return a free event; any thread may ask, and no two get the same."""
        try:
            return self._free.setdefault(device, []).pop()
        except IndexError:
            return torch.cuda.Event(enable_timing=True)

    def stop(self, mark: EventMark) -> None:
        with as_launch_failed(mark.device):
            mark.end.record(mark.stream)
            mark.host_ms = (time.perf_counter_ns() - mark.began_ns) * 1e-6
            mark.was_fed = not mark.begin.query()

    def ready(self, mark: EventMark) -> bool:
        """Return whether `read_ms` would return without waiting; raises LaunchTimeout when it is overdue."""
        return self._is_done(mark, waited_s=(time.perf_counter_ns() - mark.began_ns) * 1e-9)

    def read_ms(self, mark: EventMark) -> float:
        began = time.monotonic()
        while not self._is_done(mark, waited_s=time.monotonic() - began):
            time.sleep(POLL_INTERVAL_S)
        with as_launch_failed(mark.device):
            ms = float(mark.begin.elapsed_time(mark.end))
            cost = self._costs.get(mark.device)
            own_ms = ms if cost is None else max(ms - cost.ms(), min(ms, EMPTY_KERNEL_MS))
        self._free[mark.device] += [mark.begin, mark.end]
        return own_ms

    def gap_ms(self, mark: EventMark) -> float:
        """Return how much of a time read may be the host's; the kernel took all of the rest, or more."""
        return 0.0 if mark.was_fed else mark.host_ms

    def is_running(self, mark: EventMark) -> bool:
        """Return whether the device has come to the launch and not ended it."""
        return bool(mark.begin.query()) and not mark.end.query()

    def prepare(self) -> None:
        """Load fillers and measure events on the devices in use, before a run: no kernel waits for a peer."""
        if torch.cuda.is_available():
            with as_launch_failed():
                for device in {torch.cuda.current_device(), *self._free} - self._costs.keys():
                    self._costs[device] = EventCost(device)  # by spin kernels, which it loads

    def filler(self, longest_ms: float) -> StreamFiller | None:
        """Return the filler of the stream before runs, at most `longest_ms` long; None: without fillers."""
        return StreamFiller(self._costs, longest_ms) if self.feeds else None

    def _is_done(self, mark: EventMark, waited_s: float) -> bool:
        with as_launch_failed(mark.device):
            is_done = bool(mark.end.query())
        if not is_done and waited_s > self.timeout_s:
            raise LaunchTimeout(f"cuda:{mark.device} did not end a launch within {self.timeout_s:g} s")
        return is_done


def default_clock(timeout_s: float, *, interpreted: bool) -> Clock:
    return EventClock(timeout_s) if torch.cuda.is_available() and not interpreted else WallClock()


EMPTY_KERNEL_MS = 0.0006  # an empty kernel's own duration by CUPTI, on an H200
PAIRS = 9
LEAD_MS = 0.2  # before the first pair: by then the host has queued all of them
BETWEEN_MS = 0.02
MEASURED_WITHIN_S = 1.0


class EventCost:
    """Measures the events around empty kernels, which are spin kernels without cycles; asked for later."""

    def __init__(self, device: int) -> None:
        self._ms: float | None = None
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(int(LEAD_MS * CYCLES_PER_MS))
            self._pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(PAIRS)]
            for begin, end in self._pairs:
                torch.cuda._sleep(int(BETWEEN_MS * CYCLES_PER_MS))
                begin.record()
                torch.cuda._sleep(0)
                end.record()

    def ms(self) -> float:
        """Return the cost in ms, 0 if the device does not come to measuring it within `MEASURED_WITHIN_S`."""
        if self._ms is None:
            deadline = time.monotonic() + MEASURED_WITHIN_S
            while not (is_done := self._pairs[-1][1].query()) and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S)
            readings = [begin.elapsed_time(end) for begin, end in self._pairs] if is_done else [0.0]
            self._ms = max(0.0, statistics.median(readings) - EMPTY_KERNEL_MS)
        return self._ms
