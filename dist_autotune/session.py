"""Drives one tuned function: plan -> run -> samples -> exchange -> plan, until every context is settled."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from . import decisions
from .chronicle import Chronicle
from .device_errors import told_as_ours
from .domain import Domain
from .errors import FlowFailed, NoValidConfig, TuningError
from .failures import Failures
from .intercept import INTERCEPTION
from .log import SessionLog
from .own_run import OwnRun
from .payload import Payload, merge
from .preserve import Snapshot
from .progress import Progress, is_shown
from .records import Exchanged, Note, Resumed, SessionClosed
from .report import TuningReport
from .results import tuned_contexts
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
        run_watch = Stopwatch(domain.clock, domain.options.statistic, feeds="runs")
        self._chronicle = Chronicle(domain, log, run_watch)
        self._run = OwnRun(domain, self._chronicle, run_watch)
        self._failures = Failures(domain, self._chronicle, log_dir)
        self._is_stepping = False  # the state is between two runs
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
            if not any(self.domain.tuning.contexts.unsettled) and self.domain.tuning.duel is None:
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
            self._run.watch.restore(domain.recovery.run_samples)

    def _run_once(self, thunk: Callable[[], T]) -> T:
        """Make one run and agree on what follows from it."""
        domain, tuning, options = self.domain, self.domain.tuning, self.domain.options
        self._run.begin()
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
            result = self._run.make(thunk)
        with told_as_ours(if_reported=True):
            payload = self._run.told()
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
        self.domain.in_session = False
        tuning = self.domain.tuning
        self.has_failed = error is not None
        # Online the next session would be the next call, see `Context.stands`.
        self.wants_another = self.has_failed or (
            tuning.rules.tunes
            and tuning.rules.mode == "replay"
            and tuning.closing
            and any(context.status == "partial" for context in tuning.contexts.values())
        )
        self._progress.close()
        known = tuning.contexts
        contexts = [known[name] for name in sorted(self._run.launched & known.keys())]
        left = [context for context in contexts if context.provisional and not context.is_unasked]
        starved = [context.title for context in left if context.status == "starved"]
        outcome = type(error).__name__ if error is not None else "partial" if left else "settled"
        if not self._run.launched and error is None:
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
            contexts=tuned_contexts(self.domain.tuning, self.domain.local_contexts, self._run.launched),
            world_size=len(self.domain.agreement.ranks),
            seconds=self._chronicle.elapsed_s,
            clock=type(self.domain.clock).__name__,
            log_dir=self._log_dir,
            warning=self.warning,
            spent=self.domain.ledger.spent,
            outlook=None if self.is_over else self.domain.tuning.outlook,
        )

    # -- what follows a run --------------------------------------------------------------------------------

    def _step(self, merged: Payload) -> None:
        """Take in what all ranks said of the run, and write down what follows."""
        domain, tuning = self.domain, self.domain.tuning
        run = tuning.runs
        self._is_stepping = True
        said = merged
        duel_sample = tuning.duel is not None and not tuning.duel.is_warmup
        self._run.take(merged)
        try:
            domain.check_run(merged)
            self._chronicle.merged(run, merged)
            merged, names = tuning.kernels.unite(merged, tuning.contexts)
            self._run.rename(names)
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
            if local.launches or local.stopwatch.is_read
        ]
        domain.local_contexts.take(tuning.contexts, outcomes)
        counts = decisions.counts_whole_run(duel_sample, outcomes)
        self._chronicle.run_timed(run, waiting=bool(merged.run.pending), counts=counts)
        own = self._run.samples(told, outcomes, of_run=counts and not merged.run.pending)
        domain.recovery.agreed(said, own, told)
        self._run.watch.take(waiting=bool(merged.run.pending), counts=counts)
        if tuning.remark:
            self._chronicle.write(Note(text=tuning.remark))
            self.warning, tuning.remark = tuning.remark, ""
        self._chronicle.step(run, merged, outcomes, trials)
        for context in domain.publish(self._chronicle.elapsed_s):
            self._chronicle.write(decisions.settled(run, context))
        detail = ", ".join(context.title for context in tuning.contexts.unsettled) or domain.name
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
            if any(tuning.contexts.unsettled) or tuning.duel is not None:
                self._chronicle.write(Note(text=str(outlook)))
        return tuning.runs + outlook.more_runs

    def _fail(self, error: BaseException, told: BaseException) -> None:
        """Leave a run that raised: the peers are `told`, the next call goes on or starts anew."""
        domain = self.domain
        domain.recovery.failed()
        self._run.abandon()
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
            self._run.abandon()
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
