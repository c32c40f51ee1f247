"""Runs that are judged as a whole, one plan after another."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping

from .context import Context
from .messages import RunReport
from .strategies import interval

Plan = Mapping[str, int]  # context -> candidate; other contexts launch their incumbents


class PlanTrial(abc.ABC):
    """Asks for plans, each judged by the agreed time of the runs that launch it."""

    def __init__(self, contexts: Mapping[str, Context], rank_reduce: str) -> None:
        self.plan: Plan = {}  # of the next run
        self.label = ""  # tells the plan from others
        self.is_warmup = False  # the next run is no sample
        self.is_over = False
        self.waiting = False  # online: some rank has not read the last run's time
        self.has_counted = False  # the last run was a sample
        self.remark = ""  # for the log
        self._contexts = contexts
        self._rank_reduce = rank_reduce
        self._was_launched = True  # the timed run launched a context of the plan
        self._idle_runs = 0  # in a row that launched none of them

    @property
    def is_on_trial(self) -> bool:
        """Return whether the next run is a trial."""
        return not self.waiting

    @property
    def holds(self) -> bool:
        """Return whether the next run judges nothing: kernels are tuned by their launches first."""
        return False

    @abc.abstractmethod
    def _record(self, ms: float) -> None:
        """Record the agreed time so far of the plan, nan without one; ask for the next plan."""

    def apply_run(self, merged: RunReport, *, patience: int) -> None:
        """Record one run of all ranks; of runs without a launch of the plan, only each `patience`-th."""
        self.has_counted = False
        if not self.waiting:  # else the report is of an earlier run
            self._was_launched = any(merged.ran(name) is not None for name in self.plan)
        self.waiting = bool(merged.run.pending)
        self._apply_plan()  # while a time is awaited, no more runs are spent on its plan
        if self.waiting:
            return
        if not self._was_launched:
            self._idle_runs += 1
            if self._idle_runs < patience:
                return
        self._idle_runs = 0
        self.has_counted = not self.is_warmup
        ms = merged.run.agreed_ms(self._rank_reduce)
        self._record(math.nan if ms is None else interval(ms, merged.run.gap_ms))

    def _apply_plan(self) -> None:
        """Let each context launch its candidate of the plan, unless its launches are still tuned."""
        plan = {} if self.is_over or self.waiting else self.plan
        for context in self._contexts.values():
            context.override = None if context.is_tuned_by_launches else plan.get(context.name)
