"""Progress, gain and remaining runs of a session."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..formatting import counted, format_ms, format_percent
from .context import Context
from .phases import race_runs, verify_bits
from .phases.final_comparison import DUEL_RUNS, MOST_RUNS
from .phases.pace import StepKind
from .rules import BY_LAUNCH, BY_RUN, Rules

RUNS_ALLOWED = 4  # max_runs=None: this many times the runs that the search plans


@dataclass(frozen=True)
class Forecast:
    """Progress of a session, and the runs that it may still take."""

    timed: int  # candidates with a time, or banned, in all contexts
    candidates: int
    planned_trials: int  # at most, as the search plans
    runs: int  # so far, also those without a trial
    trials: int = 0
    waits: int = 0  # online: until a trial's time was read on all ranks
    held: int = 0  # online: until candidates were compiled
    compiling: int = 0  # candidates that are still compiled, on the rank that has most
    contexts: int = 0  # that the session searches
    settled: int = 0  # of them

    @property
    def more_runs(self) -> int:
        """Return the runs to come if the search takes all that it plans."""
        runs = self.runs - self.held
        return math.ceil(max(self.planned_trials - self.trials, 1) * runs / max(self.trials, 1))

    @property
    def done(self) -> float:
        """Return the part of the planned trials that is made, between 0 and 1."""
        return min(self.trials / max(self.planned_trials, 1), 1.0)

    def __str__(self) -> str:
        made = f"{self.timed} of {counted(self.candidates, 'candidate')} timed"
        trials = f"{self.trials} of at most {counted(max(self.planned_trials, self.trials), 'trial')}"
        waits = f" ({self.waits} waited for the device)" if self.waits else ""
        if self.compiling:
            made += f" ({self.compiling} still compiling)"
        runs = f"in {counted(self.runs, 'run')}{waits}; about {counted(self.more_runs, 'run')} to go"
        return f"{made}, {trials} {runs}"


@dataclass
class RunsMade:
    """The runs of a session so far."""

    session: int = 0  # its number among those of this state
    remark: str = ""  # on the last one, for the log
    admitting: set[int] = field(default_factory=set)  # in which searches have begun
    idle: int = 0  # without a trial, in a row
    is_sample: bool = False  # the time of the last one as a whole was one
    has_compared: bool = False  # steps, as they were and are
    pays_back: bool = False  # the next one, after the last trial
    trials: int = 0
    waits: int = 0  # online: for a trial's time
    held: int = 0  # online: until candidates were compiled

    def count(self, kind: StepKind, *, waits: bool) -> None:
        """Count a run as a trial, as a wait for a trial's time, or as held until candidates are compiled."""
        if kind in (StepKind.NEW, StepKind.TRIAL):
            self.trials += 1
        elif waits:
            self.waits += 1
        elif kind is StepKind.COMPILING:
            self.held += 1

    def forecast(self, searched: SearchedContexts, runs: int) -> Forecast:
        """Return the progress of a session that searches these contexts."""
        return Forecast(
            **searched.counts._asdict(),
            contexts=len(searched),
            planned_trials=searched.planned_runs - 1,
            runs=runs,
            trials=self.trials,
            waits=self.waits,
            held=self.held,
        )


@dataclass(frozen=True)
class StepTimes:
    """Measured ms of one run of the function, untuned and tuned.

    judge "launch": of the launches of contexts with both times. "run": of the slowest plan that keeps an
    untuned candidate, and of the fastest plan.
    """

    before_ms: float
    after_ms: float
    judge: str
    left_out: int = 0  # contexts judged so that lack one of the times

    @property
    def gain_percent(self) -> float:
        return 100 * (1 - self.after_ms / self.before_ms)

    def __str__(self) -> str:
        of = "launches" if self.judge == BY_LAUNCH else "whole run"
        times = f"{format_ms(self.before_ms)} -> {format_ms(self.after_ms)} ms"
        left_out = f"; {counted(self.left_out, 'context')} of unknown gain left out" if self.left_out else ""
        return f"{of} {times} a step ({format_percent(-self.gain_percent)} %{left_out})"


class Counts(NamedTuple):
    """Of one context, or of all that a session searches; see `Forecast`."""

    timed: int = 0
    candidates: int = 0
    settled: int = 0
    compiling: int = 0

    @classmethod
    def of(cls, context: Context) -> Counts:
        timed = len(context.times.ms) + len(context.banned)  # none is both
        return cls(timed, context.search.most_tried, context.settled, context.compiling)


class SearchedContexts:
    """The contexts that a session searches, with sums over them: a change of one costs what one does."""

    def __init__(self, rules: Rules, contexts: Iterable[Context] = ()) -> None:
        self._rules = rules
        self._contexts: dict[str, Context] = {}
        self._counts: dict[str, Counts] = {}  # by context
        self._ends: dict[str, int] = {}  # the last run that is planned for its launches
        self._begun: dict[str, int | None] = {}  # when its search began
        self._together = 0  # the last of these; -1: to be found anew
        self._in_turn = -1  # further runs, of what runs judge; -1: likewise
        self.counts = Counts()
        for context in contexts:
            self.update(context)

    def __len__(self) -> int:
        return len(self._contexts)

    def update(self, context: Context) -> None:
        """Count a context as it is now."""
        name, now = context.name, Counts.of(context)
        before = self._counts.get(name)
        if now == before and context.began == self._begun[name]:
            return
        end, end_before = planned_end(self._rules, context), self._ends.get(name, 0)
        self._count(before or Counts(), now)
        if end >= self._together >= 0:
            self._together = end
        elif end_before == self._together:
            self._together = -1
        if self._rules.bits != "any" or BY_RUN in self._rules.judges(is_choice=context.is_choice):
            self._in_turn = -1
        self._contexts[name], self._counts[name] = context, now
        self._begun[name], self._ends[name] = context.began, end

    def discard(self, name: str) -> None:
        """Count a context no more."""
        if self._contexts.pop(name, None) is not None:
            self._count(self._counts.pop(name), Counts())
            del self._ends[name], self._begun[name]
            self._together = self._in_turn = -1

    def _count(self, before: Counts, now: Counts) -> None:
        sums = zip(self.counts, before, now, strict=True)
        self.counts = Counts(*(total - old + new for total, old, new in sums))

    @property
    def planned_runs(self) -> int:
        """Return the runs that the session plans for these contexts, with the final one."""
        if self._together < 0:
            self._together = max(self._ends.values(), default=0)
        if self._in_turn < 0:
            self._in_turn = planned_in_turn(self._rules, self._contexts.values())
        return self._together + self._in_turn + 1


class SessionSums:
    """Sums over the contexts of a session, each counted anew where it may have changed."""

    def __init__(self, rules: Rules, contexts: Iterable[Context]) -> None:
        self._searched = SearchedContexts(rules)
        self._saved_ms: dict[str, float] = {}  # by context
        self._uncounted: dict[str, Context] = {}
        self._unsaved: dict[str, Context] = {}
        self.note(contexts)

    def note(self, contexts: Iterable[Context]) -> None:
        """Note contexts that may have changed."""
        changed = {context.name: context for context in contexts}
        self._uncounted |= changed
        self._unsaved |= changed

    @property
    def searched(self) -> SearchedContexts:
        """Return the contexts that the session searches."""
        for context in self._uncounted.values():
            if context.began is None:
                self._searched.discard(context.name)
            else:
                self._searched.update(context)
        self._uncounted.clear()
        return self._searched

    @property
    def saved_s(self) -> float:
        """Return the seconds of the device that the configs found so far save in a run."""
        self._saved_ms |= {name: context.saved_ms for name, context in self._unsaved.items()}
        self._unsaved.clear()
        return sum(self._saved_ms.values()) / 1e3


def planned_end(rules: Rules, context: Context) -> int:
    """Return the last run that is planned for launches of a context."""
    judges = rules.judges(is_choice=context.is_choice)
    runs = rules.planned_runs(context.search.most_tried) if BY_LAUNCH in judges else 1
    return (context.began or 0) + runs


def planned_in_turn(rules: Rules, searched: Collection[Context]) -> int:
    """Return the runs that are planned for what whole runs judge in these contexts."""
    by_run = [c for c in searched if BY_RUN in rules.judges(is_choice=c.is_choice)]
    in_turn = sum(rules.planned_runs(c.search.most_tried) for c in by_run)
    kernels = sum(not context.is_choice for context in by_run)
    if rules.races and in_turn:
        in_turn = sum(rules.planned_runs(c.search.most_tried) for c in searched if c.is_tuned_separately)
        choices = {c.name: len(c.digests) for c in searched if c.is_choice and not c.is_tuned_separately}
        if choices or kernels:
            in_turn += race_runs.runs_at_most(choices, kernels)
    if rules.objective != "kernel":  # a third plan needs a third candidate, or a second context
        plans = math.prod(len(context.digests) for context in searched)
        in_turn += DUEL_RUNS if plans <= 2 else MOST_RUNS
    if rules.bits != "any":
        in_turn += verify_bits.runs_at_most(len(context.digests) for context in searched)
    return in_turn


def is_spent(rules: Rules, searching: Callable[[], SearchedContexts], runs: int, elapsed_s: float) -> bool:
    """Return whether the run after the `runs` made so far must be the last.

    searching: returns the contexts that the session searches.
    """
    allowed = rules.max_runs
    if allowed is None and rules.mode == "replay" and (searched := searching()):
        allowed = RUNS_ALLOWED * searched.planned_runs
    out_of_runs = allowed is not None and runs + 1 >= allowed
    return out_of_runs or (rules.budget_s is not None and elapsed_s >= rules.budget_s)
