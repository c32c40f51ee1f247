"""Samples of one rank: marks of a clock become a run's sample, samples become the rank's statistic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .clock import Clock
from .payload import MIXED, Part

STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "min": min,
}


class Stopwatch:
    """Times what one context, or the whole run, is judged by.

    A run is timed by `start` and `stop`, told by `tell`, and its sample is kept or dropped by `take`,
    when the ranks have agreed what the run was. While some rank's sample is not read yet (online), the
    same report is told again at every exchange.
    """

    def __init__(self, clock: Clock, statistic: str) -> None:
        self.samples: dict[str, list[float]] = {}  # candidate -> ms of each run
        self.sample_ms: float | None = None  # of the run being told
        self.report: Part | None = None
        self._clock = clock
        self._statistic = STATISTICS[statistic]
        self._marks: list[Any] = []

    def start(self) -> Any:
        return self._clock.start()

    def stop(self, mark: Any) -> None:
        self._clock.stop(mark)
        self._marks.append(mark)

    def begin_run(self) -> None:
        """Forget the last run, unless it is still to be told again."""
        if self.report is None:
            self._marks.clear()
            self.sample_ms = None

    def tell(self, ran: str | None, *, waits: bool) -> Part:
        """Return what to tell of the run in which `ran` was launched.

        `waits`: read the clock now; otherwise only when the device's work is done.
        """
        if self.report is None:
            self.report = Part(ran=ran, pending=int(bool(self._marks)))
        if self.report.pending and (waits or self._are_ready()):
            self.report = self._read(self.report)
        return self.report

    def retell(self, candidate: str) -> Part | None:
        """Return what to tell of a candidate that this rank has launched before, but not in this run."""
        return self._statistic_of(candidate, Part()) if candidate in self.samples else None

    def take(self, *, waiting: bool, counts: bool) -> None:
        """Learn what the told run was: `counts` as a sample, or not; `waiting`: to be told again."""
        if self.report is None or waiting:
            return
        if not counts and self.sample_ms is not None:
            self.samples[str(self.report.ran)].pop()
        self.report = None

    def abandon(self) -> None:
        """Drop the run under way: it raised."""
        self.report = None
        self.begin_run()

    def _are_ready(self) -> bool:
        ready = getattr(self._clock, "ready", None)
        return ready is None or all(ready(mark) for mark in self._marks)

    def _read(self, report: Part) -> Part:
        """Read the clock: the run's sample is the mean of its usable launches."""
        times_ms = [self._clock.read_ms(mark) for mark in self._marks]
        self._marks.clear()
        usable = [float(ms) for ms in times_ms if ms is not None and math.isfinite(ms) and ms > 0]
        samples = self.samples.setdefault(str(report.ran), [])
        if usable and report.ran != MIXED:
            self.sample_ms = statistics.fmean(usable)
            samples.append(self.sample_ms)
        return self._statistic_of(str(report.ran), replace(report, pending=0))

    def _statistic_of(self, candidate: str, report: Part) -> Part:
        samples = self.samples[candidate]
        if not samples:
            return replace(report, unmeasured=1)
        ms = self._statistic(samples)
        return replace(report, worst_ms=ms, best_ms=ms, total_ms=ms, measured=1)
