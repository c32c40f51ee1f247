"""Progress, gain and remaining runs of a session."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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

    def forecast(self, rules: Rules, searched: Sequence[Context], runs: int) -> Forecast:
        """Return the progress of a session that searches these contexts."""
        return Forecast(
            timed=sum(len(context.times.ms) + len(context.banned) for context in searched),  # none is both
            candidates=sum(context.search.most_tried for context in searched),
            contexts=len(searched),
            settled=sum(context.settled for context in searched),
            planned_trials=planned_runs(rules, searched) - 1,
            runs=runs,
            trials=self.trials,
            waits=self.waits,
            held=self.held,
            compiling=sum(context.compiling for context in searched),
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


def planned_runs(rules: Rules, searched: Sequence[Context]) -> int:
    """Return the runs that the session plans for these contexts, with the final one."""
    together, in_turn, kernels = 0, 0, 0
    for context in searched:
        runs, first_run = rules.planned_runs(context.search.most_tried), context.began or 0
        judges = rules.judges(is_choice=context.is_choice)
        together = max(together, first_run + (runs if BY_LAUNCH in judges else 1))
        if BY_RUN in judges:
            in_turn += runs
            kernels += not context.is_choice
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
    return together + in_turn + 1


def is_spent(rules: Rules, searched: Sequence[Context], runs: int, elapsed_s: float) -> bool:
    """Return whether the run after the `runs` made so far must be the last."""
    allowed = rules.max_runs
    if allowed is None and searched and rules.mode == "replay":
        allowed = RUNS_ALLOWED * planned_runs(rules, searched)
    out_of_runs = allowed is not None and runs + 1 >= allowed
    return out_of_runs or (rules.budget_s is not None and elapsed_s >= rules.budget_s)
