"""Samples of one rank: marks of a clock become a run's sample, samples become the rank's median."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ..errors import InvalidOption

if TYPE_CHECKING:
    from .clock import Clock  # imports torch, which readers of logs do not need

READ_WITHIN_RUNS = 2  # online: how many runs later the clock is read, ready or not
GAP_SHARE = 0.03  # of a sample: a smaller part of the host's does not count


class Sample(Struct, frozen=True, gc=False):
    """The mean over the usable launches of one run."""

    ms: float
    gap_ms: float  # how much of that may be the host's


class Reading(Struct, frozen=True, gc=False):
    """This rank's measurement of a candidate so far."""

    ran: str | None  # the candidate; None: what this rank launched in earlier runs only
    is_pending: bool = False  # the last run's clock is not read yet
    is_timed: bool = False  # it is read; False: nothing was timed
    ms: float | None = None  # the median so far; None: no sample
    gap_ms: float = 0.0  # how much of it may be the host's


class Samples:
    """The samples by which one context, or the whole run, is judged.

    `start` and `stop` time launches, `report_run` reads the clock, and `apply_outcome` keeps the sample if
    the ranks agree that it counts. Until every rank has read its own (online), exchanges repeat one reading.

    flags_gaps: ask how much of a launch may be the host's. A whole run may keep the device waiting always.
    """

    def __init__(self, clock: Clock, *, flags_gaps: bool = False) -> None:
        self.by_candidate: dict[str, list[Sample]] = {}  # those that count
        self.sample: Sample | None = None  # of the run that is reported
        self.report: Reading | None = None  # None: the ranks have agreed on the last one
        self._reports = 0  # how often it was given
        self._is_mixed = False
        self._clock = clock
        self._marks: list[Any] = []
        self._is_launching = False
        # Methods that only some clocks have; see `EventClock`.
        self._is_ready: Callable[[Any], bool] = getattr(clock, "ready", lambda mark: True)
        self._is_running: Callable[[Any], bool] = getattr(clock, "is_running", lambda mark: False)
        flagged = clock if flags_gaps else None
        self._gap_ms: Callable[[Any], float] = getattr(flagged, "gap_ms", lambda mark: 0.0)

    def start(self) -> Any:
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
        return self.report is not None and not self.report.is_pending

    def begin_run(self) -> None:
        """Forget the last run, unless its report is to be repeated."""
        self._is_launching = False
        if self.report is None:
            self._marks.clear()
            self.sample = None

    def report_run(self, ran: str | None, *, waits: bool, is_mixed: bool = False) -> Reading:
        """Return the reading of the run that launched `ran`.

        waits: read the clock now; else when the device is done, or has the work of two more runs.
        is_mixed: it launched several candidates, so its time is no sample of one.
        """
        if self.report is None:
            self.report, self._reports = Reading(ran, is_pending=bool(self._marks)), 0
            self._is_mixed = is_mixed
        is_due = waits or self._reports >= READ_WITHIN_RUNS
        self._reports += 1
        if self.report.is_pending and (is_due or all(map(self._is_ready, self._marks))):
            known = self.by_candidate.setdefault(str(self.report.ran), [])
            self.sample = self._read_sample()
            new = [] if self.sample is None else [self.sample]
            self.report = self._reading(self.report.ran, [*known, *new])
        return self.report

    def report_earlier_runs(self, candidate: str) -> Reading | None:
        """Return the median of a candidate that this rank launched in earlier runs only; None: never."""
        known = self.by_candidate.get(candidate)
        return None if known is None else self._reading(None, known)

    def apply_outcome(self, *, waiting: bool, counts: bool, late_ms: float = 0.0) -> None:
        """Keep the reported sample if it `counts`; `waiting`: the report is to be repeated.

        late_ms: by how much the host of some rank was later than usual, which may be in the sample.
        """
        if self.report is None or waiting:
            return
        if (sample := self.sample) is not None and counts:
            self.sample = replace(sample, gap_ms=max(sample.gap_ms, min(late_ms, sample.ms)))
            self.by_candidate[str(self.report.ran)].append(self.sample)
        self.report = None

    def abandon_run(self) -> None:
        """Drop the run under way: it raised."""
        self.report = None
        self.begin_run()

    def _read_sample(self) -> Sample | None:
        times = [(self._clock.read_ms(mark), self._gap_ms(mark)) for mark in self._marks]
        self._marks.clear()
        numbers = [
            (self._number("read_ms", ms), self._number("gap_ms", gap)) for ms, gap in times if ms is not None
        ]
        usable = [(ms, gap_ms) for ms, gap_ms in numbers if math.isfinite(ms) and ms > 0]
        if not usable or self._is_mixed:
            return None
        gap_ms = statistics.fmean(min(gap_ms, ms) for ms, gap_ms in usable)
        return Sample(statistics.fmean(ms for ms, _ in usable), gap_ms)

    def _number(self, method: str, value: Any) -> float:
        """Return a clock's value as a float; raises InvalidOption for another type."""
        try:
            math.isfinite(value)  # takes no text, which float() would read
        except TypeError:
            raise InvalidOption(
                f"clock={self._clock!r}: {method}() returned {value!r}; return milliseconds, as a number"
            ) from None
        return float(value)

    def _reading(self, ran: str | None, samples: list[Sample]) -> Reading:
        if not samples:
            return Reading(ran, is_timed=True)
        exact = [sample.ms for sample in samples if sample.gap_ms <= GAP_SHARE * sample.ms]
        # Samples without the host's part say the kernel's time, and the others add nothing.
        ms = statistics.median(exact or [sample.ms for sample in samples])
        gap_ms = 0.0 if exact else min(ms, statistics.median(sample.gap_ms for sample in samples))
        return Reading(ran, is_timed=True, ms=ms, gap_ms=gap_ms)
