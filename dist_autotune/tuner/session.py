"""Drives one tuned function: plan -> run -> samples -> exchange -> plan, until every context is settled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from ..errors import NoValidConfig, TuningError, warn
from ..launch.fast_path import CallUnderWay
from ..logs.progress import Progress
from ..logs.records import Merged, Note
from ..logs.writer import SessionLog
from ..ranks.watchdog import Watch
from ..repeats.repeated_call import RepeatedCall
from ..repeats.replay import Replay
from ..repeats.snapshot import Snapshot
from ..search.messages import Captured, InPlaceReport
from ..search.orders import Order
from ..timing.device_errors import as_launch_failed
from ..timing.time_spent import TimeSpent
from ..triton_api.interception import INTERCEPTION
from . import diagnosis
from .function_state import FunctionState
from .recorder import Recorder, outcome_of
from .report import TuningReport, step_times
from .session_exchanges import SessionExchanges, SessionStage

T = TypeVar("T")


class Session(SessionExchanges):
    """One session on this rank, from the exchange that opens it until every context is settled."""

    def __init__(self, state: FunctionState, log_dir: Path | None, *, is_of_program: bool) -> None:
        function = state.function
        recorder = Recorder(function, SessionLog(log_dir, function.group.rank))
        super().__init__(state, recorder, None if log_dir is None else str(log_dir))
        self._is_of_program = is_of_program
        self.executions, self.warning = 0, ""
        self._began, self._ended = time.monotonic(), 0.0
        is_first = function.group.rank == function.group.ranks[0]
        self._progress = Progress(function.name, function.options.progress, is_first=is_first)
        self._launches: CallUnderWay  # of the last run
        self.asks_to_retune = self.retunes = False  # this rank, with its next report; all ranks, by order
        self._is_checked = False  # its first two runs left the same values: see `InPlaceCheck`
        self.in_place = ""  # what a further run changes though nobody declared it: nothing more is tried

    @property
    def wants_another(self) -> bool:
        """Whether the next call opens a session: this one has failed, or its runs were cut short.

        Online it would be every call: there a context that is launched again opens one, see
        `Context.is_lasting`.
        """
        if self.has_given_up:
            return False
        return (self.has_failed and not self.in_place) or self.state.orders.run.wants_another

    @property
    def elapsed_s(self) -> float:  # since the session's first call: what `budget_s` limits
        return (self._ended or time.monotonic()) - self._began

    # -- one run -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def one_run(
        self, again: Callable[[], Any] | None = None, put_back: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Make the block one run: time it, exchange reports on it, and apply the order.

        again: the function that the block calls; if graph replays judge the run, it is called once more.
        put_back: puts state back before that call and before each replay.
        """
        dispatcher, run = self.state.dispatcher, self._run
        try:
            launches, watch = run.begin(), self._diagnosis.watch()
            self._launches, began = launches, time.monotonic()
            with self._in_function(launches, watch), run.timed():
                yield
            self._longest_run_s = max(self._longest_run_s, time.monotonic() - began)
            if again is not None and run.is_replayed:
                self._replay_graph(again, put_back, launches, watch)
            with as_launch_failed(if_reported=True):
                report = replace(run.report(self.elapsed_s), retunes=self.asks_to_retune)
            with self._dropping_searches():
                order = self._exchange(report, watch.what, of_run=True)
            with self._recorder.together():
                self._apply(order)
            run.end_exchange()
        finally:  # until then settled calls of other threads leave its contexts alone
            dispatcher.run_under_way = None  # no function, before which a Ctrl-C might come

    def _apply(self, order: Order) -> None:
        """Take over the order after a run: publish the results that it settles, and record both."""
        state, orders, run = self.state, self.state.orders, self.state.orders.runs
        assert order.run is not None
        self._stage = SessionStage.APPLYING
        if state.search is not None and state.search.last_run is not None:
            self._recorder.write(Merged(run=run, payload=state.search.last_run.as_data()))
        self._run.apply_order(order.run)
        state.dispatcher.choose_anew([*order.contexts, *order.run.unknown])
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

    def replay(self, call: RepeatedCall[T], *, beside: tuple[T] | None = None) -> T:
        """Make runs of `call` until every context is settled, then once more; return the last result.

        beside: see `Replay`.
        """
        function, written = self.function, self.state.written
        with self._reporting_failures():
            checks = function.checks_in_place and not self._is_checked
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
        report = InPlaceReport({}, found)
        with self._dropping_searches():
            return self._exchange(report).found

    def note(self, text: str) -> None:
        self._recorder.write(Note(text=text))

    def end_checked(self, found: str, *, has_run: bool) -> None:
        if not found:
            self._is_checked = True
            return
        self.in_place = found
        self.leave_untuned(f"a further run changes {found}")
        text = diagnosis.changed_in_place(self.function.name, found, has_run=has_run)
        self._drop(TuningError(text), outcome="changes in place")
        warn(text)

    # -- beside its runs -----------------------------------------------------------------------------------

    @property
    def is_trial_next(self) -> bool:
        """Whether the next run ends in an exchange."""
        return not (self._until_peers or self._run.apart)

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
            state.orders.session = session = order.opening.session
            self._run.shares_clock = order.opening.shares_clock
            self._recorder.record_opening(session)
            for remark in remarks:
                self._recorder.write(Note(text=remark))

    def _ordered_opening(self) -> Order:
        """Return the order that opens a session."""
        state = self.state
        while True:
            order = self._exchange(state.opening_with_results())
            assert order.opening is not None
            if not order.opening.drops:
                return order
            # Some ranks would have resumed a session that others have not: all drop it, and open anew.
            state.drop_searches()
            self.function.group.leave()

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

    def _replay_graph(
        self,
        function: Callable[[], Any],
        put_back: Callable[[], None],
        launches: CallUnderWay,
        watch: Watch,
    ) -> None:
        """Make the run once more to capture it; when all ranks have captured it, time replays."""
        launches.repeats = True
        with self._under_way(launches, watch):
            put_back()
            self._run.capture(function)
        # [Note: ranks leave together] A rank without a graph replays nothing: kernels of peers would wait.
        report = Captured({})
        with self._dropping_searches():
            self._exchange(report, f"the capture of {watch.what}", of_run=True)
        with self._under_way(launches, watch):
            self._run.replay(put_back)

    def pause_progress(self) -> None:
        """Leave the terminal to others: a call has raised."""
        self._progress.pause()

    def close(self, error: BaseException | None = None, outcome: str = "") -> None:
        """End the session and record how. outcome: names an error whose class does not."""
        if self.is_over:
            return
        self._ended = time.monotonic()
        self._stage = SessionStage.CLOSED if error is None else SessionStage.FAILED
        state, orders = self.state, self.state.orders
        if not self.function.tunes:
            self.leave_untuned(f"DIST_AUTOTUNE_MODE={self.function.mode}")
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
