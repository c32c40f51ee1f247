"""Drives one tuned function: plan -> run -> samples -> exchange -> plan, until every context is settled."""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from ..errors import FlowFailed, NoValidConfig, PeerFailed, TuningError
from ..formatting import described
from ..logs import decisions
from ..logs.records import Exchanged, Note, SessionClosed
from ..logs.writer import SessionLog
from ..ranks.watchdog import Watch
from ..search.messages import Message, Opening, RunReport, decode, merge
from ..timing.device_errors import as_launch_failed
from ..timing.samples import Samples
from ..timing.time_spent import TimeSpent
from ..triton_api.interception import INTERCEPTION
from . import user_warnings
from .failures import Failures
from .function_state import UNDER_WAY, FunctionState
from .progress import Progress, is_shown
from .rank_run import RankRun
from .recorder import Recorder
from .report import TunedContext, TuningReport
from .results import tuned_contexts
from .snapshot import Snapshot

FIRST_OUTLOOK = 50  # runs of an online session after which its log says what is left; then at twice as many

OPENING = "the opening of a session"

T = TypeVar("T")


class Session:
    """One session on this rank: opens with an exchange, ends when every context is settled."""

    def __init__(self, domain: FunctionState, log: SessionLog, log_dir: str | None) -> None:
        self.domain = domain
        self.executions = 0
        self.warning = ""
        self.is_over = False
        self.wants_another = False
        self.has_failed = False
        self._dropped: tuple[TunedContext, ...] | None = None  # what was known when the session was dropped
        self._log_dir = log_dir
        run_watch = Samples(domain.clock, domain.options.statistic)
        self._chronicle = Recorder(domain, log, run_watch)
        self._run = RankRun(domain, self._chronicle, run_watch)
        self._failures = Failures(domain, self._chronicle, log_dir)
        self._left_by: str | None = None  # the failure that has left the session between two calls
        self._lived = hashlib.blake2b(
            digest_size=8
        )  # over what all ranks said of each run: the state follows
        self._is_in_function = False
        self._is_stepping = False  # the state is between two runs
        self._has_asked = self._has_time = False  # whether samples were to be taken here, and one was
        self._tells_outlook_at = FIRST_OUTLOOK
        options = domain.options
        self._progress = Progress(domain.name, shown=is_shown(options.progress, domain.agreement.rank))

    # -- the two modes -------------------------------------------------------------------------------------

    def replay(self, thunk: Callable[[], T], before: Snapshot | None = None) -> T:
        """Run `thunk` until every context is settled, then once more; return what that last run returned.

        before: the state that the call has run `thunk` from already; None: it has not.
        """
        options = self.domain.options
        with (
            self._telling_failures(),
            user_warnings.optimizer_steps(INTERCEPTION.turn.works_for_call) as stepped,
        ):
            is_first = before is None
            snapshot = before or Snapshot(options.preserve)
            while True:
                if not is_first:
                    snapshot.restore()
                is_first = False
                result = self._run_once(thunk)
                if self.domain.tuning.done:
                    self.close()
                    return result
                if not options.preserve:
                    user_warnings.repeats_steps(self.domain.name, stepped)
                del result  # a trial's outputs must not add to the memory of the next

    def online(self, thunk: Callable[[], T]) -> T:
        """Run `thunk` once, as one trial of the session."""
        with self._telling_failures():
            result = self._run_once(thunk)
            if not any(self.domain.tuning.contexts.unsettled) and self.domain.tuning.plan_trial is None:
                self.close()
            return result

    # -- opening, one run, closing -------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Return whether the session goes on, after a run that failed on some rank, from the run before it.

        It does if all ranks come back with the same state; else it is dropped on all of them.
        """
        left_by, self._left_by = self._left_by, None
        domain = self.domain
        if left_by is None:
            return True
        state = f"{self._chronicle.session} {domain.tuning.runs} {self._lived.hexdigest()}"
        with self._telling_failures():
            received = self._exchange(domain.going_on(state), OPENING)
            try:
                merged = domain.check_opening(received)
            except TuningError as error:
                self._drop(error)
                raise
        if set(merged.facts[UNDER_WAY]) == {state}:
            self._chronicle.write(Note(text=f"goes on after {left_by}"))
            return True
        self._drop(TuningError(left_by), outcome=left_by.partition(":")[0])
        return False

    def open_once(self) -> None:
        """Agree with the peers on what the session is, unless an earlier call has.

        Raises RankMismatch where ranks differ.
        """
        if self._chronicle.session:
            return
        domain = self.domain
        domain.ledger = TimeSpent()
        domain.on_ban = self._chronicle.ban
        with self._telling_failures():
            try:
                merged = self._opened()
                remarks = domain.open(merged)
            except TuningError as error:
                self._tell_if_own(error)
                self.close(error)
                raise
            (self._chronicle.session,) = merged.facts["session"]
            self._chronicle.write(self._chronicle.opened())
            for remark in remarks:
                self._chronicle.write(Note(text=remark))

    def _opened(self) -> Opening:
        """Return what all ranks say to open a session."""
        domain = self.domain
        while True:
            opening = domain.opening()
            if domain.agreement.rank == domain.agreement.ranks[0]:
                opening.facts["session"] = {uuid.uuid4().hex[:12]: domain.agreement.rank}
            merged = domain.check_opening(self._exchange(opening, OPENING))
            if set(merged.facts[UNDER_WAY]) == {""}:
                return merged
            # Some would have gone on with one, and know now that not all would: next time none has any.
            domain.drop_session()

    def _run_once(self, thunk: Callable[[], T]) -> T:
        """Make one run and agree on what follows from it."""
        domain, tuning, options = self.domain, self.domain.tuning, self.domain.options
        self._run.begin()
        self.executions += 1
        what = f"run {tuning.runs} of {domain.name}{self._failures.on_trial()}"
        with (
            domain.agreement.running(
                Watch(
                    what,
                    domain.timeout_s,
                    options.on_stuck,
                    self._failures.tell_stuck,
                    self._failures.whereabouts,
                )
            ),
            INTERCEPTION.installed(domain.launches.runner, domain.launches.choose),
            domain.ledger.running(),
        ):
            self._is_in_function = True
            result = self._run.make(thunk)
            self._is_in_function = False
        with as_launch_failed(if_reported=True):
            report = self._run.told()
        self._step(self._exchange(report, what))
        return result

    @contextlib.contextmanager
    def _telling_failures(self) -> Iterator[None]:
        """Tell the peers of an exception, unless it comes from them or is the same on every rank."""
        try:
            yield
        except BaseException as error:
            if not self.is_over and self._left_by is None:
                self._fail(error, self._failures.diagnosed(error))
            raise

    def close(self, error: BaseException | None = None, outcome: str = "") -> None:
        """End the session: write down how. outcome: of an error, where its class does not say it."""
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
        contexts = [
            known[name]
            for name in sorted(self._run.launched & known.keys())
            if len(known[name].digests) > 1  # with one there is no choice
        ]
        count = len(contexts) if self._dropped is None else len(self._dropped)
        left = [context for context in contexts if context.provisional and not context.is_unasked]
        starved = [context.title for context in left if context.status == "starved"]
        if not outcome:
            outcome = type(error).__name__ if error is not None else "partial" if left else "settled"
        if not self._run.launched and error is None:
            self.warning = "no launches of autotuned kernels seen"
        elif starved:
            self.warning = f"no longer launched, settled with what is known: {', '.join(starved)}"
        if error is None and self._has_asked and not self._has_time:
            self.warning = user_warnings.useless_clock(self.domain.name, self.domain.clock)
        if outcome == "settled" or isinstance(error, NoValidConfig):
            tuning.crash_bans = {}
            self.domain.guard.close()
        self._chronicle.write(
            SessionClosed(runs=self.executions, contexts=count, outcome=outcome, warning=self.warning)
        )
        self._chronicle.close()

    def report(self) -> TuningReport:
        """Return what the session has found so far."""
        return TuningReport(
            runs=self.executions,
            contexts=self._contexts() if self._dropped is None else self._dropped,
            world_size=len(self.domain.agreement.ranks),
            seconds=self._chronicle.elapsed_s,
            clock=type(self.domain.clock).__name__,
            log_dir=self._log_dir,
            warning=self.warning,
            spent=self.domain.ledger.seconds,
            outlook=None if self.is_over else self.domain.tuning.outlook,
        )

    def _contexts(self) -> tuple[TunedContext, ...]:
        return tuned_contexts(self.domain.tuning, self.domain.local_contexts, self._run.launched)

    def _drop(self, error: BaseException, outcome: str = "") -> None:
        """Forget the searches under way, on all ranks alike, and end the session; its report keeps them."""
        self._dropped = tuple(
            replace(context, status="unfinished", config=None, ms=None, fastest_rank_ms=None)
            if context.status == "tuning"
            else context
            for context in self._contexts()
        )
        self.domain.drop_session()
        self.close(error, outcome)

    # -- what follows a run --------------------------------------------------------------------------------

    def _step(self, received: Message) -> None:
        """Take in what all ranks said of the run, and write down what follows."""
        domain, tuning = self.domain, self.domain.tuning
        run = tuning.runs
        self._is_stepping = True
        try:
            merged = domain.check_run(received)
            self._run.take(merged)
            self._chronicle.merged(run, merged)
            merged, names = tuning.kernels.unite(merged, tuning.contexts)
            self._run.rename(names)
            outcomes = tuning.step(merged)
        except TuningError as error:
            self._tell_if_own(error)
            self._drop(error)
            raise
        told = [local for local in domain.local_contexts.by_name.values() if local.told is not None]
        trials = [
            self._chronicle.trial(run, local, outcomes[local.name])
            for local in told
            if local.launches or local.samples.is_read
        ]
        domain.local_contexts.take(tuning.contexts, outcomes, late_ms=merged.late_ms)
        counts = tuning.has_counted_run
        self._chronicle.run_timed(run, waiting=bool(merged.run.pending), counts=counts)
        self._has_asked |= any(outcomes[local.name].kind == "sample" for local in told)
        self._has_time |= self._run.has_time(told, outcomes, of_run=counts and not merged.run.pending)
        self._run.watch.apply_outcome(waiting=bool(merged.run.pending), counts=counts, late_ms=merged.late_ms)
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
            if any(tuning.contexts.unsettled) or tuning.plan_trial is not None:
                self._chronicle.write(Note(text=str(outlook)))
        return tuning.runs + outlook.more_runs

    def _fail(self, error: BaseException, told: BaseException) -> None:
        """Leave a run that raised: the peers are `told`, the next call goes on or starts anew."""
        domain = self.domain
        domain.guard.explain()
        self._failures.write(told, domain.agreement.rank)
        is_of_function = self._is_in_function and not isinstance(error, TuningError) and told is error
        self._is_in_function = False
        if len(domain.agreement.ranks) == 1 and not (isinstance(error, TuningError) or self._is_stepping):
            self._run.abandon()
            return
        domain.agreement.fail(told)
        if is_of_function:
            self._leave(error)
        else:
            self._run.abandon()
            self._drop(error)

    def _leave(self, error: BaseException) -> None:
        """Leave a run that failed on some rank: nobody counts it, and the next call may make it again."""
        self._run.retract()
        locals_ = self.domain.local_contexts.by_name
        self.domain.launches.forget([name for name, local in locals_.items() if not local.announced])
        self._left_by = described(error)  # not the error: it holds the function's variables

    def _tell_if_own(self, error: TuningError) -> None:
        """Tell the peers of what a flow of the user's did; every other error of a step is theirs too."""
        if isinstance(error, FlowFailed):
            self.domain.agreement.fail(error)

    def _exchange(self, message: Message, what: str) -> Message:
        domain, is_run = self.domain, isinstance(message, RunReport)
        sent = message.encode()
        began = time.perf_counter()
        try:
            received = domain.agreement.exchange(sent, merge, domain.timeout_s, what)
        except BaseException as error:
            self._failures.of_exchange(error)
            if is_run and type(error) is PeerFailed:
                self._leave(error)
            else:
                self._run.abandon()
                self._drop(error)
            raise
        if is_run:
            self._lived.update(received)
        ms = (time.perf_counter() - began) * 1e3
        domain.ledger.add("exchanges_s", ms / 1e3)
        run = domain.tuning.runs if is_run else -1
        self._chronicle.exchanged(
            Exchanged(run=run, sent_bytes=len(sent), received_bytes=len(received), ms=ms)
        )
        return decode(received)
