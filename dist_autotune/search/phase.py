"""The phases of a search: the one under way alone says what the next run launches, and what the last told.

CompareBits -> RaceLaunches -> RaceRuns -> FinalComparison
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping

from .context import Context, Outcome
from .messages import RunReport
from .rules import BY_LAUNCH
from .strategies import interval

Plan = Mapping[str, int]  # context -> candidate; other contexts launch their incumbents


class Phase(abc.ABC):
    """`plan()` of the next run, `record(merged)` of the last one."""

    def __init__(self, contexts: Mapping[str, Context]) -> None:
        self._contexts = contexts

    @abc.abstractmethod
    def plan(self) -> Plan:
        """Return what the next run launches beside incumbents."""

    def _trials(self) -> dict[str, int]:
        """Return the candidates that contexts try by themselves."""
        races = ((c.name, c.trial) for c in self._contexts.values() if c.is_racing)
        return {name: index for name, index in races if index is not None}


class RaceLaunches(Phase):
    """Each context races alone, all at once: kernels judged by launches, or the one that has its turn."""

    def plan(self) -> Plan:
        return self._trials()

    @property
    def is_over(self) -> bool:
        return not any(context.is_tuned_by_launches for context in self._contexts.values())

    def record(self, name: str, merged: RunReport, *, judges_runs: bool) -> Outcome:
        """Record one run of all ranks for one context. judges_runs: the time of the whole run counts."""
        context, part = self._contexts[name], merged.parts[name]
        by_launch = context.judge == BY_LAUNCH
        context.record_footprint(part)
        return context.advance(part, part if by_launch else merged.run, counts=by_launch or judges_runs)


class RunPhase(Phase):
    """Asks for plans, each judged by the agreed time of the runs that launch it."""

    def __init__(self, contexts: Mapping[str, Context], rank_reduce: str) -> None:
        super().__init__(contexts)
        self.label = ""  # tells what the next run is a sample of
        self.is_warmup = False  # the next run is no sample
        self.is_over = False
        self.waiting = False  # online: some rank has not read the last run's time
        self.has_counted = False  # the last run was a sample
        self.remark = ""  # for the log
        self._plan: Plan = {}
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

    def plan(self) -> Plan:
        """Return its plan, none while a time is due; kernels that launches still judge go on with that."""
        plan = {} if self.is_over or self.waiting else self._plan
        kept = {name: i for name, i in plan.items() if not self._contexts[name].is_tuned_by_launches}
        return {**kept, **self._trials()}

    @abc.abstractmethod
    def _record(self, ms: float) -> None:
        """Record the agreed time so far of the plan, nan without one; ask for the next plan."""

    def record(self, merged: RunReport, *, patience: int) -> None:
        """Record one run of all ranks; of runs without a launch of the plan, only each `patience`-th."""
        self.has_counted = False
        if not self.waiting:  # else the report is of an earlier run
            self._was_launched = any(merged.ran(name) is not None for name in self._plan)
        self.waiting = bool(merged.run.pending)
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


class Turns:
    """One context after another: kernels, then choices of the host, each in the order of first launch.

    A context that the best plan so far does not launch waits for one that does, or starves.
    """

    def __init__(self) -> None:
        self.context: Context | None = None  # whose turn it is
        self._launched: dict[int, frozenset[str]] = {}  # its candidate -> contexts of the last run with it
        self._last: frozenset[str] | None = None  # contexts of the last run; None: there was none

    def record_launches(self, merged: RunReport) -> None:
        """Keep what a run launched."""
        self._last, context = merged.launched, self.context
        if context is not None and not context.waiting:  # else the report is of an earlier run
            index = context.index_of(merged.ran(context.name))
            if index is not None:
                self._launched[index] = self._last

    def pass_on(self, contexts: Mapping[str, Context]) -> None:
        """Let the next context begin if the last one is settled, and no kernel is judged by its launches."""
        turn = self.context
        if turn is not None and not turn.settled:
            return
        of_plan = self._last  # contexts that the best plan launches; None: unknown
        if turn is not None and turn.status == "tuned":
            of_plan = self._launched.get(turn.incumbent)
        self.context, self._launched = None, {}
        if any(context.is_tuned_by_launches for context in contexts.values()):
            return
        waiting = [context for context in contexts.values() if not context.settled]
        able = [context for context in waiting if of_plan is None or context.name in of_plan]
        self.context = min(able, key=lambda context: context.is_choice, default=None)
        if self.context is not None:
            self.context.start()
