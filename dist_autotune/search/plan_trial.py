"""Runs that are judged as a whole, under plans that somebody makes. No torch, no I/O, no clock."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping

from .context_search import Context
from .messages import FS_PER_MS, RunReport
from .strategies import AgreedMs

Plan = Mapping[str, int]  # context -> candidate; what it leaves out launches its incumbent


class PlanTrial(abc.ABC):
    """One plan after another, each judged by the agreed time of the runs that launch it."""

    def __init__(self, rank_reduce: str) -> None:
        self.waiting = False  # online: the last run's time is not read yet on some rank
        self.has_counted = False  # the last run that was taken in was a sample
        self._rank_reduce = rank_reduce
        self._was_launched = True  # whether the run that is timed launched any of the contexts
        self._idle_runs = 0  # in a row that launched none of them

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """What tells the plan of the next run from others."""

    @property
    @abc.abstractmethod
    def is_warmup(self) -> bool:
        """Whether the next run is no sample."""

    @property
    def holds(self) -> bool:
        """Whether the next run judges nothing."""
        return False

    @property
    @abc.abstractmethod
    def is_over(self) -> bool:
        """Whether no more runs are wanted."""

    @property
    @abc.abstractmethod
    def compared(self) -> Iterable[Context]:
        """The contexts that the plan of the next run is about."""

    @abc.abstractmethod
    def _turn(self) -> None:
        """Let each context launch what the next run is to launch; while `waiting`, what is best so far."""

    @abc.abstractmethod
    def advance(self, ms: float) -> None:
        """Take the agreed time so far of the plan that ran; nan: it has none."""

    def take(self, merged: RunReport, *, patience: int) -> None:
        """Take in one run of all ranks.

        A run that launches nothing of what is compared compares nothing, but for the last of `patience` such
        runs in a row.
        """
        self.has_counted = False
        if not self.waiting:  # else what is told now is of an earlier run
            parts = [merged.parts.get(context.name) for context in self.compared]
            self._was_launched = any(part is not None and part.ran is not None for part in parts)
        self.waiting = bool(merged.run.pending)
        self._turn()  # while a time is awaited, no more runs are spent on its plan
        if self.waiting:
            return
        if not self._was_launched:
            self._idle_runs += 1
            if self._idle_runs < patience:
                return
        self._idle_runs = 0
        self.has_counted = not self.is_warmup
        self.advance(self._agreed_ms(merged))

    def _agreed_ms(self, merged: RunReport) -> float:
        """Return the agreed time of the whole run, as an interval where a host may be in it."""
        run = merged.run
        if run.unmeasured or not run.measured:
            return math.nan
        ms = run.worst_ms if self._rank_reduce == "max" else run.total_fs / (run.measured * FS_PER_MS)
        return AgreedMs(ms, ms - run.gap_ms) if run.gap_ms > 0 else ms
