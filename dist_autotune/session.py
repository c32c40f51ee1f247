"""Drives one tuned function: plan -> run -> samples -> exchange -> plan, until every context is settled."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from . import decisions
from .attendant import PATIENCE
from .chronicle import Chronicle
from .common_start import CommonStart
from .compile_sharing import Terms
from .device_errors import told_as_ours
from .domain import SOURCE_OF, Domain
from .errors import FlowFailed, NoValidConfig, TuningError
from .failures import Failures
from .intercept import INTERCEPTION
from .local import Local
from .log import SessionLog
from .payload import Part, Payload, merge
from .preserve import Snapshot
from .progress import Progress, is_shown
from .records import Exchanged, Note, Resumed, RunStarted, SessionClosed
from .report import TuningReport
from .results import tuned_contexts
from .search import BY_LAUNCH, Outcome
from .stopwatch import Stopwatch

FIRST_OUTLOOK = 50  # runs of an online session after which its log says what is left; then at twice as many

T = TypeVar("T")


class Session:
    """One session on this rank: opens with an exchange, ends when every context is settled."""

    def __init__(self, domain: Domain, log: SessionLog, log_dir: str | None) -> None:
        self.domain = domain
        self.executions = 0
        self.warning = ""
        self.is_over = False
        self.wants_another = False
        self.has_failed = False
        self._log_dir = log_dir
        self._run_watch = Stopwatch(domain.clock, domain.options.statistic, feeds="runs")
        self._chronicle = Chronicle(domain, log, self._run_watch)
        self._failures = Failures(domain, self._chronicle, log_dir)
        self._common_start = CommonStart()
        self._judged: tuple[str, str] | None = None
        self._is_stepping = False  # the state is between two runs
        self._launched: set[str] = set()
        self._tells_outlook_at = FIRST_OUTLOOK
        options = domain.options
        self._progress = Progress(domain.name, shown=is_shown(options.progress, domain.agreement.rank))

    # -- the two modes -------------------------------------------------------------------------------------

    def replay(self, thunk: Callable[[], T]) -> T:
        """Run `thunk` until every context is settled, then once more; return what that last run returned."""
        with self._telling_failures():
            snapshot = Snapshot(self.domain.options.preserve)
            first = True
            while True:
                if not first:
                    snapshot.restore()
                first = False
                result = self._run_once(thunk)
                if self.domain.tuning.done:
                    self.close()
                    return result
                del result  # a trial's outputs must not add to the memory of the next

    def online(self, thunk: Callable[[], T]) -> T:
        """Run `thunk` once, as one trial of the session."""
        with self._telling_failures():
            result = self._run_once(thunk)
            if not any(self.domain.tuning.unsettled) and self.domain.tuning.duel is None:
                self.close()
            return result

    # -- opening, one run, closing -------------------------------------------------------------------------

    def open_once(self) -> None:
        """Agree with the peers on what the session is, unless an earlier call has.

        Raises RankMismatch where ranks differ.
        """
        if self._chronicle.session:
            return
        domain = self.domain
        domain.ledger.clear()
        domain.on_ban = self._chronicle.ban
        with self._telling_failures():
            payload = domain.opening()
            if domain.agreement.rank == domain.agreement.ranks[0]:
                payload.facts["session"] = {uuid.uuid4().hex[:12]: domain.agreement.rank}
            merged = self._exchange(payload, "the opening of a session")
            try:
                remarks = domain.open(merged)
            except TuningError as error:
                self._tell_if_own(error)
                self.close(error)
                raise
            (self._chronicle.session,) = merged.facts["session"]
            self._chronicle.write(self._chronicle.opened())
            if domain.recovery.taken_up:
                self._chronicle.write(Resumed(events=tuple(domain.recovery.taken_up)))
            for remark in remarks:
                self._chronicle.write(Note(text=remark))
            for ban in domain.recovery.banned(domain.tuning):
                self._chronicle.write(ban)
            self._run_watch.restore(domain.recovery.run_samples)

    def _run_once(self, thunk: Callable[[], T]) -> T:
        """Make one run and agree on what follows from it."""
        domain, tuning, options = self.domain, self.domain.tuning, self.domain.options
        self._start_run()
        self.executions += 1
        what = f"run {tuning.runs} of {domain.name}{self._failures.on_trial()}"
        with (
            domain.agreement.running(
                what,
                domain.timeout_s,
                options.on_stuck,
                self._failures.tell_stuck,
                self._failures.whereabouts,
            ),
            INTERCEPTION.installed(domain.launches.runner, domain.launches.choose),
            domain.ledger.running(),
        ):
            result = self._timed(thunk)
        with told_as_ours(if_reported=True):
            payload = self._finish_run()
        merged = self._exchange(payload, what)
        self._step(merged)
        return result

    @contextlib.contextmanager
    def _telling_failures(self) -> Iterator[None]:
        """Tell the peers of an exception, unless it comes from them or is the same on every rank."""
        try:
            yield
        except BaseException as error:
            if not self.is_over:
                self._fail(error, self._failures.diagnosed(error))
            raise

    def close(self, error: BaseException | None = None) -> None:
        """End the session: write down how."""
        if self.is_over:
            return
        self.is_over = True
        tuning = self.domain.tuning
        self.has_failed = error is not None
        self.wants_another = self.has_failed or (
            tuning.rules.tunes
            and tuning.closing
            and any(context.status == "partial" for context in tuning.contexts.values())
        )
        self._progress.close()
        known = tuning.contexts
        contexts = [known[name] for name in sorted(self._launched & known.keys())]
        left = [context for context in contexts if context.provisional and not context.is_unasked]
        starved = [context.title for context in left if context.status == "starved"]
        outcome = type(error).__name__ if error is not None else "partial" if left else "settled"
        if not self._launched and error is None:
            self.warning = "no launches of autotuned kernels seen"
        elif starved:
            self.warning = f"no longer launched, settled with what is known: {', '.join(starved)}"
        if outcome == "settled" or isinstance(error, NoValidConfig):
            self.domain.recovery.discard(tuning)
        self._chronicle.write(
            SessionClosed(runs=self.executions, contexts=len(contexts), outcome=outcome, warning=self.warning)
        )
        self._chronicle.close()

    def report(self) -> TuningReport:
        """Return what the session has found so far."""
        return TuningReport(
            runs=self.executions,
            contexts=tuned_contexts(self.domain.tuning, self.domain.local_contexts, self._launched),
            world_size=len(self.domain.agreement.ranks),
            seconds=self._chronicle.elapsed_s,
            clock=type(self.domain.clock).__name__,
            log_dir=self._log_dir,
            warning=self.warning,
            spent=self.domain.ledger.spent,
            outlook=None if self.is_over else self.domain.tuning.outlook,
        )

    # -- steps of a run ------------------------------------------------------------------------------------

    def _start_run(self) -> None:
        tuning = self.domain.tuning
        self.domain.launches.begin_run(tunes=tuning.rules.tunes)
        self._run_watch.begin_run()
        self._judged = tuning.judged_run
        self._chronicle.write(RunStarted(run=tuning.runs, plan=decisions.plan_of(tuning)))
        self.domain.recovery.run(tuning)

    def _timed(self, thunk: Callable[[], T]) -> T:
        """Run `thunk`, timed as a whole if this run is judged so."""
        lead_ms = self._common_start.lead_ms()
        if self._judged is None or self._run_watch.report is not None:
            return thunk()
        mark = self._run_watch.start(lead_ms)
        result = thunk()
        self._run_watch.stop(mark)
        return result

    def _finish_run(self) -> Payload:
        launches = self.domain.launches
        agreement = self.domain.agreement
        if launches.has_new:
            with self.domain.compiling(), self.domain.recovery.paused():
                for local, tally in launches.preflight_new(self._terms()):
                    self._chronicle.preflighted(local, tally)
        waits = self.domain.options.mode == "replay"
        parts = self.domain.local_contexts.tell(waits=waits)
        run = Part()
        if self._judged is not None or self._run_watch.report is not None:
            run = self._run_watch.tell("|".join(self._judged or ()), waits=waits)
        self.domain.recovery.ran()
        self._launched.update(parts)
        sources = {
            SOURCE_OF + name: texts for name, texts in self.domain.local_contexts.new_sources().items()
        }
        facts = {name: {text: agreement.rank} for name, text in {**self.domain.point, **sources}.items()}
        elapsed_s = self.domain.tuning.elapsed_before_s + self._chronicle.elapsed_s
        payload = Payload("run", agreement.rank, facts=facts, parts=parts, run=run, elapsed_s=elapsed_s)
        if self.domain.tuning.rules.online_share != 1.0:
            payload = replace(payload, compiling_s=self.domain.ledger.new_compiling_s())
        if waits and self.domain.shares_clock and len(agreement.ranks) > 1:
            payload = self._common_start.told(payload)
        return payload

    def _terms(self) -> Terms:
        """Return on what terms this rank compiles candidates, here and now."""
        agreement = self.domain.agreement
        position, count = agreement.ranks.index(agreement.rank), len(agreement.ranks)
        patience_s = PATIENCE * self.domain.timeout_s if count > 1 else math.inf
        return Terms.agreed(self._chronicle.session, position, count, patience_s)

    def _step(self, merged: Payload) -> None:
        """Take in what all ranks said of the run, and write down what follows."""
        domain, tuning = self.domain, self.domain.tuning
        run = tuning.runs
        self._is_stepping = True
        said = merged
        duel_sample = tuning.duel is not None and not tuning.duel.is_warmup
        self._common_start.take(merged)
        try:
            domain.check_run(merged)
            self._chronicle.merged(run, merged)
            merged, names = tuning.kernels.unite(merged, tuning.contexts)
            domain.local_contexts.rename(names)
            self._launched = {names.get(name, name) for name in self._launched}
            outcomes = tuning.step(merged)
        except TuningError as error:
            self._tell_if_own(error)
            domain.drop_session()
            self.close(error)
            raise
        told = [local for local in domain.local_contexts.by_name.values() if local.told is not None]
        trials = [
            self._chronicle.trial(run, local, outcomes[local.name])
            for local in told
            if local.launches or local.stopwatch.sample_ms is not None
        ]
        domain.local_contexts.take(tuning.contexts, outcomes)
        counts = decisions.counts_whole_run(duel_sample, outcomes)
        self._chronicle.run_timed(run, waiting=bool(merged.run.pending), counts=counts)
        own = self._samples_taken(told, outcomes, of_run=counts and not merged.run.pending)
        domain.recovery.agreed(said, own, told)
        self._run_watch.take(waiting=bool(merged.run.pending), counts=counts)
        if tuning.remark:
            self._chronicle.write(Note(text=tuning.remark))
            self.warning, tuning.remark = tuning.remark, ""
        self._chronicle.step(run, merged, outcomes, trials)
        for context in domain.publish(self._chronicle.elapsed_s):
            self._chronicle.write(decisions.settled(run, context))
        detail = ", ".join(context.title for context in tuning.unsettled) or domain.name
        self._progress.update(tuning.runs, self._runs_expected(), detail[:60])
        self._is_stepping = False

    def _runs_expected(self) -> int:
        """Return how many runs the session may have; online, tell the log now and then what is left."""
        tuning = self.domain.tuning
        if tuning.rules.mode == "replay":
            return tuning.planned_runs
        outlook = tuning.outlook
        if tuning.runs == self._tells_outlook_at:
            self._tells_outlook_at *= 2
            if any(tuning.unsettled) or tuning.duel is not None:
                self._chronicle.write(Note(text=str(outlook)))
        return tuning.runs + outlook.more_runs

    def _samples_taken(
        self, told: list[Local], outcomes: dict[str, Outcome], *, of_run: bool
    ) -> dict[str, tuple[str, float, float]]:
        """Return this rank's own samples of a run, as (candidate, ms, gap ms); "": of all of it."""
        own = {}
        for local in told:
            outcome, watch = outcomes[local.name], local.stopwatch
            is_sample = outcome.kind == "sample" and outcome.judge == BY_LAUNCH
            if is_sample and outcome.index is not None and watch.sample_ms is not None:
                candidate = self.domain.tuning.contexts[local.name].digests[outcome.index]
                own[local.name] = (candidate, watch.sample_ms, watch.sample_gap_ms)
        report, ms = self._run_watch.report, self._run_watch.sample_ms
        if of_run and report is not None and ms is not None:
            own[""] = (str(report.ran), ms, self._run_watch.sample_gap_ms)
        return own

    def _fail(self, error: BaseException, told: BaseException) -> None:
        """Leave a run that raised: the peers are `told`, the next call goes on or starts anew."""
        domain = self.domain
        domain.recovery.failed()
        domain.launches.abandon_run()
        self._run_watch.abandon()
        self._failures.write(told, domain.agreement.rank)
        if len(domain.agreement.ranks) > 1 or isinstance(error, TuningError) or self._is_stepping:
            domain.agreement.fail(told)
            domain.drop_session()
            self.close(error)

    def _tell_if_own(self, error: TuningError) -> None:
        """Tell the peers of what a flow of the user's did; every other error of a step is theirs too."""
        if isinstance(error, FlowFailed):
            self.domain.agreement.fail(error)

    def _exchange(self, payload: Payload, what: str) -> Payload:
        domain = self.domain
        sent = payload.encode()
        began = time.perf_counter()
        try:
            received = domain.agreement.exchange(sent, merge, domain.timeout_s, what)
        except BaseException as error:
            self._failures.of_exchange(error)
            domain.launches.abandon_run()
            self._run_watch.abandon()
            domain.drop_session()
            self.close(error)
            raise
        ms = (time.perf_counter() - began) * 1e3
        domain.ledger.exchanged(ms / 1e3)
        run = domain.tuning.runs if payload.kind == "run" else -1
        self._chronicle.exchanged(
            Exchanged(run=run, sent_bytes=len(sent), received_bytes=len(received), ms=ms)
        )
        return Payload.decode(received)
