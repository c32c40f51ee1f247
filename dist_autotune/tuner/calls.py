"""A call of a tuned function: it goes on with a session, or runs with what is settled."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import AgreementTimeout, NotTuned
from ..formatting import described
from ..launch.fast_path import CallUnderWay, dispatcher
from ..launch.rank_context import RankContext
from ..logs.records import Note
from ..logs.writer import SessionLog
from ..options import Options
from ..ranks.group import GROUPS, RankGroup
from ..ranks.watchdog import Watch
from ..triton_api import identity, interception
from ..triton_api.interception import INTERCEPTION, PROGRAM, propagate_to_autograd
from . import diagnosis
from .function_state import FunctionSetup, FunctionState
from .report import TuningReport
from .session import Session

T = TypeVar("T")
_IS_DISTRIBUTED = dist.is_available()

SELDOM = (
    "{} launches it too seldom to try its configs. Decorate the function that launches it, such as an "
    "evaluation, with @contextual_autotune: it is tuned in its first call (docs/training-scripts.md)."
)


class Calls:
    """The calls of one tuned function, one after another, and what they have found so far.

    function: its source text names the results that are not shared; None: these are steps.
    turn: takes the turn of sessions in a block, or yields False where the block is a part of another call;
    None: these are the runs of a program, and `ScriptTuner` takes the turn.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        options: Options,
        name: str,
        log_dir: Path | None,
        turn: Callable[[], AbstractContextManager[bool]] | None = None,
    ) -> None:
        self._turn = turn or (lambda: contextlib.nullcontext(True))
        self._is_of_program = turn is None
        self._function, self._options, self._name, self._log_dir = function, options, name, log_dir
        self.state: FunctionState | None = None
        self._session: Session | None = None
        self._report: TuningReport | None = None
        self._wants_session = True
        self._ignores_known = False  # the results in memory and on disk, in the next session
        self.retunes = False  # the next call tunes anew, whatever memory and disk hold
        self._has_asked = False  # the peers to do so with this rank
        self._noted: set[str] = set()  # contexts that are logged as not tuned
        self._asking: set[str] = set()  # contexts that have asked for a session
        self._world: Callable[[], Any] = lambda: None  # the default group of the last call; see `_keep_world`
        self._pid = -1

    @property
    def report(self) -> TuningReport | None:
        session, state = self._session, self.state  # read once: another thread may ask
        report = self._report if session is None else session.report()
        if report is None or state is None or self._options.mode != "online":
            return report
        return replace(report, waiting=state.waiting)

    @property
    def settled(self) -> bool:
        return self._session is None and not (self._wants_session or self.retunes)

    def retune(self) -> None:
        """Tune anew at the next call, or as soon as all ranks take it up."""
        self.retunes, self._has_asked = True, False

    def call(self, mode: str, thunk: Callable[[], T]) -> T:
        """Make one call. `mode`: "tune", "cached" or "strict", as DIST_AUTOTUNE_MODE says now."""
        asks_nobody = interception.is_capturing()
        state = self._steady_state(mode, asks_nobody)
        if state is None or self._takes_up(state, asks_nobody):
            with self._turn() as is_own:
                if not is_own:
                    return thunk()
                takes_up, state = state is not None, self._begin_call(mode)
                if not asks_nobody and self._is_in_session(state, takes_up=takes_up):
                    return self._call_of_session(state, thunk)
        return self._settled_call(state, thunk, asks_nobody)

    def _call_of_session(
        self, state: FunctionState, thunk: Callable[[], T], beside: tuple[T] | None = None
    ) -> T:
        """Make a call that begins or goes on with a session; `beside`: see `Session.replay`."""
        if self._options.mode == "online":
            with self._trial(state):
                return thunk()
        try:
            with self._session_under_way(state) as session:
                return session.replay(thunk, beside=beside)
        finally:
            state.written.end_call()

    def _settled_call(self, state: FunctionState, thunk: Callable[[], T], asks_nobody: bool) -> T:
        call, calls, thread = self._begin_settled(state, asks_nobody), INTERCEPTION.calls, get_ident()
        calls[thread] = call
        try:
            if state.function.is_strict:
                with self._watched(state):
                    result = thunk()
            else:
                result = thunk()
        except BaseException as error:
            self._report_failure(state, call, error, asks_nobody)
            raise
        finally:
            del calls[thread]  # no call of a function, before which a Ctrl-C might come
        opens = self._end_settled(state, call, asks_nobody)
        if not opens or self._options.mode == "online":
            return result
        # There is no copy of the state before this run. Where it matters, this stays the call's run.
        is_kept = bool(self._options.preserve) or call.changes_tensors
        with self._turn() as is_own:
            if not is_own or (self.settled and not self._lacks_results(state, call)):
                return result  # or another thread's session has tuned them
            self._wants_session = True
            beside = (result,) if is_kept else None
            del result  # the function's outputs must not add to the memory of the next run
            return self._call_of_session(self._begin_call(state.function.mode), thunk, beside)

    @contextlib.contextmanager
    def step(self, mode: str, *, asks_nobody: bool = False) -> Iterator[None]:
        """Make the block one call of mode="online": a trial, or a run with what is settled.

        asks_nobody: a run with known configs in any case, without an exchange.
        """
        asks_nobody = asks_nobody or interception.is_capturing()
        state = self._steady_state(mode, asks_nobody)
        if state is None or self._takes_up(state, asks_nobody):
            with self._turn() as is_own:
                if not is_own:
                    yield
                    return
                takes_up, state = state is not None, self._begin_call(mode)
                if not asks_nobody and self._is_in_session(state, takes_up=takes_up):
                    with self._trial(state):
                        yield
                    return
        call, calls = self._begin_settled(state, asks_nobody), INTERCEPTION.calls
        place = PROGRAM if self._is_of_program else get_ident()
        calls[place] = call
        try:
            with self._watched(state):
                yield
        except BaseException as error:
            self._report_failure(state, call, error, asks_nobody)
            raise
        finally:
            if calls.get(place) is call:
                del calls[place]
        self._end_settled(state, call, asks_nobody)

    def close(self) -> None:
        """End the session under way, if there is one; its report stays."""
        if self._session is not None:
            self._session.close()
            self._report, self._session = self._session.report(), None

    def _steady_state(self, mode: str, asks_nobody: bool) -> FunctionState | None:
        """Return the state if a call now is without trials and nothing has to be prepared for it."""
        state = self.state
        if state is None or state.function.mode != mode:
            return None
        is_settled = self._session is None and not self._wants_session
        if not (is_settled or asks_nobody):
            return None
        if self._options.group is not None or _world() is not self._world() or os.getpid() != self._pid:
            if state.function.group is not self._current_group():
                return None
            self._keep_world()
        if self.retunes and not (is_settled and state.ballot is not None):
            return None
        return state

    def _keep_world(self) -> None:
        """Remember the default process group: as long as it is the same, so is the group of the calls."""
        world = _world()
        self._world = (lambda: None) if world is None else weakref.ref(world)
        self._pid = os.getpid()

    def _takes_up(self, state: FunctionState, asks_nobody: bool) -> bool:
        """Begin a settled call; return whether all ranks open a session in it."""
        if state.function.is_alone or asks_nobody:
            return False
        if (ballot := state.ballot) is None:
            return False
        if ballot.watch is None:
            ballot.watch = self._watch(state)
        asks = self.retunes and not self._has_asked
        self._has_asked |= asks
        return ballot.begin(asks=asks)

    def _watch(self, state: FunctionState) -> Watch:
        report = functools.partial(diagnosis.write_stuck, self._note)
        return Watch(f"a call of {self._name}", state.function.timeout_s, self._options.on_stuck, report)

    def _watched(self, state: FunctionState) -> AbstractContextManager[None]:
        """Watch a settled call in the strict mode: a peer that refuses a launch tells it by an exchange."""
        function = state.function
        if function.is_alone or not function.is_strict:
            return contextlib.nullcontext()
        return function.group.running(self._watch(state))

    def _is_in_session(self, state: FunctionState, *, takes_up: bool) -> bool:
        """Return whether this call belongs to a session.

        takes_up: open one with the ranks that take a new key up, or tune anew. If a rank does not come in
        time, learning waits, and the call is a settled one.
        """
        if not takes_up or self._session is not None:
            return not self.settled
        self._wants_session = True
        try:
            with self._session_under_way(state):
                return True
        except AgreementTimeout as error:
            self._wants_session = False
            self._note(f"no session, the ranks go on with what is settled: {error}")
            return False

    def _begin_call(self, mode: str) -> FunctionState:
        if self.retunes:
            self.close()
            self._wants_session, self._ignores_known, self.retunes = True, True, False
        return self._current_state(mode)

    def _begin_settled(self, state: FunctionState, asks_nobody: bool) -> CallUnderWay:
        """Return a call without trials. asks_nobody: new keys in it ask for no session."""
        INTERCEPTION.install(dispatcher)
        propagate_to_autograd()
        if asks_nobody and not self._ignores_known:
            state.known.looks_on_disk |= state.function.is_alone
        return state.dispatcher.settled_call()

    def _may_tune(self, state: FunctionState, asks_nobody: bool) -> bool:
        """Return whether new keys of a settled call may open a session."""
        function = state.function
        return function.tunes and (function.is_alone or self._options.watch) and not asks_nobody

    def _end_settled(self, state: FunctionState, call: CallUnderWay, asks_nobody: bool) -> bool:
        """Learn whether some rank has met a new key in the call; return whether all tune it now."""
        function, new = state.function, call.new or ()
        may_tune = self._may_tune(state, asks_nobody)
        if not new and (function.is_alone or not may_tune):
            return False
        has_new_key, opens = bool(new) and not asks_nobody, may_tune
        if opens and not function.is_alone and (ballot := state.ballot) is not None:
            opens = ballot.end(has_new_key=has_new_key)
        if not (has_new_key or opens):
            return False
        self._wants_session |= opens
        for context in new:
            if context.tuned is None:
                state.results.record_waiting(context)
        if not may_tune:
            self._note_new(new)
        elif self._options.mode == "online":
            self._note_waiting(new)
        return opens

    @staticmethod
    def _lacks_results(state: FunctionState, call: CallUnderWay) -> bool:
        """Return whether a session of another thread has left keys of a settled call untuned."""
        return state.function.is_alone and any(context.tuned is None for context in call.new or ())

    def _report_failure(
        self, state: FunctionState, call: CallUnderWay, error: BaseException, asks_nobody: bool
    ) -> None:
        """Tell the peers of NotTuned, once: they may wait for this rank in a collective."""
        function = state.function
        if function.is_alone:
            return
        if self._may_tune(state, asks_nobody) and (ballot := state.ballot) is not None:
            ballot.report(described(error)[:2000])
            ballot.end(has_new_key=bool(call.new), waits=False)
        if isinstance(error, NotTuned) and not state.has_refused:
            state.has_refused = True  # once: each time costs the peers an exchange
            function.group.fail(error)

    def _note(self, text: str) -> None:
        rank = 0 if self.state is None else self.state.function.group.rank
        with SessionLog(self._log_dir, rank) as log:
            log.write(Note(rank=rank, text=text))

    def _note_new(self, new: Iterable[RankContext]) -> None:
        """Log, once each, the keys that are new and that no call tunes."""
        titles = {context.name: context.title for context in new}
        for name in sorted(titles.keys() - self._noted):
            self._noted.add(name)
            text = "keeps the config of the nearest tuned key (watch=False)"
            self._note(f"{titles[name]} is new to {self._name} and {text}")

    def _note_waiting(self, new: Iterable[RankContext]) -> None:
        """Say, once each, which keys without a result ask again: the last session has not launched them."""
        asking = {context.name: context.title for context in new if context.claim is None}
        for name in sorted(asking.keys() & self._asking - self._noted):
            self._noted.add(name)
            text = f"{asking[name]} waits for launches: {SELDOM.format(self._name)}"
            self._note(text)
            logging.getLogger("dist_autotune").warning("%s", text)
        self._asking |= asking.keys()

    @contextlib.contextmanager
    def _session_under_way(self, state: FunctionState) -> Iterator[Session]:
        """Go on with the session in the block, or open one."""
        try:
            if self._session is not None:
                self._session.resume()
        finally:
            self._keep_if_over()
        session = self._session = self._session or self._new_session(state)
        try:
            INTERCEPTION.install(dispatcher)
            propagate_to_autograd()
            session.open_once()
            yield session
        finally:
            self._keep_if_over()

    @contextlib.contextmanager
    def _trial(self, state: FunctionState) -> Iterator[None]:
        """Let the block be one run of the session."""
        with self._session_under_way(state) as session, session.online():
            yield

    def _new_session(self, state: FunctionState) -> Session:
        tunes = state.function.tunes
        if tunes and not self._options.is_dist:
            diagnosis.warn_of_missing_is_dist(self._name)
        state.known.ignores_known = self._ignores_known and tunes
        self._wants_session = True
        return Session(state, self._log_dir, is_of_program=self._is_of_program)

    def _keep_if_over(self) -> None:
        """Keep the report of the session, if it is over."""
        session = self._session
        if session is not None and session.is_over:
            self._report, self._session = session.report(), None
            self._wants_session = session.wants_another
            has_retuned = session.state.known.ignores_known and not session.has_failed
            self._ignores_known = self._ignores_known and not has_retuned

    def _current_state(self, mode: str) -> FunctionState:
        """Return the state for the group as it is now; another group or mode starts anew."""
        options, known, group = self._options, self.state, self._current_group()
        if known is None or known.function.group is not group or known.function.mode != mode:
            try:
                source = "" if self._function is None else identity.function_digest(self._function)
                setup = FunctionSetup(options, self._name, source, group, mode=mode)
                known = FunctionState(setup, self._note)
            except BaseException as error:  # see [Note: ranks leave together]
                group.fail(error)
                raise
            self.close()
            self.state, self._wants_session = known, True
        return known

    def group_has_changed(self) -> bool:
        """Return whether the next call belongs to other ranks than the last one."""
        return self.state is not None and self.state.function.group is not self._current_group()

    def _current_group(self) -> RankGroup:
        options = self._options
        return GROUPS.of(options.process_group()) if options.is_dist else GROUPS.single()


def _world() -> Any:
    return dist.GroupMember.WORLD if _IS_DISTRIBUTED else None
