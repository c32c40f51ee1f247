"""Drives one tuned function: plan -> run -> samples -> exchange -> plan, until every context is settled."""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from .chronicle import Chronicle
from .domain import SOURCE_OF, Domain
from .errors import AgreementTimeout, PeerFailed, TuningError
from .intercept import INTERCEPTION
from .log import SessionLog
from .payload import Part, Payload, check_facts, merge
from .preserve import Snapshot
from .progress import Progress, is_shown
from .records import Exchanged, Note, RunFailed, RunStarted, SessionClosed
from .report import TuningReport
from .search import BY_RUN
from .stopwatch import Stopwatch

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
        self._run_watch = Stopwatch(domain.clock, domain.options.statistic)
        self._chronicle = Chronicle(domain, log, self._run_watch)
        self._judged: tuple[str, str] | None = None
        self._is_stepping = False  # the state is between two runs
        self._launched: set[str] = set()
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
        domain.on_ban = self._chronicle.ban
        with self._telling_failures():
            payload = domain.opening()
            if domain.agreement.rank == domain.agreement.ranks[0]:
                payload.facts["session"] = {uuid.uuid4().hex[:12]: domain.agreement.rank}
            merged = self._exchange(payload, "the opening of a session")
            try:
                remarks = domain.open(merged)
            except TuningError as error:  # the same on every rank
                self.close(error)
                raise
            (self._chronicle.session,) = merged.facts["session"]
            self._chronicle.write(self._chronicle.opened())
            for remark in remarks:
                self._chronicle.write(Note(text=remark))

    def _run_once(self, thunk: Callable[[], T]) -> T:
        """Make one run and agree on what follows from it."""
        domain, tuning, options = self.domain, self.domain.tuning, self.domain.options
        self._start_run()
        self.executions += 1
        what = f"run {tuning.runs} of {domain.name}{self._on_trial()}"
        with (
            domain.agreement.running(
                what, domain.timeout_s, options.on_stuck, diagnosis_to(self._chronicle.note)
            ),
            INTERCEPTION.installed(domain.launches.runner, domain.launches.choose),
        ):
            result = self._timed(thunk)
        merged = self._exchange(self._finish_run(), what)
        self._step(merged)
        return result

    @contextlib.contextmanager
    def _telling_failures(self) -> Iterator[None]:
        """Tell the peers of an exception, unless it comes from them or is the same on every rank."""
        try:
            yield
        except BaseException as error:
            if not self.is_over:
                self._fail(error)
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
        starved = [context.title for context in contexts if context.status == "starved"]
        if error is not None:
            outcome = type(error).__name__
        else:
            outcome = "partial" if any(c.status in ("partial", "starved") for c in contexts) else "settled"
        if not self._launched and error is None:
            self.warning = "no launches of autotuned kernels seen"
        elif starved:
            self.warning = f"no longer launched, settled with what is known: {', '.join(starved)}"
        self._chronicle.write(
            SessionClosed(runs=self.executions, contexts=len(contexts), outcome=outcome, warning=self.warning)
        )
        self._chronicle.close()

    def report(self) -> TuningReport:
        """Return what the session has found so far."""
        return TuningReport(
            runs=self.executions,
            contexts=self.domain.tuned_contexts(self._launched),
            world_size=len(self.domain.agreement.ranks),
            seconds=self._chronicle.elapsed_s,
            clock=type(self.domain.clock).__name__,
            log_dir=self._log_dir,
            warning=self.warning,
        )

    # -- steps of a run ------------------------------------------------------------------------------------

    def _start_run(self) -> None:
        tuning = self.domain.tuning
        self.domain.launches.begin_run(tunes=tuning.rules.tunes)
        self._run_watch.begin_run()
        self._judged = tuning.judged_run
        plan = {c.name: c.trial for c in tuning.unsettled if c.trial is not None and not c.waiting}
        self._chronicle.write(RunStarted(run=tuning.runs, plan=plan))

    def _timed(self, thunk: Callable[[], T]) -> T:
        """Run `thunk`, timed as a whole if this run is judged so."""
        if self._judged is None or self._run_watch.report is not None:
            return thunk()
        mark = self._run_watch.start()
        result = thunk()
        self._run_watch.stop(mark)
        return result

    def _finish_run(self) -> Payload:
        launches = self.domain.launches
        agreement = self.domain.agreement
        if launches.has_new:
            with agreement.busy():
                launches.preflight_new()
        waits = self.domain.options.mode == "replay"
        parts = launches.end_run(waits=waits)
        run = Part()
        if self._judged is not None or self._run_watch.report is not None:
            run = self._run_watch.tell("|".join(self._judged or ()), waits=waits)
        self._launched.update(parts)
        sources = {SOURCE_OF + name: texts for name, texts in launches.new_sources().items()}
        facts = {name: {text: agreement.rank} for name, text in {**self.domain.point, **sources}.items()}
        return Payload(
            "run", agreement.rank, facts=facts, parts=parts, run=run, elapsed_s=self._chronicle.elapsed_s
        )

    def _step(self, merged: Payload) -> None:
        """Take in what all ranks said of the run, and write down what follows."""
        domain, tuning = self.domain, self.domain.tuning
        run = tuning.runs
        self._is_stepping = True
        duel_sample = tuning.duel is not None and not tuning.duel.is_warmup
        try:
            domain.check_run(merged)
            merged, names = tuning.unite(merged)
            domain.launches.rename(names)
            self._launched = {names.get(name, name) for name in self._launched}
            outcomes = tuning.step(merged)
        except TuningError as error:  # the same on every rank: nobody is left waiting
            domain.drop_session()
            self.close(error)
            raise
        told = [local for local in domain.launches.contexts.values() if local.told is not None]
        trials = [self._chronicle.trial(run, local, outcomes[local.name]) for local in told if local.launches]
        domain.launches.take(tuning.contexts, outcomes)
        counts = duel_sample or any(o.judge == BY_RUN and o.kind == "sample" for o in outcomes.values())
        self._run_watch.take(waiting=bool(merged.run.pending), counts=counts)
        if tuning.remark:
            self._chronicle.write(Note(text=tuning.remark))
            self.warning, tuning.remark = tuning.remark, ""
        self._chronicle.step(run, merged, outcomes, trials)
        for context in domain.publish(self._chronicle.elapsed_s):
            self._chronicle.settled(run, context)
        detail = ", ".join(context.title for context in tuning.unsettled) or domain.name
        self._progress.update(tuning.runs, tuning.planned_runs, detail[:60])
        self._is_stepping = False

    def _fail(self, error: BaseException) -> None:
        """Leave a run that raised: the peers learn of it, the next call goes on or starts anew."""
        domain = self.domain
        domain.launches.abandon_run()
        self._run_watch.abandon()
        self._chronicle.write(
            RunFailed(run=domain.tuning.runs, by_rank=domain.agreement.rank, error=_one_line(error))
        )
        if len(domain.agreement.ranks) > 1 or isinstance(error, TuningError) or self._is_stepping:
            domain.agreement.fail(error)
            domain.drop_session()
            self.close(error)

    def _exchange(self, payload: Payload, what: str) -> Payload:
        domain = self.domain
        sent = payload.encode()
        began = time.perf_counter()
        try:
            received = domain.agreement.exchange(sent, merge, domain.timeout_s, what)
        except BaseException as error:
            if isinstance(error, AgreementTimeout) and self._log_dir is not None:
                files = ", ".join(f"{self._log_dir}/rank-{rank}.jsonl" for rank in error.missing_ranks)
                error.args = (f"{error} Last records: {files}",)
            self._chronicle.write(
                RunFailed(
                    run=domain.tuning.runs,
                    by_rank=getattr(error, "rank", domain.agreement.rank),
                    error=_one_line(error),
                )
            )
            domain.launches.abandon_run()
            self._run_watch.abandon()
            domain.drop_session()
            self.close(error)
            raise
        ms = (time.perf_counter() - began) * 1e3
        run = domain.tuning.runs if payload.kind == "run" else -1
        self._chronicle.exchanged(
            Exchanged(run=run, sent_bytes=len(sent), received_bytes=len(received), ms=ms)
        )
        return Payload.decode(received)

    def _on_trial(self) -> str:
        """Return what the run under way tries, for messages."""
        trials = [
            f"{c.title} with {c.texts[c.trial]}" for c in self.domain.tuning.unsettled if c.trial is not None
        ]
        more = f" and {len(trials) - 1} more" if len(trials) > 1 else ""
        return f" ({trials[0]}{more})" if trials else ""


def settled_call(
    domain: Domain, thunk: Callable[[], T], note: Callable[[str], None], *, votes: bool
) -> tuple[T, bool]:
    """Run `thunk` with what is settled; return its result and whether some rank wants a session.

    `votes`: ask the peers. A rank that raises tells them instead, so that they do not wait for it.
    """
    launches, agreement = domain.launches, domain.agreement
    launches.begin_run(tunes=False)
    launches.met.clear()
    if not votes:
        with INTERCEPTION.installed(launches.settled.runner, launches.choose):
            return thunk(), bool(launches.met)
    what = f"a call of {domain.name}"
    try:
        with (
            agreement.running(what, domain.timeout_s, domain.options.on_stuck, diagnosis_to(note)),
            INTERCEPTION.installed(launches.settled.runner, launches.choose),
        ):
            result = thunk()
        facts = {name: {text: agreement.rank} for name, text in domain.point.items()}
        payload = Payload("vote", agreement.rank, facts=facts, wants_session=bool(launches.met)).encode()
    except BaseException as error:
        agreement.fail(error)
        raise
    merged = Payload.decode(agreement.exchange(payload, merge, domain.timeout_s, what))
    check_facts(merged, "vote")
    return result, merged.wants_session


def diagnosis_to(note: Callable[[str], None]) -> Callable[[str], None]:
    """Return what says why this process may be stuck: by `note`, and where it is seen if it never ends."""

    def write(text: str) -> None:
        note(text)
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            sys.stderr.write(f"dist_autotune: {text}\n")
            sys.stderr.flush()

    return write


def _one_line(error: BaseException) -> str:
    if isinstance(error, PeerFailed):
        return f"rank {error.rank}: {error.error}"
    return f"{type(error).__name__}: {error}".replace("\n", " ").rstrip(": ")[:500]
