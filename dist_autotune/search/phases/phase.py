"""The phases of a search: the one under way plans the next run, and reads the last.

Phase: launches judge kernels -> RaceRuns, or TakeTurns -> FinalComparison -> VerifyBits
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping

from ..context import Context, RunVerdict
from ..plans.search import AskedPlan, Search
from ..plans.space import Plan
from ..reports import AgreedPart, AgreedRun
from ..rules import BY_RUN, Rules
from ..shared_context import Outcome, Status
from ..strategies import interval

NEW_KEYS_RUNS = 16  # of an option in which it may bring kernels; new keys in every run must end


class Phase:
    """The phase in which all kernels race, each judged by its launches; later ones plan whole runs."""

    def __init__(self, contexts: Mapping[str, Context]) -> None:
        self._contexts = contexts

    def plan(self) -> Mapping[str, int]:
        """Return the next run's candidates that are neither incumbents nor trials of the contexts' own."""
        return {}

    @property
    def follows_fit(self) -> bool:
        """Return whether choosing the next run took the host long, so that ranks come late to it."""
        return False


class RunPhase(Phase, abc.ABC):
    """Asks for plans, each judged by the agreed time of the runs that launch it.

    Kernels that come meanwhile are tuned by their launches first; runs judge nothing else then.
    """

    def __init__(self, contexts: Mapping[str, Context], rules: Rules, name: str = "") -> None:
        super().__init__(contexts)
        self.is_over = False
        self.waiting = False  # online: some rank has not read the last run's time
        self.is_held = False  # the next run tries nothing: see `Pace`
        self.has_counted = False  # the last run was a sample
        self.outcomes: dict[str, Outcome] = {}  # what it was for contexts, where one is judged at a time
        self.remark = ""  # for the log
        self._rules, self._name = rules, name
        self._ms: dict[str, tuple[Plan, float]] = {}  # by label: plans and their agreed times
        self._search: Search = iter(())  # type: ignore[assignment]  # none yet
        self._asked = AskedPlan({}, "")
        self._run = AgreedPart()  # the last run as a whole, of all ranks
        self._launched: frozenset[str] = frozenset()  # in it
        self._tuned_kernels = False  # it had a kernel on trial
        self._was_launched = True  # the timed run launched a context of the plan
        self._idle_runs = 0  # in a row that launched none of them
        self._asked_runs = 0  # since the plan was asked for

    @property
    def label(self) -> str:
        """Return the label of the plan that the next run is a sample of."""
        return self._name + self._asked.label

    @property
    def follows_fit(self) -> bool:
        """Return whether choosing the next run took so: its plan may be asked for in several."""
        return self._asked.follows_fit and not self._asked_runs

    @property
    def is_on_trial(self) -> bool:
        """Return whether the next run is a trial."""
        return not (self.waiting or self.is_held)

    @property
    def holds(self) -> bool:
        """Return whether the next run judges nothing."""
        return self.is_held or self._tunes_kernels

    @property
    def _tunes_kernels(self) -> bool:  # by their launches first
        return any(context.is_tuned_by_launches for context in self._contexts.values())

    @property
    def admits(self) -> bool:
        """Return whether a new kernel is tuned: the option that is launched may have brought it."""
        return self._asked.may_bring and self._asked_runs <= NEW_KEYS_RUNS

    def explains_absence(self, context: Context) -> bool:
        """Return whether a context may be launched again though it was not: the phase ends its wait."""
        return context.judge == BY_RUN

    def plan(self) -> Mapping[str, int]:
        """Return its plan, none while a time is due; kernels that launches still judge go on with that."""
        plan = self._asked.plan if self.is_on_trial and not self.is_over else {}
        return {name: i for name, i in plan.items() if not self._contexts[name].is_tuned_by_launches}

    def record(self, report: AgreedRun, *, patience: int) -> None:
        """Record one run of all ranks; of runs without a launch of the plan, only each `patience`-th."""
        self.has_counted, self.outcomes = False, {}
        self._run, self._launched = report.run, report.launched
        self._asked_runs += 1
        tuned_kernels, self._tuned_kernels = self._tuned_kernels, self._tunes_kernels
        is_held = self.is_held and not self.waiting  # else the report is of an earlier run
        if is_held or self._tuned_kernels or tuned_kernels or not self._ran_as_planned(report):
            return
        if not self.waiting:  # else the report is of an earlier run
            self._was_launched = any(report.ran(name) is not None for name in self._asked.plan)
        self.waiting = report.run.is_pending
        if self.waiting:
            return
        if not self._was_launched:
            self._idle_runs += 1
            if self._idle_runs < patience:
                return
        self._idle_runs = 0
        self.has_counted = not self._asked.is_warmup
        ms = report.run.ms
        self._resume(math.nan if ms is None else interval(ms, report.run.gap_ms))

    def _ran_as_planned(self, report: AgreedRun) -> bool:
        if self.waiting:
            return True  # the report is of an earlier run
        for name, index in self._asked.plan.items():
            context = self._contexts[name]
            if report.ran(name) not in (None, context.digests[index]):
                return index in context.banned
        return True

    def _begin(self, search: Search) -> None:
        self._search, self.is_over = search, False
        self._resume(None)

    def _resume(self, ms: float | None) -> None:
        """Send the time of the plan, inf if a candidate of it is banned; ask for the next one."""
        self._asked_runs = 0
        try:
            self._asked = next(self._search) if ms is None else self._send(ms)
            while self._is_banned(self._asked.plan):
                self._launched = frozenset()
                self._asked = self._send(math.inf)
        except StopIteration as stop:
            self.is_over = True
            self._finish(stop.value)

    def _send(self, ms: float) -> AskedPlan:
        asked = self._asked
        if self._is_banned(asked.plan):  # in this run: another candidate stood in
            ms = math.inf
        if math.isfinite(ms) and not asked.is_warmup:
            self._ms[asked.label] = asked.plan, ms
        return self._search.send(ms)

    def _is_banned(self, plan: Plan) -> bool:
        return any(index in self._contexts[name].banned for name, index in plan.items())

    @abc.abstractmethod
    def _finish(self, plan: Plan) -> None:
        """Settle the searched contexts; plan: the result of the search."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Stop early, with the results so far."""


class TakeTurns(RunPhase):
    """One context after another: kernels, then choices of the host, each in the order of first launch.

    A context that the best plan so far does not launch waits for one that does, or starves.
    launched: in the last run; None: not known. only_separate: choices of too many options for plans.
    """

    def __init__(
        self,
        contexts: Mapping[str, Context],
        rules: Rules,
        launched: frozenset[str] | None,
        *,
        only_separate: bool = False,
    ) -> None:
        super().__init__(contexts, rules)
        self._only_separate = only_separate
        self._begin(self._turns(launched))

    def explains_absence(self, context: Context) -> bool:
        turn = self._asked.plan
        if context.judge == BY_RUN and any(self._contexts[name].is_choice for name in turn):
            return True  # an option may not launch it, as long as the kernels that it brings are tuned
        return context.name in turn  # others wait, as long as contexts do

    def _turns(self, of_plan: frozenset[str] | None) -> Search:
        seen: set[str] = set()  # launched in some turn
        while able := [c for c in self._waiting() if of_plan is None or c.name in of_plan]:
            context, launched = min(able, key=lambda c: c.is_choice), {}
            search = context.search
            search.start()
            while not context.settled and (index := search.next_trial()) is not None:
                label, is_warmup = f"{context.name}|{context.digests[index]}", search.is_warmup
                yield AskedPlan({context.name: index}, label, is_warmup, may_bring=context.is_choice)
                if index in context.banned:
                    search.drop_trial()
                elif context.name in self._launched:
                    launched[index] = self._launched
                    seen |= self._launched
                    self.outcomes = {context.name: search.record(self._run)}
                else:
                    context.settle(Status.STARVED)
            of_plan = launched.get(context.incumbent) if context.status is Status.TUNED else self._launched
            for other in self._waiting():
                is_left_out = other.name in seen - (of_plan or frozenset())
                other.by_run = RunVerdict.LEFT_OUT if is_left_out else RunVerdict.NOTHING
        return {}

    def _waiting(self) -> list[Context]:
        waiting = (context for context in self._contexts.values() if not context.settled)
        return [context for context in waiting if context.is_tuned_separately or not self._only_separate]

    def _finish(self, plan: Plan) -> None:
        """Each context is settled at the end of its turn."""

    def leave(self) -> None:
        self._search.close()
