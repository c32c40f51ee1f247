"""The calls of a tuned function: a call runs with settled configs, or it belongs to a session."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, TypeVar

from ..errors import PutAside
from ..launch.fast_path import INCUMBENTS, CallUnderWay, dispatcher
from ..logs.records import Note
from ..logs.writer import SessionLog
from ..options import Options
from ..ranks.exchange import ExchangeWait
from ..ranks.group import RankGroup
from ..repeats.arguments import Arguments
from ..repeats.repeated_call import RepeatedCall, ReturnedInChild, saved_tensor_hooks
from ..triton_api import interception
from ..triton_api.interception import INTERCEPTION, PROGRAM, propagate_to_autograd
from ..triton_api.turn import ProcessTurn, session_turn
from . import diagnosis
from .function_state import FunctionRanks, FunctionState
from .recorder import contexts_from_cache
from .report import FunctionReports, TuningReport
from .session import Session
from .session_exchanges import PATIENCE_S
from .settled_calls import SettledCalls

T = TypeVar("T")


class Calls:
    """Makes the calls of one tuned function; keeps its session, its state and its last report.

    function: its source text names the results that are not shared; None: the calls are steps.
    is_program: the calls are runs of a program, for which `ScriptTuner` takes the turn.
    """

    def __init__(
        self, function: Callable[..., Any] | None, options: Options, name: str, *, is_program: bool = False
    ) -> None:
        self._function, self._options, self._name = function, options, name
        self._is_program = is_program
        self.state: FunctionState | None = None
        self._session: Session | None = None
        self._reports = FunctionReports()
        self._settled = SettledCalls(name, options, self._note)
        self._wants_session = True  # the next call opens one
        self._is_agreed = False  # that, by all ranks: those that make no further call are not waited for
        self._patience_s = PATIENCE_S  # there, by the runs of the last session
        self._changes_arguments = False  # a run takes a container apart that it was given
        self._is_to_retune = False  # the next call that all ranks take up tunes anew
        self._is_retuning = False  # the session under way ignores results; so does the next one if it fails
        self._ranks = FunctionRanks(options, name)

    @property
    def report(self) -> TuningReport | None:
        session, state = self._session, self.state  # read once: another thread may ask
        report = self._reports.last if session is None else session.report()
        later = () if state is None or state.function.tunes else contexts_from_cache(state.registry)
        return self._reports.completed(report, later)

    @property
    def settled(self) -> bool:
        return self._session is None and not (self._wants_session or self._is_to_retune)

    @property
    def untuned(self) -> tuple[tuple[str, Any, str], ...]:
        """(kernel, key, reason) of launched keys that stay untuned."""
        return self._settled.untuned

    def retune(self) -> None:
        """Tune anew at the next call, or as soon as all ranks take it up."""
        self._is_to_retune = True

    # -- one call ------------------------------------------------------------------------------------------

    def call(self, mode: str, thunk: Callable[[], T]) -> T:
        """Make one call. `mode`: "tune", "cached" or "strict", as DIST_AUTOTUNE_MODE says now."""
        asks_nobody = interception.is_capturing()
        state = self._steady_state(mode, asks_nobody)
        if state is not None and not self._takes_up(state, asks_nobody):
            return self._settled_call(state, thunk, asks_nobody)
        if self._options.mode == "online":
            with self._unsettled_step(mode, asks_nobody, takes_up=state is not None):
                return thunk()
        arguments = Arguments(thunk if mode == "tune" else None)  # refused before peers wait for this rank
        try:
            with self._turn(asks_nobody=asks_nobody, is_agreed=state is not None) as is_own:
                if not is_own:
                    return thunk()
                self._wants_session |= state is not None  # all ranks open one in this call, to tune anew
                state = self._current_state(mode)
                if not (asks_nobody or self.settled):
                    return self._replay(state, thunk, arguments)
        except PutAside:  # before any run: peers have not come to go on with the session
            return self._settled_call(self._current_state(mode), thunk, asks_nobody=True)
        # By another thread's session: this is a settled call like any other, which ranks count.
        return self._settled_call(state, thunk, asks_nobody) if asks_nobody else self.call(mode, thunk)

    def step(self, mode: str, *, asks_nobody: bool = False) -> AbstractContextManager[None]:
        """Begin a call of mode="online", a trial or a run with settled configs, that is the returned block.

        asks_nobody: run with known configs, and exchange nothing, whatever is new.
        """
        asks_nobody = asks_nobody or interception.is_capturing()
        state = self._steady_state(mode, asks_nobody)
        if state is not None and not self._takes_up(state, asks_nobody):
            return self._settled_step(state, asks_nobody)
        return self._unsettled_step(mode, asks_nobody, takes_up=state is not None)

    @contextlib.contextmanager
    def _unsettled_step(self, mode: str, asks_nobody: bool, *, takes_up: bool) -> Iterator[None]:
        """Make the block a trial, if it gets the turn and something is left to try.

        takes_up: all ranks open a session in this step, to tune anew.
        """
        try:
            with self._turn(asks_nobody=asks_nobody, is_agreed=takes_up) as is_own:
                if not is_own:
                    yield
                    return
                self._wants_session |= takes_up
                state = self._current_state(mode)
                if not (asks_nobody or self.settled):
                    with self._trial(state):
                        yield
                    return
        except PutAside:  # before the block
            state, asks_nobody = self._current_state(mode), True
        with self._settled_step(state, asks_nobody):
            yield

    @contextlib.contextmanager
    def _settled_step(self, state: FunctionState, asks_nobody: bool) -> Iterator[None]:
        call = self._begin_settled(state, asks_nobody)
        place = PROGRAM if self._is_program else get_ident()
        with self._settled.under_way(state, call, place, asks_nobody=asks_nobody):
            yield
        if self._end_settled(state, call, asks_nobody):
            self._open_next(state)

    def _open_next(self, state: FunctionState) -> None:
        """Let the next call open a session, as all ranks have agreed."""
        self._wants_session = self._is_agreed = True
        state.function.group.mark_idle(between_calls=True)

    def _settled_call(self, state: FunctionState, thunk: Callable[[], T], asks_nobody: bool) -> T:
        call, calls, thread = self._begin_settled(state, asks_nobody), INTERCEPTION.calls, get_ident()
        arguments = Arguments(thunk) if self._changes_arguments else None
        calls[thread] = call
        try:
            if state.function.is_strict:
                with self._settled.watched(state):
                    result = thunk()
            else:
                result = thunk()
        except BaseException as error:
            self._settled.end_failed(state, error, asks_nobody=asks_nobody)
            raise
        finally:
            if thread in calls:  # not in a child that was forked in the call
                del calls[thread]  # no call of a function, before which a Ctrl-C might come
        if call.new is None and state.function.is_alone:  # as in most calls
            return result
        self._settled.drop_unrepeatable(call, thunk)
        if not self._end_settled(state, call, asks_nobody):
            return result
        if self._options.mode == "online":
            self._open_next(state)
            return result
        is_alone = state.function.is_alone
        self._wants_session |= is_alone  # else this call's: other threads' go on as settled
        # What this run has changed, or shown to the caller's autograd hooks, is not undone: its result stays.
        is_kept = bool(self._options.preserve) or call.changes_tensors or saved_tensor_hooks() is not None
        with contextlib.ExitStack() as turn:
            try:
                is_own = turn.enter_context(self._turn(is_agreed=True))
            except BaseException:
                self._wants_session = True
                raise
            is_tuned = is_alone and all(each.tuned is not None for each in call.new or ())
            if not is_own or (self.settled and is_tuned):  # by another thread's session
                return result
            self._wants_session = True
            beside = (result,) if is_kept else None
            del result  # the function's outputs must not add to the memory of the next run
            state = self._current_state(state.function.mode)
            return self._replay(state, thunk, arguments or Arguments(thunk), beside, has_run=True)

    def _end_settled(self, state: FunctionState, call: CallUnderWay, asks_nobody: bool) -> bool:
        """Return whether a session is opened for new keys of a settled call, by all ranks alike."""
        try:
            return self._settled.end(state, call, asks_nobody=asks_nobody)
        except BaseException:  # Ctrl-C while it asks
            self._wants_session |= state.call_count is not None and state.call_count.has_opened
            raise

    def _replay(
        self,
        state: FunctionState,
        thunk: Callable[[], T],
        arguments: Arguments,
        beside: tuple[T] | None = None,
        *,
        has_run: bool = False,
    ) -> T:
        """Make a call of mode="replay" that begins a session or goes on with it.

        beside: see `Session.replay`. has_run: the call has made a settled run, which found these arguments.
        """
        left = None if beside is None else Arguments(thunk)
        call = RepeatedCall(self._name, thunk, arguments, left, has_run=has_run)
        try:
            with self._session_under_way(state) as session:
                return session.replay(call, beside=beside)
        except ReturnedInChild as child:
            result: T = child.result
            return result
        finally:
            self._changes_arguments |= arguments.have_changed
            state.written.end_call()

    @contextlib.contextmanager
    def _trial(self, state: FunctionState) -> Iterator[None]:
        """Make the block one run of the session; raises PutAside only before the block."""
        has_run, pid = False, os.getpid()
        try:
            with (
                contextlib.suppress(ReturnedInChild),
                self._session_under_way(state) as session,
                session.online(),
            ):
                yield
                has_run = True
                if os.getpid() != pid:
                    raise ReturnedInChild
        except PutAside:
            if not has_run:
                raise

    # -- which kind of call it is --------------------------------------------------------------------------

    def _steady_state(self, mode: str, asks_nobody: bool) -> FunctionState | None:
        """Return the state if a call now needs no session, and no other state; else None."""
        state = self.state
        if state is None or state.function.mode != mode:
            return None
        is_settled = self._session is None and not self._wants_session
        if not ((is_settled or asks_nobody) and self._ranks.are_current(state.function.group)):
            return None
        waits = self._is_to_retune and not (is_settled and state.call_count is not None)
        return None if waits else state

    def _takes_up(self, state: FunctionState, asks_nobody: bool) -> bool:
        """Begin a settled call of this rank; return whether all ranks open a session in it."""
        if state.function.is_alone or asks_nobody:
            return False
        opens = self._settled.begin(state, retunes=self._is_to_retune)
        self._is_to_retune &= self._settled.is_heard
        return opens

    def _turn(self, *, asks_nobody: bool = False, is_agreed: bool = False) -> AbstractContextManager[bool]:
        """Take the turn of sessions, on all ranks; alone for later calls of a session of mode="online".

        is_agreed: all ranks have said that they open a session.
        """
        if self._is_program:
            return contextlib.nullcontext(True)
        if asks_nobody or not self._options.is_dist:
            return session_turn(INCUMBENTS)
        group = self._ranks.group()
        if len(group.ranks) == 1:
            return session_turn(INCUMBENTS)
        goes_on = functools.partial(self._goes_on_alone, group)
        return self._ranks.turn(
            group, self._take_turn, goes_on, lambda: not is_agreed and (self.settled or goes_on())
        )

    def _goes_on_alone(self, group: RankGroup) -> bool:
        """Return whether the next run of the session needs no turn that all ranks take."""
        session = self._session
        if self._options.mode == "replay" or session is None or session.is_interrupted:
            return False
        return not (group.asks_for_trials and session.is_trial_next)

    def _take_turn(self, group: RankGroup, turn: ProcessTurn) -> bool:
        """Take the turn on all ranks; raises PutAside where peers do not go on with a session."""
        state, session = self.state, self._session
        timeout_s = self._options.timeout_s if state is None else state.function.timeout_s
        is_agreed = self._is_agreed and not self.group_has_changed()
        patience_s = self._patience_s if is_agreed else math.inf
        if session is not None:
            patience_s = session.patience_s
        wait = ExchangeWait(f"the opening of a session of {self._name}", timeout_s, patience_s)
        group.mark_idle(between_calls=False)
        try:
            return group.take_turn(turn, wait)
        except PutAside as error:
            if session is not None:
                session.put_aside(error)
                self._keep_if_over()
            elif state is not None and self._settled.give_up_opening(state, error):
                self._wants_session = self._is_agreed = self._is_retuning = False
            self._mark_idle(group)
            raise

    def _mark_idle(self, group: RankGroup) -> None:
        group.mark_idle(between_calls=self._session is not None or self._is_agreed)

    def _begin_settled(self, state: FunctionState, asks_nobody: bool) -> CallUnderWay:
        """Return the launches of a settled call. asks_nobody: new keys in it ask for no session."""
        INTERCEPTION.install(dispatcher)
        propagate_to_autograd()
        if asks_nobody and not self._is_retuning:
            state.known.looks_on_disk |= state.function.is_alone
        return state.dispatcher.settled_call()

    # -- the session ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _session_under_way(self, state: FunctionState) -> Iterator[Session]:
        """Go on with the session in the block, or open one."""
        group = state.function.group
        group.mark_idle(between_calls=False)
        try:
            if self._session is not None:
                self._session.resume()
                self._keep_if_over()
            session = self._session = self._session or self._new_session(state)
            INTERCEPTION.install(dispatcher)
            propagate_to_autograd()
            session.open_once()
            yield session
        except BaseException:
            if self._session is not None:
                self._session.pause_progress()
            raise
        finally:
            self._keep_if_over()
            self._mark_idle(group)

    def _new_session(self, state: FunctionState) -> Session:
        tunes = state.function.tunes
        if tunes:
            diagnosis.warn_of_ranks_alone(self._name, is_dist=self._options.is_dist)
        state.known.ignores_known = self._is_retuning and tunes
        self._wants_session, self._is_agreed = True, False
        self._settled.begin_session()
        return Session(state, self._options.log_path, is_of_program=self._is_program)

    def _keep_if_over(self) -> None:
        """Keep the report of the session, if it is over."""
        session = self._session
        if session is None or not session.is_over:
            return
        self._keep_report(session)
        self._wants_session = session.wants_another
        self._is_agreed = self._wants_session and not session.has_failed
        if session.patience_s < math.inf:
            self._patience_s = session.patience_s
        if session.left_because:
            self._settled.leave_untuned(session.left, session.left_because, stops=bool(session.in_place))
        if session.retunes:
            self._wants_session, self._is_retuning, self._is_to_retune = True, True, False
            self._is_agreed = True
            return
        self._is_retuning &= session.has_failed or not session.state.known.ignores_known
        if not self._wants_session:
            _ = session.state.call_count  # from now on peers are answered

    def close(self) -> None:
        """End the session under way, if there is one; its report stays."""
        if self._session is not None:
            self._session.close()
            self._keep_report(self._session)

    def _keep_report(self, session: Session) -> None:
        self._reports.keep(session.report(), anew=session.state.known.ignores_known)
        self._session = None

    # -- the function on its group -------------------------------------------------------------------------

    def _current_state(self, mode: str) -> FunctionState:
        """Return the state of the function; make a new one if the group or the mode has changed.

        A retune that was asked for begins here; amid a session, all ranks begin it after their next trial.
        """
        session = self._session
        if self._is_to_retune and session is not None and not session.may_be_left:
            session.asks_to_retune = True
        elif self._is_to_retune:
            self.close()
            self._wants_session, self._is_retuning, self._is_to_retune = True, True, False
        known, group = self.state, self._ranks.group()
        if known is None or known.function.group.shared is not group or known.function.mode != mode:
            known = self._ranks.new_state(self._function, mode, self._note, self._settled.watch)
            self.close()
            self.state, self._wants_session, self._is_agreed = known, True, False
        return known

    def group_has_changed(self) -> bool:
        """Return whether the next call belongs to other ranks than the last one."""
        return self.state is not None and self.state.function.group.shared is not self._ranks.group()

    def _note(self, text: str) -> None:
        rank = 0 if self.state is None else self.state.function.group.rank
        with SessionLog(self._options.log_path, rank) as log:
            log.write(Note(rank=rank, text=text))
