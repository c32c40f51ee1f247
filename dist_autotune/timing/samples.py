"""Samples of one rank: marks of a clock become a run's sample, samples become the rank's statistic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..search.messages import MIXED, Part, femtoseconds

if TYPE_CHECKING:
    from .clock import Clock  # imports torch, which nobody who only reads logs needs

STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "min": min,
}
READ_WITHIN_RUNS = 2  # of the run that a sample is of, also where nobody waits for the device otherwise
GAP_SHARE = 0.03  # of a sample: a host's part that is no more does not count


class Samples:
    """Times what one context, or the whole run, is judged by.

    A run is timed by `start` and `stop`, told by `tell`, and its sample is kept or dropped by `take`,
    when the ranks have agreed what the run was. While some rank's sample is not read yet (online), the
    same report is told again at every exchange.

    flags_gaps: ask the clock how much of a sample the host may have added. Not of a whole run: a long one may
    keep the device waiting whenever it runs. Of either, what is known later is added by `take`.
    """

    def __init__(self, clock: Clock, statistic: str, *, flags_gaps: bool = False) -> None:
        self.samples: dict[str, list[float]] = {}  # candidate -> ms of each run
        self.sample_ms: float | None = None  # of the run being told
        self.sample_gap_ms = 0.0  # how much of that may be the host's
        self.report: Part | None = None
        self._tells = 0  # of this report, so far
        self._clock = clock
        self._statistic = STATISTICS[statistic]
        self._marks: list[Any] = []
        self._gaps_ms: dict[str, list[float]] = {}  # candidate -> the host's part, at most, of each run
        self._is_launching = False
        # What only some clocks have; see `EventClock`.
        self._gap_ms: Callable[[Any], float] | None = getattr(clock, "gap_ms", None) if flags_gaps else None
        self._is_running: Callable[[Any], bool] = getattr(clock, "is_running", lambda mark: False)

    def start(self) -> Any:
        """Mark the beginning of a launch, or of a run."""
        self._is_launching = True
        return self._clock.start()

    def stop(self, mark: Any) -> None:
        self._clock.stop(mark)
        self._is_launching = False
        self._marks.append(mark)

    @property
    def is_running(self) -> bool:
        """Return whether a launch of this run is being made or runs on the device; any thread may ask."""
        try:
            return self._is_launching or any(map(self._is_running, tuple(self._marks)))
        except RuntimeError:  # the device answers every question with an error that is told elsewhere
            return False

    @property
    def is_read(self) -> bool:
        """Return whether the run that is told, this one or an earlier one, is read: it may hold no sample."""
        return self.report is not None and not self.report.pending

    def begin_run(self) -> None:
        """Forget the last run, unless it is still to be told again."""
        self._is_launching = False
        if self.report is None:
            self._marks.clear()
            self.sample_ms, self.sample_gap_ms = None, 0.0

    def tell(self, ran: str | None, *, waits: bool) -> Part:
        """Return what to tell of the run in which `ran` was launched.

        `waits`: read the clock now; otherwise when the device's work is done, or two runs later. The device
        has the work of those runs before it when this rank begins to wait, so it does not run dry.
        """
        if self.report is None:
            self.report, self._tells = Part(ran=ran, pending=int(bool(self._marks))), 0
        is_due = waits or self._tells >= READ_WITHIN_RUNS
        self._tells += 1
        if self.report.pending and (is_due or self._are_ready()):
            self.report = self._read(self.report)
        return self.report

    def retell(self, candidate: str) -> Part | None:
        """Return what to tell of a candidate that this rank has launched before, but not in this run."""
        return self._statistic_of(candidate, Part()) if candidate in self.samples else None

    def take(self, *, waiting: bool, counts: bool, late_ms: float = 0.0) -> None:
        """Learn what the told run was: `counts` as a sample, or not; `waiting`: to be told again.

        late_ms: by how much the host of some rank was later than usual, which may be in the sample.
        """
        if self.report is None or waiting:
            return
        if self.sample_ms is not None:
            gaps_ms = self._gaps_ms[str(self.report.ran)]
            if counts:
                gaps_ms[-1] = self.sample_gap_ms = max(gaps_ms[-1], min(late_ms, self.sample_ms))
            else:
                self.samples[str(self.report.ran)].pop()
                gaps_ms.pop()
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
        times = [(self._clock.read_ms(mark), self._gap_of(mark)) for mark in self._marks]
        self._marks.clear()
        usable = [(float(ms), gap) for ms, gap in times if ms is not None and math.isfinite(ms) and ms > 0]
        samples = self.samples.setdefault(str(report.ran), [])
        gaps_ms = self._gaps_ms.setdefault(str(report.ran), [])
        if usable and report.ran != MIXED:
            self.sample_ms = statistics.fmean(ms for ms, _ in usable)
            self.sample_gap_ms = statistics.fmean(min(gap, ms) for ms, gap in usable)
            samples.append(self.sample_ms)
            gaps_ms.append(self.sample_gap_ms)
        return self._statistic_of(str(report.ran), replace(report, pending=0))

    def _gap_of(self, mark: Any) -> float:
        return 0.0 if self._gap_ms is None else float(self._gap_ms(mark))

    def _statistic_of(self, candidate: str, report: Part) -> Part:
        samples = self.samples[candidate]
        if not samples:
            return replace(report, unmeasured=1)
        gaps_ms = self._gaps_ms[candidate]
        exact = [ms for ms, gap_ms in zip(samples, gaps_ms, strict=True) if gap_ms <= GAP_SHARE * ms]
        # Samples in which the host had no part say what the kernel takes, and the others nothing more.
        ms = self._statistic(exact or samples)
        gap_ms = 0.0 if exact else min(ms, statistics.median(gaps_ms))
        return replace(report, worst_ms=ms, best_ms=ms, total_fs=femtoseconds(ms), gap_ms=gap_ms, measured=1)
