"""Drives one tuned function: plan -> run -> samples -> exchange -> plan, until every context is settled.

[Note: ranks leave together] Every rank makes each exchange, or its peers hear why it does not. What only this
rank knows, such as an exception of the function, is told before it is raised (`_fail`). Errors derived
from the order occur on every rank and are not sent again (`_dropping_searches`).
"""

from __future__ import annotations

import contextlib
import enum
import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from ..errors import FlowFailed, NoValidConfig, PeerFailed, PutAside, RankMismatch, TuningError
from ..formatting import described
from ..launch.fast_path import CallUnderWay
from ..launch.rank_context import RankContext
from ..logs.progress import Progress
from ..logs.records import Merged, Note
from ..logs.writer import SessionLog
from ..ranks.watchdog import Watch
from ..repeats.repeated_call import RepeatedCall
from ..repeats.replay import Replay
from ..repeats.snapshot import Snapshot
from ..search.messages import InPlaceReport, Message, Opening, RunReport
from ..search.orders import Order, read_order
from ..search.search import Decision
from ..timing.device_errors import as_launch_failed
from ..timing.time_spent import TimeSpent
from ..triton_api.interception import INTERCEPTION
from . import diagnosis
from .diagnosis import Diagnosis
from .function_state import FunctionState
from .rank_run import RankRun
from .recorder import Recorder, outcome_of, tuned_contexts
from .report import TunedContext, TuningReport, step_times

T = TypeVar("T")


class SessionStage(enum.Enum):
    """Where a session is on this rank. `Session` alone changes it, on the thread that has the turn.

    BETWEEN_RUNS: nothing of a run is under way, or the session is not open yet.
    IN_FUNCTION: the user's function runs; what it raises is its caller's (`_one_run`).
    APPLYING: the order behind a run is applied; an error leaves half a step (`_apply`).
    INTERRUPTED: a run failed on some rank; the next call goes on if all ranks can (`_leave`, `resume`).
    CLOSED, FAILED: only the report is left (`close`); the next call opens another session where it FAILED.
    """

    BETWEEN_RUNS = enum.auto()
    IN_FUNCTION = enum.auto()
    APPLYING = enum.auto()
    INTERRUPTED = enum.auto()
    CLOSED = enum.auto()
    FAILED = enum.auto()


PATIENCE_S, PATIENCE_RUNS = 2.0, 10  # a session waits so long, or so many runs, for peers that are in no call
MOST_ASIDES = 3  # in a row; then its keys stay untuned
OVER = SessionStage.CLOSED, SessionStage.FAILED
ORDERED_ERRORS = {kind.__name__: kind for kind in (NoValidConfig, RankMismatch, FlowFailed)}


class Session:
    """One session on this rank, from the exchange that opens it until every context is settled."""

    def __init__(self, state: FunctionState, log_dir: Path | None, *, is_of_program: bool) -> None:
        function = state.function
        self._is_of_program = is_of_program
        self.state, self.function = state, function
        self.executions, self.warning = 0, ""
        self._stage = SessionStage.BETWEEN_RUNS
        self._log_dir = None if log_dir is None else str(log_dir)
        self._began, self._ended = time.monotonic(), 0.0
        self._recorder = Recorder(function, SessionLog(log_dir, function.group.rank))
        self._run = RankRun(state, self._recorder)
        self._diagnosis = Diagnosis(state, self._recorder, self._log_dir)
        is_first = function.group.rank == function.group.ranks[0]
        self._progress = Progress(function.name, function.options.progress, is_first=is_first)
        self._dropped: tuple[TunedContext, ...] | None = None  # what was known when the session was dropped
        self._dropped_names: tuple[str, ...] = ()  # contexts that the last order drops
        self._interrupted_by = ""  # the failure of the run that left it INTERRUPTED
        self._until_peers = 0  # so many calls until they come to the exchange that the failure has ended
        self._launches: CallUnderWay  # of the last run
        self.asks_to_retune = self.retunes = False  # this rank, with its next report; all ranks, by order
        self.in_place = ""  # what a further run changes though nobody declared it: nothing more is tried
        self.left: tuple[RankContext, ...] = ()  # the keys that stay untuned then
        self._longest_run_s, self._asides = 0.0, 0  # in a row, as peers made no call
        self._may_resume = not state.orders.verifies  # another call has other inputs, and other bits

    @property
    def is_over(self) -> bool:
        return self._stage in OVER

    @property
    def has_failed(self) -> bool:
        return self._stage is SessionStage.FAILED

    @property
    def wants_another(self) -> bool:
        """Whether the next call opens a session: this one has failed, or its runs were cut short.

        Online it would be every call: there a context that is launched again opens one, see
        `Context.is_lasting`.
        """
        if self._asides == MOST_ASIDES:
            return False
        return (self.has_failed and not self.in_place) or self.state.orders.run.wants_another

    @property
    def may_be_left(self) -> bool:
        """Return whether this rank may end the session before a call: no peer goes on with it meanwhile."""
        return self.function.is_alone or self._stage is not SessionStage.BETWEEN_RUNS

    @property
    def elapsed_s(self) -> float:  # since the session's first call: what `budget_s` limits
        return (self._ended or time.monotonic()) - self._began

    def replay(self, call: RepeatedCall[T], *, beside: tuple[T] | None = None) -> T:
        """Make runs of `call` until every context is settled, then once more; return the last result.

        beside: see `Replay`.
        """
        function, written = self.function, self.state.written
        with self._reporting_failures():
            checks = function.checks_in_place and not self.state.is_checked
            makes_second = not function.repeats_first_plan
            snapshot = Snapshot(function.options.preserve)
            replay = Replay(self, call, written, snapshot, beside, checks=checks, makes_second=makes_second)
            return replay.result()

    # -- a replayed call: see `repeats.replay.Runs` --------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return self.state.orders.run.done

    def take_result(self, result: Any) -> None:
        if self._run.outputs is not None:
            self._run.outputs.take_result(result)

    def repeat_run(self, call: RepeatedCall[Any]) -> None:
        launches, dispatcher = self._launches, self.state.dispatcher
        launches.repeats, dispatcher.run_under_way = True, launches
        try:
            with self._in_function(launches, self._diagnosis.watch()):
                call()
        finally:
            dispatcher.run_under_way = None

    def found_in_place(self, found: str) -> str:
        if self.function.is_alone:
            return found
        report = InPlaceReport(self.function.facts({}), found)
        with self._dropping_searches():
            return self._exchange(report, lambda search: search.compare, InPlaceReport.sent_at).found

    def note(self, text: str) -> None:
        self._recorder.write(Note(text=text))

    def end_checked(self, found: str) -> None:
        if not found:
            self.state.is_checked = True
            return
        self.in_place = f"a further run changes {found}"
        known = self.state.registry.by_name.values()
        self.left = tuple(each for each in known if each.tuned is None and len(each.texts) > 1)
        text = diagnosis.changed_in_place(self.function.name, found)
        self._drop(TuningError(text), outcome="changes in place")
        warnings.warn(text, stacklevel=2)

    # -- one run -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def online(self) -> Iterator[None]:
        """Make the block one run, a trial of the session."""
        if self._until_peers:
            self._until_peers -= 1
            with self._known_configs():
                yield
            return
        with self._reporting_failures():
            if self._run.apart:
                with self._run_apart():
                    yield
                return
            with self.one_run():
                yield
            self.retunes = self.state.orders.run.retunes
            if self.retunes or not self.state.orders.run.has_work:
                self.close()

    def open_once(self) -> None:
        """Open the session with its first exchange, if it is not open; raises RankMismatch."""
        if self._recorder.session:
            return
        state = self.state
        state.time_spent = TimeSpent()
        with self._reporting_failures():
            with self._dropping_searches():
                order = self._ordered_opening()
                remarks = state.open(order)
            assert order.opening is not None
            orders, session = state.orders, order.opening.session  # the opening may have made new ones
            self._run.shares_clock = order.opening.shares_clock
            continues, orders.session = orders.session, session
            self._recorder.record_opening(session, continues=continues)
            for remark in remarks:
                self._recorder.write(Note(text=remark))

    def _ordered_opening(self) -> Order:
        """Return the order that opens a session."""
        state = self.state
        while True:
            report = state.opening_with_results()
            order = self._exchange(report, lambda search: search.open, Opening.sent_at)
            assert order.opening is not None
            if not order.opening.drops:
                return order
            # Some ranks would have resumed a session that others have not: all drop it, and open anew.
            state.drop_searches()

    def resume(self) -> None:
        """Behind a run that failed on some rank: go on if all ranks have one state; else all drop theirs."""
        if not self.is_interrupted:
            return
        failure, self._stage = self._interrupted_by, SessionStage.BETWEEN_RUNS
        state = self.state
        # The search may be ahead of the ranks, where a rank failed in the exchange of its last order.
        point = f"{state.orders.session} {state.orders.runs}" if state.search is None else state.search.point
        with self._reporting_failures(), self._dropping_searches():
            order = self._exchange(state.opening(point), lambda search: search.open, Opening.sent_at)
        if order.opening is not None and order.opening.resumes:
            self._recorder.write(Note(text=f"resumed after {failure}"))
        else:
            self._drop(TuningError(failure), outcome=failure.partition(":")[0])

    @contextlib.contextmanager
    def one_run(self, again: Callable[[], Any] | None = None) -> Iterator[None]:
        """Make the block one run: time it, exchange reports on it, and apply the order.

        again: the function that the block calls, called once more where graph replays judge the run.
        """
        dispatcher, run = self.state.dispatcher, self._run
        try:
            launches, watch = run.begin(), self._diagnosis.watch()
            self._launches, began = launches, time.monotonic()
            with self._in_function(launches, watch), run.timed():
                yield
            self._longest_run_s = max(self._longest_run_s, time.monotonic() - began)
            if again is not None and run.is_replayed:
                self._replay_graph(again, launches, watch)
            with as_launch_failed(if_reported=True):
                report = replace(run.report(self.elapsed_s), retunes=self.asks_to_retune)
            with self._dropping_searches():
                order = self._exchange(report, lambda search: search.step, watch.what, of_run=True)
            self._apply(order)
        finally:  # until then settled calls of other threads leave its contexts alone
            dispatcher.run_under_way = None  # no function, before which a Ctrl-C might come

    @contextlib.contextmanager
    def _run_apart(self) -> Iterator[None]:
        """Make the block one run without a trial, as the last order says: nothing is read or exchanged."""
        self._stage = SessionStage.IN_FUNCTION
        with self._known_configs() as launches:
            yield
        self._stage = SessionStage.BETWEEN_RUNS
        self._run.end_apart(launches)

    @contextlib.contextmanager
    def _known_configs(self) -> Iterator[CallUnderWay]:
        """Make the block an execution of the function in which nothing is tried."""
        self.executions += 1
        launches = self._run.begin_apart()
        try:
            with self._under_way(launches, self._diagnosis.watch()):
                yield launches
        finally:
            self.state.dispatcher.run_under_way = None

    @contextlib.contextmanager
    def _in_function(self, launches: CallUnderWay, watch: Watch) -> Iterator[None]:
        """Make the block an execution of the function."""
        self.executions += 1
        with self._under_way(launches, watch):
            self._stage = SessionStage.IN_FUNCTION
            yield
            self._stage = SessionStage.BETWEEN_RUNS

    @contextlib.contextmanager
    def _under_way(self, launches: CallUnderWay, watch: Watch) -> Iterator[None]:
        with (
            self.function.group.running(watch),
            INTERCEPTION.entered(launches, as_program=self._is_of_program),
            self.state.time_spent.adding("runs_s"),
        ):
            yield

    def _replay_graph(self, function: Callable[[], Any], launches: CallUnderWay, watch: Watch) -> None:
        """Make the run once more to capture it; when all ranks have captured it, time replays."""
        launches.repeats = True
        with self._under_way(launches, watch):
            self._run.capture(function)
        # [Note: ranks leave together] A rank without a graph replays nothing: kernels of peers would wait.
        opening = Opening(self.function.facts({}))
        with self._dropping_searches():
            what = f"the capture of {watch.what}"
            self._exchange(opening, lambda search: search.meet, what, of_run=True)
        with self._under_way(launches, watch):
            self._run.replay()

    def _apply(self, order: Order) -> None:
        """Take over the order behind a run: publish the results that it settles, and record both."""
        state, orders, run = self.state, self.state.orders, self.state.orders.runs
        assert order.run is not None
        self._stage = SessionStage.APPLYING
        if state.search is not None and state.search.last_run is not None:
            self._recorder.write(Merged(run=run, payload=state.search.last_run.as_data()))
        self._run.apply_order(order.run)
        if order.run.unknown:
            state.registry.forget(order.run.unknown)
        orders.apply(order)
        self._recorder.record_contexts(run, orders, state.registry.by_name)
        self._run.apply_outcomes(run)
        self._recorder.record_outcomes(run, orders)
        self.warning = order.run.remark or self.warning
        self._recorder.record_settled(run, state.publish(self.elapsed_s), state.registry.by_name)
        self._recorder.record_forecast(orders)
        self._progress.update(orders.forecast, lambda: step_times(self._contexts()))
        self._stage = SessionStage.BETWEEN_RUNS

    def _exchange(
        self,
        message: Message,
        decision: Decision,
        what: str,
        *,
        of_run: bool = False,
    ) -> Order:
        """Send this rank's report, return the order; raises what all ranks raise by order.

        decision: of the deciding rank's search. of_run: where a peer's run has failed, the next call goes on.
        """
        try:
            sent, received, seconds = self.state.exchange(message, decision, what, self.patience_s)
        except BaseException as error:
            self._leave_exchange(error, of_run=of_run)
            raise
        self._asides, run = 0, -1
        if isinstance(message, RunReport):
            run, self._run.exchange_s = self.state.orders.runs, seconds
        self._recorder.record_exchange(run, len(sent), len(received), seconds * 1e3)
        order = read_order(received)
        if order.failure is not None:
            kind, text = order.failure
            self._dropped_names = order.dropped
            raise ORDERED_ERRORS.get(kind, TuningError)(text)
        return order

    @property
    def is_interrupted(self) -> bool:
        """Return whether this call is to go on, with its peers, with what a failed run has left."""
        return self._stage is SessionStage.INTERRUPTED and not self._until_peers

    def put_aside(self, error: PutAside) -> None:
        """Leave the session to a later call: peers have not come to go on with it."""
        self._leave_exchange(error, of_run=False)

    @property
    def patience_s(self) -> float:
        """How long this rank waits for peers that are in no call, once it knows what a run takes."""
        return max(PATIENCE_S, PATIENCE_RUNS * self._longest_run_s) if self._longest_run_s else math.inf

    def _leave_exchange(self, error: BaseException, *, of_run: bool) -> None:
        """Leave an exchange that has ended without an order; the next call goes on, or starts anew."""
        self._diagnosis.record_failed_exchange(error)
        self._run.abandon()
        is_aside = type(error) is PutAside
        self._asides = self._asides + 1 if is_aside else 0
        if self._asides == 1:
            self._diagnosis.write_stuck(f"{self.function.name}: {error}. The next call goes on.")
        goes_on = self._asides < MOST_ASIDES if is_aside else of_run and type(error) is PeerFailed
        if goes_on and self._may_resume:
            self._leave(error)
        else:
            self._drop(error)

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        """Report an exception to the peers, unless all ranks have it: see [Note: ranks leave together]."""
        try:
            yield
        except BaseException as error:
            if self._stage not in (*OVER, SessionStage.INTERRUPTED):
                self._fail(error, self._diagnosis.of_error(error))
            raise

    def _fail(self, error: BaseException, reported: BaseException) -> None:
        """Leave a run that raised: tell the peers of `reported`; a later call goes on or starts anew.

        Peers hear of a run apart at their next exchange. Until then this rank makes its calls beside them.
        """
        group, stage, apart = self.function.group, self._stage, self._run.apart
        self._stage = SessionStage.BETWEEN_RUNS
        self.state.guard.record_error()
        self._diagnosis.record_failure(reported, group.rank)
        is_ours = isinstance(error, TuningError)
        is_of_function = stage is SessionStage.IN_FUNCTION and not is_ours and reported is error
        self._run.abandon()
        if self.function.is_alone and not (is_ours or stage is SessionStage.APPLYING):
            self._run.apart = max(apart - 1, 0)  # the order has counted them
            if not self._may_resume:
                self._drop(error)
            return
        group.fail(reported)
        if is_of_function and self._may_resume:
            self._leave(error)
            self._until_peers = apart
        else:
            self._drop(error)

    def _leave(self, error: BaseException) -> None:
        """Leave a run that failed on some rank: no rank counts it, and the next call may make it again."""
        registry = self.state.registry
        registry.forget([name for name, context in registry.by_name.items() if not context.announced])
        self._stage = SessionStage.INTERRUPTED
        self._interrupted_by = described(error)  # not the error: it holds the function's variables

    @contextlib.contextmanager
    def _dropping_searches(self) -> Iterator[None]:
        """Drop searches if the block raises a TuningError: all ranks do."""
        try:
            yield
        except TuningError as error:
            if self._stage not in (*OVER, SessionStage.INTERRUPTED):  # else its exchange has failed
                self._drop(error)
            raise

    def _drop(self, error: BaseException, outcome: str = "") -> None:
        """Forget the searches under way, on all ranks alike, and end the session; its report keeps them."""
        self._dropped = tuple(each.unfinished() for each in self._contexts())
        self.state.drop_searches(self._dropped_names)
        self.close(error, outcome)

    def close(self, error: BaseException | None = None, outcome: str = "") -> None:
        """End the session and record how. outcome: names an error whose class does not."""
        if self.is_over:
            return
        self._ended = time.monotonic()
        self._stage = SessionStage.CLOSED if error is None else SessionStage.FAILED
        state, orders = self.state, self.state.orders
        state.known.close()
        self._run.close()
        self.function.group.leave()
        names = sorted(self._run.launched & orders.contexts.keys())
        launched = [orders.contexts[name] for name in names]
        outcome = outcome or outcome_of(launched, error)
        ending = diagnosis.warning_at_end(self.function, self._run, launched, has_failed=self.has_failed)
        self.warning = ending or self.warning
        if outcome == "settled" or isinstance(error, NoValidConfig):
            orders.crash_bans = {}
            state.guard.close()
        report = self.report()
        self._progress.close(report.ending(outcome))
        self._recorder.record_end(report, outcome)

    def report(self) -> TuningReport:
        """Return the report of the session so far."""
        return TuningReport(
            runs=self.executions,
            contexts=self._contexts(),
            seconds=self.elapsed_s,
            log_dir=self._log_dir,
            warning=self.warning,
            outlook=None if self.is_over else self.state.orders.forecast,
            **self._recorder.figures(self.state),
        )

    def _contexts(self) -> tuple[TunedContext, ...]:
        if self._dropped is not None:
            return self._dropped
        return tuned_contexts(self.state.orders, self.state.registry, self._run.launched)
