"""How what all ranks said of a run becomes the next plan. No torch, no I/O, no clock.

`SearchState` is the state that every rank holds alike: fed the same merged payloads, it yields the same
plans, so every rank makes the same number of runs.

First all kernels advance together, each judged by its own launches. Then what is judged by the whole run's
time is searched from the winners so far: as plans (`whole_run`), or one context after another (`turns`) where
the strategy is not racing. With `objective="thunk"` the plan that results must beat the default plan, and the
plan by launch times, in a final comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace

from ..codec import digest
from . import budget
from .budget import Forecast, RunsSpent
from .context_search import Context, Outcome
from .contexts import Contexts
from .messages import CrashBans, Part, RunReport
from .plan_trial import PlanTrial
from .rules import BY_LAUNCH, BY_RUN, Rules

ADMISSION_RUNS = 16  # contexts first seen later are partial, so that new keys at every run end
STARVED_RUNS = {"replay": 3, "online": 64}
IDLE_RUNS = 3  # runs without a trial after which a session ends even if ranks still differ in what they ran


class SearchState:
    """The state of one tuned function. `step(merged)` after each run; `done` ends the session."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.contexts = Contexts(rules)
        self.kernels = KernelFamilies()
        self.runs = 0
        self.done = False
        self.closing = not rules.tunes
        self.has_counted_run = False  # the time of the last run as a whole was a sample
        self.remark = ""
        self.session = ""  # the last one that used this state
        self.crash_bans: CrashBans = {}
        self._admitting: set[int] = set()  # the runs of the session in which searches have begun
        self._idle_runs = 0
        self._is_judging = True  # the run under way may judge what is judged by the whole run
        self._bringing_runs = 0  # in a row that announced kernels
        self._spent = RunsSpent()

    # -- the state -----------------------------------------------------------------------------------------

    @property
    def plan_trial(self) -> PlanTrial | None:
        """Return what judges whole runs of plans: the search for one, or the final comparison."""
        return self.contexts.comparison.duel or self.contexts.whole_run

    @property
    def has_trial(self) -> bool:
        """Return whether the next run tries something."""
        return self.plan_trial is not None or any(c.trial is not None for c in self.contexts.values())

    @property
    def has_work(self) -> bool:
        """Return whether anything is left to try or to compare."""
        return self.plan_trial is not None or any(self.contexts.unsettled)

    @property
    def tries(self) -> bool:
        """Return whether something that the next run launches may be timed."""
        if not self.contexts:
            return self.rules.tunes
        return self._purpose.tries

    @property
    def _purpose(self) -> Purpose:
        return Purpose.of(self.contexts.unsettled, self.plan_trial)

    @property
    def judged_run(self) -> tuple[str, str] | None:
        """Return (context, candidate) that the whole next run is timed for; None: it is not timed."""
        if self.plan_trial is not None:
            return None if self.plan_trial.holds else ("", self.plan_trial.label)
        context = self.contexts.on_turn
        if context is None or context.trial is None or not context.is_on_trial:
            return None
        return context.name, context.digests[context.trial]

    @property
    def planned_runs(self) -> int:
        """Return how many runs the search plans, the final one included."""
        return budget.planned_runs(self.rules, self.contexts.searches)

    @property
    def outlook(self) -> Forecast:
        """Return how far the session has come."""
        return budget.outlook(self.rules, self.contexts.searches, self._spent)

    # -- what happens to it --------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a session: take up what earlier ones left unfinished."""
        self.runs, self.done, self.closing, self._idle_runs = 0, False, not self.rules.tunes, 0
        self.remark, self._spent = "", RunsSpent()
        self._admitting = set()
        self.contexts.open(begins=not self.closing)
        if not any(self.contexts.unsettled):
            self.contexts.take_turns(closing=self.closing)
        self._close_if_spent(0.0)

    def step(self, merged: RunReport) -> dict[str, Outcome]:
        """Take in one run of all ranks; return what it was for each context."""
        had_trial, was_closing = self.has_trial, self.closing
        purpose, plan = self._purpose, self.plan_trial
        self.contexts.ran(merged)
        self.runs += 1
        is_new = any(part.announcement for part in merged.parts.values())
        self._spent = self._spent.after(trial=purpose.tries or is_new, wait=purpose.waits)
        merged = _with_late_hosts(merged)
        self._is_judging = not self._brings_kernels(merged)
        outcomes = {name: self._take(name, merged) for name in merged.in_order(self.contexts)}
        had_trial = had_trial or self.has_trial  # a search that begins with this run, and may end with it
        patience = STARVED_RUNS[self.rules.mode]
        if self.contexts.whole_run is not None:
            self.contexts.whole_run.apply_run(merged, patience=patience)
        remark = self.contexts.comparison.apply_run(merged, patience=patience)
        self.remark = remark or self.remark
        self.has_counted_run = (plan is not None and plan.has_counted) or any(
            outcome.judge == BY_RUN and outcome.kind == "sample" for outcome in outcomes.values()
        )
        self.contexts.starve(self.runs, patience)
        self._close_if_spent(merged.elapsed_s)
        self.contexts.take_turns(closing=self.closing)
        if had_trial or self.has_trial or any(self.contexts.unsettled):
            self._idle_runs = 0
            return outcomes
        self._idle_runs += 1
        as_settled = all(
            part.ran in (None, self.contexts.winner_digest(name)) for name, part in merged.parts.items()
        )
        self.done = as_settled or was_closing or self._idle_runs == IDLE_RUNS
        return outcomes

    def _take(self, name: str, merged: RunReport) -> Outcome:
        part, context = merged.parts[name], self.contexts.get(name)
        if context is None:
            if part.announcement is None:
                return Outcome()
            context = self.contexts.admit(name, part.announcement, part.bans, self.runs)
            if context.adopt(part.announcement.claim):
                context.settle("cached", context.winner)
            else:
                self._search_or_leave(context)
        elif part.announcement is not None:
            context.narrow(part.announcement)
        if part.ran is not None:
            context.last_run = self.runs
        if context.judge == BY_LAUNCH:
            outcome = context.advance(part, part)
        else:
            outcome = context.advance(part, merged.run, counts=self._is_judging)
        context.incumbent  # noqa: B018  raises NoValidConfig, settled or not, when nothing works any more
        if context.status == "cached" and context.winner is None:  # it does not work on some rank
            self._search_or_leave(context)
        return outcome

    def _search_or_leave(self, context: Context) -> None:
        if len(context.digests) - len(context.banned) == 1:
            context.settle("tuned")
        elif self.closing or self._is_too_late():
            context.settle("partial")
        else:
            self._admitting.add(self.runs)
            self.contexts.begin(context, max(self.runs - 1, 0))

    def _is_too_late(self) -> bool:
        """Return whether the session leaves what is new to others.

        Online, shapes come as the data does: what counts are the runs that brought any. What an option brings
        that is launched for the first time is never late.
        """
        search, turn = self.contexts.whole_run, self.contexts.on_turn
        if self.rules.mode == "online":
            is_late = len(self._admitting | {self.runs}) > ADMISSION_RUNS
        else:
            is_late = self.runs > ADMISSION_RUNS
        if search is not None:
            return is_late and not search.admits
        is_choosing = turn is not None and turn.is_choice and self._bringing_runs <= ADMISSION_RUNS
        return is_late and not is_choosing

    def _brings_kernels(self, merged: RunReport) -> bool:
        """Return whether a run launched kernels that are new or on trial: then it judges nothing else."""
        announced = [part.announcement for part in merged.parts.values() if part.announcement is not None]
        is_new = any(not each.is_choice and len(each.order) > 1 for each in announced)
        self._bringing_runs = self._bringing_runs + 1 if is_new else 0
        return is_new or any(context.is_tuned_by_launches for context in self.contexts.values())

    def _close_if_spent(self, elapsed_s: float) -> None:
        """Settle what is under way when the next run must be the last."""
        if budget.is_spent(self.rules, self.contexts.searches, self.runs, elapsed_s):
            self.closing = True
        if self.closing:
            self.contexts.leave()


def _with_late_hosts(merged: RunReport) -> RunReport:
    """Return what was said of a run in which a host was late with that in every sample, on all ranks.

    A peer's data may have come late for it, or copies may have run ahead of a kernel that waits for them.
    """
    late_ms = merged.late_ms
    if not late_ms:
        return merged

    def widened(part: Part) -> Part:
        return replace(part, gap_ms=max(part.gap_ms, min(late_ms, max(part.worst_ms, 0.0))))

    parts = {name: widened(part) for name, part in merged.parts.items()}
    return replace(merged, parts=parts, run=widened(merged.run))


@dataclass(frozen=True)
class Purpose:
    """What a run is for; several contexts may be at different points of their searches."""

    tries: bool  # a candidate, the incumbent among them, or a plan
    waits: bool  # for the sample of an earlier run

    @staticmethod
    def of(unsettled: Iterable[Context], plan: PlanTrial | None) -> Purpose:
        """Return what the next run is for, or the one under way. `plan`: what is judged as a whole."""
        if plan is not None:
            return Purpose(not plan.waiting, plan.waiting)
        contexts = list(unsettled)
        return Purpose(
            tries=any(context.is_on_trial for context in contexts),
            waits=any(context.waiting for context in contexts),
        )


def context_name(kernel_id: str, slot: str) -> str:
    """Return the name of a kernel's context, the same on all ranks."""
    return digest(f"{kernel_id}|{slot}")


@dataclass
class _Family:
    """The Autotuners of one function and keys, on all ranks."""

    kernels: list[str] = field(default_factory=list)  # ids, that of the lowest rank first
    siblings: int = 1  # on one rank, at most


class KernelFamilies:
    """What all ranks call each kernel: the same on all of them, as it follows from what they announced."""

    def __init__(self) -> None:
        self.aliases: dict[str, str] = {}  # ids of kernels that go by another id
        self._families: dict[str, _Family] = {}

    def unite(self, merged: RunReport, known: Container[str]) -> tuple[RunReport, dict[str, str]]:
        """Return the payload with one name for what is one context; and the new names by the old.

        Ranks may give an Autotuner different configs. Where no rank has several Autotuners of a function,
        those of all ranks are one kernel, whose candidates meet in their intersection. `known`: contexts
        whose names stand.
        """
        told = {
            name: part.announcement
            for name, part in sorted(merged.parts.items())
            if part.announcement is not None and part.announcement.family
        }
        announced = {name: announcement for name, announcement in told.items() if name not in known}
        for name, announcement in sorted(told.items(), key=lambda item: (item[1].rank, item[1].kernel_id)):
            family = self._families.setdefault(announcement.family, _Family())
            if name in known and announcement.kernel_id in family.kernels:
                continue
            family.siblings = max(family.siblings, announcement.siblings)
            if announcement.kernel_id not in family.kernels:
                family.kernels.append(announcement.kernel_id)
        for family in self._families.values():
            if family.siblings == 1:
                self.aliases.update(dict.fromkeys(family.kernels[1:], family.kernels[0]))
        names = {
            name: context_name(self.aliases[announcement.kernel_id], announcement.slot)
            for name, announcement in announced.items()
            # On a rank that has both they are two kernels, though they were taken for one before.
            if announcement.kernel_id in self.aliases and announcement.siblings == 1
        }
        parts: dict[str, Part] = {}
        for name, part in sorted(merged.parts.items()):
            name = names.get(name, name)
            parts[name] = parts[name].merged(part) if name in parts else part
        return dataclasses.replace(merged, parts=parts), names
