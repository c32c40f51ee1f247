"""What this rank does in one run of the tuned function, and what it tells of it at the exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from ..compilation.pool import Terms
from ..launch.rank_contexts import RankContext
from ..logs import decisions
from ..logs.records import RunStarted
from ..ranks.watchdog import PATIENCE
from ..search.context_search import Outcome
from ..search.messages import Part, RunReport
from ..search.rules import BY_LAUNCH
from ..timing.samples import Samples
from ..timing.stream_filler import LONGEST_MS, StreamFiller
from ..timing.synchronized_start import SynchronizedStart
from ..triton_api import interception
from .function_state import SOURCE_OF, FunctionState
from .recorder import Recorder

T = TypeVar("T")


class RankRun:
    """This rank's runs, one after the other: `begin`, `make`, `told`, `take` and `samples`; or `abandon`."""

    def __init__(self, domain: FunctionState, chronicle: Recorder, watch: Samples) -> None:
        self.watch = watch  # of the whole run
        self.launched: set[str] = set()  # contexts, in any run so far
        self._domain, self._chronicle = domain, chronicle
        self._synchronized_start = SynchronizedStart()
        make_filler = getattr(domain.clock, "filler", None)  # of `EventClock`
        longest_ms = LONGEST_MS[domain.options.mode]
        self._filler: StreamFiller | None = None if make_filler is None else make_filler(longest_ms)
        self._wanted_ms = 0.0  # the filler that the slowest rank wants
        self._late_ms = 0.0  # by how much this rank's host was late in the last trial
        self._tries = False  # the run under way is a trial
        self._judged: tuple[str, str] | None = None  # what the run is judged for as a whole

    def begin(self) -> None:
        """Prepare for the plan of the next run, and write it down."""
        domain, tuning = self._domain, self._domain.tuning
        domain.launches.begin_run(tunes=tuning.rules.tunes)
        self.watch.begin_run()
        self._judged = tuning.judged_run
        self._tries = tuning.tries
        plan = decisions.plan_of(tuning)
        self._chronicle.write(RunStarted(run=tuning.runs, plan=plan))
        on_trial = {name: tuning.contexts[name].digests[index] for name, index in plan.items()}
        domain.guard.begin_run(tuning.runs, on_trial)

    def make(self, thunk: Callable[[], T]) -> T:
        """Run `thunk`, behind a filler if it is a trial; timed as a whole if it is judged so."""
        filler = self._filler if self._tries and not interception.is_capturing() else None
        compiled_s = self._domain.ledger.seconds.compiling_s
        if filler is None:
            self._synchronized_start.lead_ms(0.0)  # peers learn how late this rank comes in any case
        else:
            filler.prepare()
            filler.begin(
                self._synchronized_start.lead_ms(filler.length_ms(self._wanted_ms or filler.wanted_ms))
            )
        if self._judged is None or self.watch.report is not None:
            result = thunk()
        else:
            mark = self.watch.start()
            result = thunk()
            self.watch.stop(mark)
        if filler is not None:
            self._late_ms = filler.end(1e3 * (self._domain.ledger.seconds.compiling_s - compiled_s))
        return result

    def told(self) -> RunReport:
        """Compile what is new, read the clocks that can be read, and return what this rank has to tell."""
        domain, agreement = self._domain, self._domain.agreement
        if domain.new_candidates:
            with domain.compiling(), domain.guard.paused():
                for local, tally in domain.new_candidates.preflight(self._terms()):
                    self._chronicle.preflighted(local, tally)
        waits = domain.options.mode == "replay"
        parts = domain.local_contexts.tell(waits=waits)
        run = Part()
        if self._judged is not None or self.watch.report is not None:
            run = self.watch.report_run("|".join(self._judged or ()), waits=waits)
        domain.guard.end_run()
        self.launched.update(parts)
        sources = {SOURCE_OF + name: texts for name, texts in domain.local_contexts.new_sources().items()}
        facts = {name: {text: agreement.rank} for name, text in {**domain.point, **sources}.items()}
        elapsed_s = self._chronicle.elapsed_s
        report = RunReport(agreement.rank, facts, parts=parts, run=run, elapsed_s=elapsed_s)
        if waits and domain.shares_clock and len(agreement.ranks) > 1:
            report = self._synchronized_start.stamp(report)
        if self._filler is not None:
            report = replace(report, wanted_ms=self._filler.wanted_ms, late_ms=self._late_ms)
        return domain.with_offers(report)

    def take(self, merged: RunReport) -> None:
        """Take in what all ranks told, before anything follows from it."""
        self._synchronized_start.apply_exchange(merged)
        self._wanted_ms = merged.wanted_ms

    def rename(self, names: dict[str, str]) -> None:
        """Call contexts what all ranks call them."""
        self._domain.local_contexts.rename(names)
        self.launched = {names.get(name, name) for name in self.launched}

    def has_time(
        self, reported: Iterable[RankContext], outcomes: dict[str, Outcome], *, of_run: bool
    ) -> bool:
        """Return whether this rank has a time for anything that the run was a sample of."""
        for local in reported:
            outcome = outcomes[local.name]
            is_sample = outcome.kind == "sample" and outcome.judge == BY_LAUNCH
            if is_sample and outcome.index is not None and local.samples.sample is not None:
                return True
        return of_run and self.watch.report is not None and self.watch.sample is not None

    def retract(self) -> None:
        """Drop what the run under way has measured, and told: no rank counts it."""
        for watch in (
            self.watch,
            *(local.samples for local in self._domain.local_contexts.by_name.values()),
        ):
            watch.apply_outcome(waiting=False, counts=False)
        self.abandon()

    def abandon(self) -> None:
        """Drop what the run under way has measured: it raised."""
        self._domain.launches.abandon_run()
        self.watch.abandon_run()

    def _terms(self) -> Terms:
        """Return on what terms this rank compiles candidates, here and now."""
        agreement = self._domain.agreement
        position, count = agreement.ranks.index(agreement.rank), len(agreement.ranks)
        patience_s = PATIENCE * self._domain.timeout_s if count > 1 else math.inf
        return Terms.agreed(self._chronicle.session, position, count, patience_s)
