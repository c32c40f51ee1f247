"""What this rank does in one run of the tuned function, what it reports of it, and what it learns of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ..compilation.pool import Terms
from ..launch.rank_context import RankContext
from ..logs import decisions
from ..logs.records import RunStarted, RunTimed, Trial
from ..ranks.watchdog import PATIENCE
from ..search.context import Outcome
from ..search.messages import Part, RunReport
from ..search.rules import BY_LAUNCH
from ..timing.samples import Samples
from ..timing.stream_filler import LONGEST_MS, StreamFiller
from ..timing.synchronized_start import SynchronizedStart
from ..triton_api import interception
from . import recorder
from .function import SOURCE_OF
from .function_state import FunctionState
from .recorder import Recorder

T = TypeVar("T")


@dataclass(frozen=True)
class RunResult:
    """What one run was on this rank, once the ranks have agreed on it."""

    trials: tuple[Trial, ...]
    timed: RunTimed | None  # what the run took as a whole, if that was read
    is_sample: bool  # of any context
    has_time: bool  # of anything that it was a sample of


class RankRun:
    """This rank's runs, one after the other: `begin`, `make`, `report`, `apply_outcomes`; or `abandon`."""

    def __init__(self, state: FunctionState, log: Recorder) -> None:
        options, clock = state.function.options, state.function.clock
        self.launched: set[str] = set()  # contexts, in any run so far
        self.shares_clock = False  # all ranks read one monotonic clock
        self._whole = Samples(clock, options.statistic)  # of whole runs
        self._state, self._log = state, log
        self._waits = options.mode == "replay"  # for the device, after each run
        self._start = SynchronizedStart()
        make_filler = getattr(clock, "filler", None)  # of `EventClock`
        self._filler: StreamFiller | None = (
            None if make_filler is None else make_filler(LONGEST_MS[options.mode])
        )
        self._wanted_ms = 0.0  # the filler that the slowest rank wants
        self._late_ms = 0.0  # by how much this rank's host was late in the last trial
        self._tries = False  # the run under way is a trial
        self._judged: tuple[str, str] | None = None  # what the run is judged for as a whole

    def begin(self) -> None:
        """Prepare for the plan of the next run, and write it down."""
        state, search = self._state, self._state.search
        state.dispatcher.begin_run(tunes=search.rules.tunes)
        self._whole.begin_run()
        self._judged = search.judged_run
        self._tries = search.tries
        plan = decisions.plan_of(search)
        self._log.write(RunStarted(run=search.runs, plan=plan))
        on_trial = {name: search.contexts[name].digests[index] for name, index in plan.items()}
        state.guard.begin_run(search.runs, on_trial)

    def make(self, thunk: Callable[[], T]) -> T:
        """Run `thunk`, behind a filler if it is a trial; timed as a whole if it is judged so."""
        filler = self._filler if self._tries and not interception.is_capturing() else None
        time_spent = self._state.time_spent
        compiled_s = time_spent.seconds.compiling_s
        if filler is None:
            self._start.lead_ms(0.0)  # peers learn how late this rank comes in any case
        else:
            length_ms = filler.length_ms(self._wanted_ms or filler.wanted_ms)
            filler.begin(lambda: self._start.lead_ms(length_ms))
        if self._judged is None or self._whole.report is not None:
            result = thunk()
        else:
            mark = self._whole.start()
            result = thunk()
            self._whole.stop(mark)
        if filler is not None:
            self._late_ms = filler.end(1e3 * (time_spent.seconds.compiling_s - compiled_s))
        return result

    def report(self, elapsed_s: float) -> RunReport:
        """Compile what is new, read the clocks that can be read, and return this rank's report on the run.

        elapsed_s: since the session's first call.
        """
        state, function = self._state, self._state.function
        if state.dispatcher.new:
            with state.compiling(), state.guard.paused():
                for rank_context, tally in state.dispatcher.preflight(self._terms()):
                    self._log.record_preflight(state.search.runs, rank_context, tally)
        parts = state.registry.report_run(waits=self._waits)
        whole = Part()
        if self._judged is not None or self._whole.report is not None:
            whole = self._whole.report_run("|".join(self._judged or ()), waits=self._waits)
        state.guard.end_run()
        self.launched.update(parts)
        facts = function.point
        for name, texts in state.registry.new_sources().items():
            facts |= function.fact(SOURCE_OF + name, texts)
        rank = function.group.rank
        report = RunReport(rank, facts, parts=parts, run=whole, elapsed_s=elapsed_s)
        if self._waits and self.shares_clock and not function.is_alone:
            report = self._start.stamp(report)
        if self._filler is not None:
            report = replace(report, wanted_ms=self._filler.wanted_ms, late_ms=self._late_ms)
        return state.results.with_offers(report, state.registry.announced_now())

    def apply_reports(self, merged: RunReport) -> None:
        """Take up what all ranks reported, before anything follows from it."""
        self._start.apply_exchange(merged)
        self._wanted_ms = merged.wanted_ms

    def rename(self, names: dict[str, str]) -> None:
        """Call contexts what all ranks call them."""
        self._state.registry.rename(names)
        self.launched = {names.get(name, name) for name in self.launched}

    def apply_outcomes(self, run: int, outcomes: Mapping[str, Outcome], merged: RunReport) -> RunResult:
        """Keep the samples that count, drop the others, and return what the run was."""
        contexts, reported = self._state.search.contexts, self._state.registry.reported()
        trials = tuple(
            recorder.trial(
                run, contexts[rank_context.name], rank_context, outcomes[rank_context.name], self._whole
            )
            for rank_context in reported
            if rank_context.launches or rank_context.samples.is_read
        )
        self._state.registry.apply_outcomes(contexts, outcomes, late_ms=merged.late_ms)
        counts, waiting = self._state.search.has_counted_run, bool(merged.run.pending)
        whole = self._whole
        is_read = whole.report is not None and not waiting
        timed = recorder.run_timed(run, whole, counts=counts) if is_read else None
        has_time = any(_has_time(rank_context, outcomes[rank_context.name]) for rank_context in reported)
        has_time |= is_read and counts and whole.sample is not None
        whole.apply_outcome(waiting=waiting, counts=counts, late_ms=merged.late_ms)
        is_sample = any(outcomes[rank_context.name].kind == "sample" for rank_context in reported)
        return RunResult(trials, timed, is_sample, has_time)

    def retract(self) -> None:
        """Drop what the run under way has measured and reported: no rank counts it."""
        for rank_context in self._state.registry.by_name.values():
            rank_context.samples.apply_outcome(waiting=False, counts=False)
        self._whole.apply_outcome(waiting=False, counts=False)
        self.abandon()

    def abandon(self) -> None:
        """Drop what the run under way has measured: it raised."""
        self._state.dispatcher.abandon_run()
        self._whole.abandon_run()

    def _terms(self) -> Terms:
        """Return on what terms this rank compiles candidates, here and now."""
        group = self._state.function.group
        position, count = group.ranks.index(group.rank), len(group.ranks)
        patience_s = PATIENCE * self._state.timeout_s if count > 1 else math.inf
        return Terms.agreed(self._log.session, position, count, patience_s)


def _has_time(rank_context: RankContext, outcome: Outcome) -> bool:
    is_sample = outcome.kind == "sample" and outcome.judge == BY_LAUNCH and outcome.index is not None
    return is_sample and rank_context.samples.sample is not None
