"""How a launch is timed: CUDA events on the launch's own stream, or the wall clock.

A clock only marks; nothing waits for the device until `read_ms` at the end of the run.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, runtime_checkable

import torch

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


class EventClock:
    """CUDA events recorded on the current stream of the current device, as Triton launches there.

    Waiting is polling, so that Ctrl-C works and a stuck kernel becomes a `TimeoutError` after
    `timeout_s` seconds instead of a hang. Events are reused.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s
        self._free: dict[int, list[torch.cuda.Event]] = {}

    def start(self) -> tuple[int, torch.cuda.Event, torch.cuda.Event]:
        device = torch.cuda.current_device()
        free = self._free.setdefault(device, [])
        begin, end = (self._event(free), self._event(free))
        begin.record()
        return device, begin, end

    def stop(self, mark: tuple[int, torch.cuda.Event, torch.cuda.Event]) -> None:
        mark[2].record()

    def ready(self, mark: tuple[int, torch.cuda.Event, torch.cuda.Event]) -> bool:
        """Return whether `read_ms` would return without waiting."""
        return bool(mark[2].query())

    def read_ms(self, mark: tuple[int, torch.cuda.Event, torch.cuda.Event]) -> float:
        device, begin, end = mark
        deadline = time.monotonic() + self.timeout_s
        while not end.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a launch on cuda:{device} did not end within {self.timeout_s:g} s")
            time.sleep(POLL_INTERVAL_S)
        ms = float(begin.elapsed_time(end))
        self._free[device] += [begin, end]
        return ms

    @staticmethod
    def _event(free: list[torch.cuda.Event]) -> torch.cuda.Event:
        return free.pop() if free else torch.cuda.Event(enable_timing=True)


def default_clock(timeout_s: float, *, interpreted: bool) -> Clock:
    """Return an `EventClock` where kernels run on a GPU, else a `WallClock`."""
    return EventClock(timeout_s) if torch.cuda.is_available() and not interpreted else WallClock()
