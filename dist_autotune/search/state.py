"""Compute the next plan from the reports of a run.

Phases: all kernels race, judged by their launches; then contexts judged by the run, as plans
(`RaceRuns`) or in turns (`TakeTurns`); then `FinalComparison` with `objective="thunk"`, and `VerifyBits`.
"""

from __future__ import annotations

import functools
import math
from collections import ChainMap
from collections.abc import Container, Iterator, Mapping

from . import budget
from .budget import Forecast, RunsMade, SearchedContexts, SessionSums
from .context import Context, NextRun, RunVerdict
from .expectation.order import Meanwhile
from .kernel_families import KernelFamilies
from .messages import Announcement, Ban
from .phases.final_comparison import FinalComparison
from .phases.final_results import FinalResults
from .phases.pace import Pace, StepKind
from .phases.phase import Phase, RunPhase, TakeTurns
from .phases.race_runs import RaceRuns, search_by_runs
from .phases.step_gain import StepComparison
from .phases.verify_bits import VerifyBits
from .reports import AgreedRun
from .rules import BY_LAUNCH, BY_RUN, Rules
from .shared_context import Outcome, Status

ADMISSION_RUNS = 16  # contexts first seen later are partial, so that new keys at every run end
STARVED_RUNS = {"replay": 3, "online": 64}
IDLE_RUNS = 3  # runs without a trial that end a session even if ranks still launch different configs


class SearchState:
    """The state of one tuned function's search: `step` makes the next plan from the reports of a run."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.contexts: dict[str, Context] = {}  # of this session, by name, in the order of their first run
        self.changed: list[Context] = []  # all that the last step may have changed; others are settled
        self.kept: dict[str, Context] = {}  # settled in earlier sessions, and not launched in this one
        self.kernels = KernelFamilies()
        self.race_runs: RaceRuns | TakeTurns | None = None  # what the whole run judges, under way
        self.runs = self.apart = 0  # so far; of them those without a trial before the next exchange
        self.done, self.closing = False, not rules.tunes
        self.verify_bits = VerifyBits(self.contexts, rules.bits) if rules.verifies else None
        self._race_launches = Phase(self.contexts)
        self._sums = SessionSums(rules, ())
        self._searches = 0  # by whole runs
        self._left_race: RaceRuns | None = None  # the last session was cut short in it
        self._comparison = FinalComparison(self.contexts, rules)
        self.results = FinalResults(lambda: self.unsettled, rules, self._comparison, self.verify_bits)
        self.made = RunsMade()
        self.pace = Pace(rules.overhead if rules.mode == "online" else None, rules.free_s)
        self.steps = StepComparison(self.contexts, rules)

    @property
    def unsettled(self) -> Iterator[Context]:
        return (context for context in self.changed if not context.settled)

    @property
    def phase(self) -> Phase:
        """Return the phase under way, which plans the next run."""
        return self._verifying or self.run_phase or self._race_launches

    @property
    def _verifying(self) -> VerifyBits | None:
        return self.verify_bits if self.verify_bits is not None and self.verify_bits.is_under_way else None

    @property
    def compares_outputs(self) -> bool:
        """Return whether the outputs of the next run are compared; of the first, whether there are any."""
        return self.verify_bits is not None and (self.verify_bits.compares or not self.runs)

    @property
    def run_phase(self) -> RunPhase | None:
        """Return the phase in which whole runs are compared, if it is under way."""
        if not self.steps.is_over:
            return self.steps
        return self.race_runs if self._comparison.is_over else self._comparison

    @property
    def has_trial(self) -> bool:
        is_trying = self.run_phase is not None or self._verifying is not None
        return is_trying or any(c.trial is not None for c in self.changed)

    @property
    def has_work(self) -> bool:
        """Whether runs go on: something is unsettled, or a session for a new key has launched nothing yet."""
        if self.run_phase is not None or self.made.pays_back or any(self.unsettled):
            return True
        may_wait = self.rules.tunes and self.made.session > 1 and not self.closing
        has_launched = any(context.last_run > 0 for context in self.contexts.values())
        return may_wait and self.runs < STARVED_RUNS[self.rules.mode] and not has_launched

    @property
    def tries(self) -> bool:
        """Return whether something that the next run launches may be timed."""
        return any(each.is_on_trial for each in self._trials) if self.contexts else self.rules.tunes

    @property
    def _trials(self) -> list[RunPhase] | list[Context]:
        return self.changed if self.run_phase is None else [self.run_phase]  # what is settled tries nothing

    @property
    def judged_run(self) -> str | None:
        """Return the label that the whole next run is a sample of; None: it is not timed."""
        phase = self.phase
        return phase.label if isinstance(phase, RunPhase) and not phase.holds else None

    @property
    def _is_compiling(self) -> bool:  # on some rank, if that may now
        return not self.pace.pauses and any(context.compiling for context in self.changed)

    @property
    def forecast(self) -> Forecast:
        """Return how far the session has come; its last runs compare the contexts that it has searched."""
        searched = self._sums.searched or SearchedContexts(self.rules, self._comparison.undecided)
        return self.made.forecast(searched, self.runs)

    def _meanwhile(self, name: str) -> Meanwhile:
        """Return the state of the session that steers a context's order of trials."""
        context = self.contexts[name]
        told = self.kernels.times_so_far(self.contexts.values(), context.kernel_id)
        if self.rules.mode != "online":
            return Meanwhile(told)
        return Meanwhile(told, *self.pace.shares_of(context.launches, context.device_ms), is_online=True)

    def open(self) -> None:
        """Begin a session: take up the unfinished searches of earlier ones."""
        before, self.made = self.runs, RunsMade(self.made.session + 1)
        self._change_all()
        self.runs = self.apart = 0
        self.pace.open()
        self.steps.open()
        self.done, self.closing = False, not self.rules.tunes
        self._comparison.is_over, self.race_runs, self._left_race = True, self._left_race, None
        for context in self.contexts.values():
            # Runs without a launch count on: sessions that are cut short would begin with as many each.
            context.last_run, context.began = context.last_run - before, None
        if self.race_runs is not None:
            self.race_runs.resume()
        for context in self.contexts.values():
            if context.settled and not context.provisional:
                self._comparison.defaults.pop(context.name, None)
        if not self.closing and self.rules.mode == "replay":
            self._take_up()
        if self.verify_bits is not None:
            self.verify_bits.open()
        self._close_if_spent(0.0)
        if all(context.last_run == 0 for context in self.unsettled):  # else the first run tells who is left
            self._begin_next(None)
        self._apply_plan()

    def _take_up(self) -> None:
        """Resume recently launched contexts; if there are none, resume all."""
        left = [context for context in self.contexts.values() if context.provisional]
        launched = [context for context in left if -context.last_run < STARVED_RUNS["replay"]]
        is_searching = any(context.began is not None for context in self.contexts.values())
        for context in launched if launched or is_searching else left:
            self._begin(context, 0)
        for context in left:
            if context.provisional:
                context.settle(Status.STARVED)

    @property
    def known(self) -> Mapping[str, Context]:
        """Return all contexts by name."""
        return ChainMap(self.contexts, self.kept)

    def keep_settled(self) -> None:
        """Set the results of earlier sessions aside until they are launched: they cost a run nothing."""
        comparing = self._left_race, self.race_runs, self.verify_bits
        if self._comparison.is_under_way_or_left or any(each is not None for each in comparing):
            return
        for name, context in list(self.contexts.items()):
            if context.is_lasting and self.results.is_final(context):
                self.kept[name] = self.contexts.pop(name)
        self._change_all()

    def drop(self, keeps: Container[str]) -> None:
        """Drop searches under way, and contexts that do not work or that others do not keep."""
        self.kept = {name: context for name, context in self.kept.items() if name in keeps}
        for name in [n for n, c in self.contexts.items() if n not in keeps or not self.results.stays(c)]:
            del self.contexts[name]
            self._comparison.defaults.pop(name, None)
            self.results.forget(name)
        self._comparison.drop()
        self.steps.leave()
        self.race_runs = self._left_race = None
        self.changed = [*self.contexts.values()]
        self._apply_plan()

    def _change_all(self) -> None:
        self.changed = [*self.contexts.values()]
        self._sums = SessionSums(self.rules, self.changed)

    def _close_if_spent(self, elapsed_s: float) -> None:
        """Settle searches under way as partial when the next run must be the last."""
        self.closing |= budget.is_spent(self.rules, lambda: self._sums.searched, self.runs, elapsed_s)
        if not self.closing:
            return
        if self.race_runs is not None:
            self.race_runs.leave()
            if self.rules.mode == "replay" and isinstance(self.race_runs, RaceRuns):
                self._left_race = self.race_runs
            self.race_runs = None
        for context in self.unsettled:
            context.settle(Status.PARTIAL)
        self._comparison.leave()
        self.steps.leave()
        if self.verify_bits is not None:
            self.verify_bits.leave(self.rules.max_runs)

    def step(self, report: AgreedRun) -> dict[str, Outcome]:
        """Apply one run of all ranks; return its outcome for each context."""
        had_trial, was_closing, run_phase = self.has_trial, self.closing, self.run_phase
        changes_all, names = self._may_change_all, {*report.parts, *(c.name for c in self.unsettled)}
        self._count_run(report)
        outcomes = {name: self._apply_part(name, report) for name in report.parts}
        for context in self.changed:
            context.compiling = 0
        self.changed = [c for name, c in self.contexts.items() if changes_all or name in names]
        for context in self.changed:
            context.compiling = report.parts[context.name].compiling if context.name in report.parts else 0
        self._sums.note(self.changed)
        had_trial |= self.has_trial  # a search that begins with this run, and may end with it
        patience = STARVED_RUNS[self.rules.mode]
        if any(outcome.kind == "sample" for outcome in outcomes.values()):
            self.pace.saved_s = self._sums.saved_s
        self.made.is_sample = False
        if run_phase is not None:
            run_phase.record(report, patience=patience)
            self.made.is_sample = run_phase.has_counted
            outcomes |= run_phase.outcomes
            self.made.remark = run_phase.remark or self.made.remark
        self._starve(patience)
        if self.verify_bits is not None:
            self.verify_bits.record(report, closing=self.closing)
            self.made.remark = self.verify_bits.remark or self.made.remark
        self._close_if_spent(report.elapsed_s)
        self._begin_next(report.launched)
        is_idle = not (had_trial or self.has_trial or any(self.unsettled))
        self._end_online()
        self._end_if_idle(report, is_idle=is_idle, was_closing=was_closing)
        if self._may_change_all:
            self.changed = [*self.contexts.values()]
        self._apply_plan()
        self._let_runs_apart()
        return outcomes

    @property
    def _may_change_all(self) -> bool:
        """Return whether a run may change settled contexts too: the first one, and where whole runs judge."""
        judges_runs = self.rules.objective != "kernel" or any(c.judge == BY_RUN for c in self.unsettled)
        return self.runs <= 1 or judges_runs or not (self.verify_bits is None and self.run_phase is None)

    def _end_online(self) -> None:
        """After the last trial, compare steps with first configs and winners; then pay back the excess."""
        may_end = not (self.closing or self.run_phase is not None or any(self.unsettled))
        if may_end and self.pace.is_felt and not self.made.has_compared:
            self.made.has_compared = True
            self.steps.begin()
            may_end = self.steps.is_over
        if self.steps.gain is not None:
            self.pace.count_gain(self.steps.gain.gain_ms / 1e3)
        self.made.pays_back = may_end and self.pace.pays_back()

    def _apply_plan(self) -> None:
        """Let each context launch the candidate that the phase under way plans, else its incumbent."""
        self._sums.note(self.changed)
        phase, holds, is_felt = self.phase, self.pace.holds, self.pace.is_felt
        for context in self.changed:  # the phase asks
            context.next_run = NextRun(is_held=holds, is_spared=is_felt)
        if self.run_phase is not None:
            self.run_phase.is_held = holds
        plan, is_compared = phase.plan(), phase is self.verify_bits
        for name in plan.keys() & self.contexts.keys():
            self.contexts[name].next_run = NextRun(plan[name], is_compared, holds, is_felt)

    def _let_runs_apart(self) -> None:
        """Count the runs without a trial that come before the next exchange: none while news is awaited."""
        awaits = self.tries or any(context.waiting for context in self.changed)
        awaits |= self.run_phase is not None and self.run_phase.waiting
        may_wait = self.pace.holds or self.made.pays_back or self._is_compiling
        wanted = self.pace.steps_apart if may_wait and not awaits else 0
        left = math.inf if self.rules.max_runs is None else self.rules.max_runs - self.runs - 2
        self.apart = int(max(min(wanted, left), 0))
        self.runs += self.apart
        for context in self.contexts.values() if self.apart else ():  # they launch what the others do
            context.last_run += self.apart * (context.last_run > 0)

    def _count_run(self, report: AgreedRun) -> None:
        """Count a run, and the tuner's work in it."""
        self.runs += 1
        is_new = any(part.announcement for part in report.parts.values())
        is_trial = any(each.is_on_trial for each in self._trials)
        untried = StepKind.COMPILING if self._is_compiling else StepKind.QUIET
        kind = StepKind.NEW if is_new else StepKind.TRIAL if is_trial else untried
        self.made.count(kind, waits=any(each.waiting for each in self._trials))
        if report.apart:
            self.pace.record(untried, report.apart_s, steps=report.apart)
        self.pace.record(kind, report.step_s, report.exchange_s)

    def _end_if_idle(self, report: AgreedRun, *, is_idle: bool, was_closing: bool) -> None:
        """End the session after a run without a trial, once all ranks launch the settled configs."""
        bits = self.verify_bits
        self.made.idle = self.made.idle + 1 if is_idle else 0
        if is_idle:
            launched = [context for name, context in self.contexts.items() if name in report.launched]
            as_settled = all(report.ran(c.name) == c.digests[c.incumbent] for c in launched)
            self.done = as_settled or was_closing or self.made.idle == IDLE_RUNS
        if bits is not None:
            self.done = self.done and bits.accepts(report, closing=self.closing)
            self.made.remark = bits.remark or self.made.remark

    def _apply_part(self, name: str, report: AgreedRun) -> Outcome:
        part = report.parts[name]
        if name in self.kept:
            self.contexts[name] = self.kept.pop(name)
        context = self.contexts.get(name)
        if context is None:
            if part.announcement is None:
                return Outcome()
            context = self._admit(name, part.announcement, part.bans)
        elif part.announcement is not None:
            context.ban_missing(part.announcement)
        if part.ran is not None:
            context.last_run = self.runs
            may_begin = not self.closing and (self.rules.mode == "online" or context.began is None)
            if context.status is Status.STARVED and may_begin:
                context.apply_bans(part.bans)
                self._begin(context, max(self.runs - 1, 0))  # launched again, but this run was no trial
                return Outcome()
        context.apply(part)
        outcome = context.search.advance(part) if context.judge == BY_LAUNCH else Outcome()
        context.incumbent  # noqa: B018  raises NoValidConfig, settled or not, when nothing works any more
        if context.status is Status.CACHED and context.winner is None:  # it does not work on some rank
            self._search_or_leave(context)
        return outcome

    def _starve(self, patience: int) -> None:
        """Settle contexts that no rank has launched for `patience` runs, unless a plan leaves them out."""
        for context in self.unsettled:
            is_gone = self.runs - context.last_run >= patience
            if is_gone and not (self.race_runs is not None and self.race_runs.explains_absence(context)):
                context.settle(Status.STARVED)

    def _admit(self, name: str, announcement: Announcement, bans: dict[str, Ban]) -> Context:
        """Return a new context. Raises NoValidConfig when nothing works on every rank."""
        known = functools.partial(self._meanwhile, name)
        context = self.contexts[name] = Context(name, announcement, self.rules, self.runs, known)
        context.apply_bans(bans)
        self._comparison.defaults[name] = context.incumbent
        if announcement.claim is not None and context.adopt(announcement.claim):
            context.settle(Status.CACHED, context.winner)
        else:
            self._search_or_leave(context)
        return context

    def _search_or_leave(self, context: Context) -> None:
        if len(context.digests) - len(context.banned) == 1:
            context.settle(Status.TUNED)
        elif self.closing or self._is_too_late():
            context.settle(Status.PARTIAL)
        else:
            self.made.admitting.add(self.runs)
            self._begin(context, max(self.runs - 1, 0))

    def _is_too_late(self) -> bool:
        """Return whether new contexts are left to later sessions; those of a new option never are."""
        # Online shapes come as the data does: the runs count that brought any.
        runs = len(self.made.admitting | {self.runs}) if self.rules.mode == "online" else self.runs
        return runs > ADMISSION_RUNS and not (self.race_runs is not None and self.race_runs.admits)

    def _begin(self, context: Context, run: int) -> None:
        """Start a search in a run, from 0; one that is judged by the whole run waits for its turn."""
        context.began = run
        is_left = self.verify_bits is not None and self.verify_bits.take_up(context)
        if self._comparison.take_up(context) or is_left:
            return
        context.status, context.by_run = Status.UNDER_WAY, RunVerdict.NOTHING
        if context.judge == BY_LAUNCH:
            context.search.start()

    def _begin_next(self, launched: frozenset[str] | None) -> None:
        """Let the next search by the whole run begin, when kernels are done; last comes the comparison."""
        if not self.steps.is_over and any(context.judge == BY_RUN for context in self.unsettled):
            self.steps.leave()
        if not self._comparison.is_over:
            return  # new searches wait: a whole run is timed for one thing
        if self.race_runs is not None and self.race_runs.is_over:
            self.race_runs = None
        races_launches = any(context.is_tuned_by_launches for context in self.unsettled)
        while not (self.race_runs or self.closing or races_launches) and any(self.unsettled):
            self._searches += 1
            search = search_by_runs(self.contexts, self.rules, launched, self._searches)
            self.race_runs = None if search.is_over else search
            if not self.rules.races:
                break  # contexts that the best plan does not launch wait
        if not (self.closing or any(self.unsettled)):
            self._comparison.begin()
            if self.verify_bits is not None and self.run_phase is None:
                self.verify_bits.begin()
