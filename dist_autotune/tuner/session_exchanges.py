"""The exchanges of a session on this rank, and how it leaves a run or an exchange that has failed.

[Note: ranks leave together] Every rank makes each exchange, or its peers hear why it does not. An error that
only this rank knows, such as an exception of the function, is sent before it is raised (`_fail`). Errors
derived from the order occur on every rank and are not sent again (`_dropping_searches`).
"""

from __future__ import annotations

import abc
import contextlib
import enum
import math
from collections.abc import Iterator

from ..errors import FlowFailed, NoValidConfig, PeerFailed, PutAside, RankMismatch, TuningError
from ..formatting import described
from ..launch.rank_context import RankContext
from ..logs.records import Note
from ..ranks.exchange import ExchangeWait
from ..search.messages import Message, RunReport
from ..search.orders import Order, read_order
from .diagnosis import Diagnosis
from .function_state import FunctionState
from .rank_run import RankRun
from .recorder import Recorder, tuned_contexts
from .report import TunedContext


class SessionStage(enum.Enum):
    """Where a session is on this rank. Only the thread that has the turn changes it.

    BETWEEN_RUNS: nothing of a run is under way, or the session is not open yet.
    IN_FUNCTION: the user's function runs; its exceptions reach its caller (`one_run`).
    APPLYING: the order after a run is applied; an error leaves half a step (`_apply` of `Session`).
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


class SessionExchanges(abc.ABC):
    """The exchanges of a `Session` with its peers: each ends in an order, or in an error on all ranks."""

    def __init__(self, state: FunctionState, recorder: Recorder, log_dir: str | None) -> None:
        self.state, self.function = state, state.function
        self._recorder, self._log_dir = recorder, log_dir
        self._run = RankRun(state, recorder)
        self._diagnosis = Diagnosis(state, recorder, log_dir)
        self._stage = SessionStage.BETWEEN_RUNS
        self._dropped: tuple[TunedContext, ...] | None = None  # what was known when the session was dropped
        self._dropped_names: tuple[str, ...] = ()  # contexts that the last order drops
        self._interrupted_by = ""  # the failure of the run that left it INTERRUPTED
        self._until_peers = 0  # so many calls until they come to the exchange that the failure has ended
        self._longest_run_s, self._asides = 0.0, 0  # in a row, as peers made no call
        self.left, self.left_because = tuple[RankContext, ...](), ""  # the keys that stay untuned after it
        self._may_resume = not state.orders.verifies  # another call has other inputs, and other bits

    @abc.abstractmethod
    def close(self, error: BaseException | None = None, outcome: str = "") -> None:
        """End the session and record how. outcome: names an error whose class does not."""

    @property
    def is_over(self) -> bool:
        return self._stage in OVER

    @property
    def has_failed(self) -> bool:
        return self._stage is SessionStage.FAILED

    @property
    def has_given_up(self) -> bool:  # as peers have not come
        return self._asides == MOST_ASIDES

    @property
    def may_be_left(self) -> bool:
        """Return whether this rank may end the session before a call: no peer goes on with it meanwhile."""
        is_under_way = self._stage is SessionStage.BETWEEN_RUNS or self._until_peers > 0
        return self.function.is_alone or not is_under_way

    def _exchange(self, message: Message, what: str = "", *, of_run: bool = False) -> Order:
        """Send this rank's report, return the order; raise the error that an order names for all ranks.

        what: names the exchange in errors. of_run: if a peer's run has failed, the next call goes on.
        """
        try:
            what = what or f"{message.sent_at} of {self.function.name}"
            wait = ExchangeWait(what, self.function.timeout_s, self.patience_s)
            sent, received, seconds = self.state.exchange(message, wait)
        except BaseException as error:
            self._leave_exchange(error, of_run=of_run)
            raise
        self._asides, run = 0, self.state.orders.runs if isinstance(message, RunReport) else -1
        self._recorder.record_exchange(run, len(sent), len(received), seconds * 1e3)
        order = read_order(received)
        if order.failure is not None:
            kind, text = order.failure
            self._dropped_names = order.dropped
            raise ORDERED_ERRORS.get(kind, TuningError)(text)
        return order

    @property
    def is_interrupted(self) -> bool:
        """Return whether this call goes on, with its peers, with the session of a failed run."""
        return self._stage is SessionStage.INTERRUPTED and not self._until_peers

    def put_aside(self, error: PutAside) -> None:
        """Leave the session to a later call: peers have not come to go on with it."""
        self._leave_exchange(error, of_run=False)

    @property
    def patience_s(self) -> float:
        """How long this rank waits for peers that are in no call, once it knows the time of a run."""
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
            if self.has_given_up:
                self.leave_untuned(f"{error}, {MOST_ASIDES} times in a row")
            self._drop(error)

    def leave_untuned(self, reason: str) -> None:
        """Leave the keys without a result untuned after the session."""
        self.left, self.left_because = self.state.registry.untuned(), reason

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
        if isinstance(error, NoValidConfig):
            self._diagnosis.note_options(error)
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
        registry.forget([context.name for context in registry.contexts if not context.announced])
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

    def resume(self) -> None:
        """After a run that failed on some rank: go on if all ranks have one state; else all drop theirs."""
        if not self.is_interrupted:
            return
        failure, self._stage = self._interrupted_by, SessionStage.BETWEEN_RUNS
        state = self.state
        # The search may be ahead of the ranks, where a rank failed in the exchange of its last order.
        point = f"{state.orders.session} {state.orders.runs}" if state.search is None else state.search.point
        with self._reporting_failures(), self._dropping_searches():
            order = self._exchange(state.opening(point))
        if order.opening is not None and order.opening.resumes:
            self._recorder.write(Note(text=f"resumed after {failure}"))
        else:
            self._drop(TuningError(failure), outcome=failure.partition(":")[0])

    def _contexts(self) -> tuple[TunedContext, ...]:
        if self._dropped is not None:
            return self._dropped
        return tuned_contexts(self.state.orders, self.state.registry, self._run.launched)
