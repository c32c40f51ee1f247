"""A call of a tuned function: it goes on with a session, or runs with what is settled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import NotTuned, RankMismatch
from ..logs.records import Note
from ..logs.writer import SessionLog
from ..options import Options
from ..ranks.group import GROUPS
from ..ranks.watchdog import Watch
from ..search.messages import Vote, checked, decode, merge
from ..triton_api import identity, interception
from ..triton_api.interception import INTERCEPTION
from . import diagnosis
from .function_state import FunctionState, TunedFunction
from .report import TuningReport
from .session import Session
from .snapshot import Snapshot

T = TypeVar("T")

# A key that is new in a settled call is tuned by that call, from the state before it, which is copied for it
# (random states alone: 0.1 ms). Keys come in sweeps: after so many calls without one, no copy is made.
CALLS_THAT_KEEP_STATE = 16


class Calls:
    """The calls of one tuned function, one after another, and what they have found so far."""

    def __init__(
        self, function: Callable[..., Any], options: Options, name: str, log_dir: Path | None
    ) -> None:
        self._function, self._options, self._name, self._log_dir = function, options, name, log_dir
        self.state: FunctionState | None = None
        self._session: Session | None = None
        self._report: TuningReport | None = None
        self._wants_session = True
        self._forgets = False  # what memory and disk hold, in the next session
        self.retunes = False  # the next call tunes anew, whatever memory and disk hold
        self._noted: set[str] = set()  # contexts that are logged as not tuned
        self._calls_in_vain = 0  # settled calls since one met a new key, or a session

    @property
    def report(self) -> TuningReport | None:
        session = self._session  # read once: another thread may ask
        return self._report if session is None else session.report()

    @property
    def settled(self) -> bool:
        return self._session is None and not (self._wants_session or self.retunes)

    def call(self, mode: str, thunk: Callable[[], T]) -> T:
        """Make one call. `mode`: "tune", "cached" or "strict", as DIST_AUTOTUNE_MODE says now."""
        if self.retunes:
            if self._session is not None:
                self._session.close()
                self._keep_if_over()
            self._wants_session, self._forgets, self.retunes = True, True, False
        state = self._current_state(mode)
        if interception.is_capturing():
            if not self._forgets:
                state.results.looks_on_disk |= state.function.is_alone
            return self._run_settled(state, thunk, votes=False)[0]
        if self.settled:
            return self._call_settled(state, thunk)
        return self._run_session(state, thunk)

    def _call_settled(self, state: FunctionState, thunk: Callable[[], T]) -> T:
        """Make a call that begins with nothing to try; tune what it meets."""
        options, is_alone, tunes = self._options, state.function.is_alone, state.function.tunes
        votes = tunes and options.watch and not is_alone
        may_tune = votes or (tunes and is_alone)
        is_replay = options.mode == "replay"
        keeps = may_tune and is_replay and self._calls_in_vain < CALLS_THAT_KEEP_STATE
        self._calls_in_vain += 1
        try:
            preserved = options.preserve if keeps else None
            result, wants, before = self._run_settled(state, thunk, votes=votes, preserved=preserved)
        except RankMismatch as error:
            self._wants_session = error.starts_anew
            raise
        if not wants:
            return result
        self._calls_in_vain = 0
        if not may_tune:
            self._note_new(state, "keeps the config of the nearest tuned key (watch=False)")
            return result
        if is_replay and (before is not None or not options.preserve):
            del result  # the function's outputs must not add to the memory of the next run
            return self._run_session(state, thunk, before or Snapshot(()))
        self._wants_session = True
        if is_replay:
            self._note_new(state, "is tuned by the next call: the preserve= state was not copied")
        return result

    def _run_settled(
        self,
        state: FunctionState,
        thunk: Callable[[], T],
        *,
        votes: bool,
        preserved: Sequence[Any] | None = None,
    ) -> tuple[T, bool, Snapshot | None]:
        """Run `thunk` with what is settled; return its result, whether some rank wants a session, a snapshot.

        `votes`: ask the peers. A rank that raises reports that instead, so that they do not wait for it.
        The strict mode has no vote, but reports NotTuned: peers may wait for this rank in a collective.
        `preserved`: what the snapshot of the state before the run is to hold; None: none is made.
        """
        dispatcher, function = state.dispatcher, state.function
        dispatcher.begin_run(tunes=False)
        dispatcher.to_tune.clear()
        if not (votes or (function.is_strict and not function.is_alone)):
            before = None if preserved is None else Snapshot(preserved)
            with INTERCEPTION.installed(dispatcher.runner, dispatcher.choose):
                return thunk(), bool(dispatcher.to_tune), before
        what, write_stuck = f"a call of {self._name}", functools.partial(diagnosis.write_stuck, self._note)
        try:
            before = None if preserved is None else Snapshot(preserved)
            with (
                function.group.running(Watch(what, function.timeout_s, self._options.on_stuck, write_stuck)),
                INTERCEPTION.installed(dispatcher.runner, dispatcher.choose),
            ):
                result = thunk()
            wants_session = bool(dispatcher.to_tune)
            vote = Vote(function.group.rank, function.facts({}), wants_session=wants_session)
        except BaseException as error:
            if votes or (isinstance(error, NotTuned) and not state.has_refused):
                state.has_refused |= not votes  # once: each time costs the peers an exchange
                function.group.fail(error)
            raise
        if not votes:
            return result, wants_session, before
        answer = function.group.exchange(vote.encode(), merge, function.timeout_s, what)
        return result, checked(decode(answer), Vote).wants_session, before

    def _note(self, text: str) -> None:
        rank = 0 if self.state is None else self.state.function.group.rank
        with SessionLog(self._log_dir, rank) as log:
            log.write(Note(rank=rank, text=text))

    def _note_new(self, state: FunctionState, what_happens: str) -> None:
        """Log, once each, the keys that are new and are not tuned by this call."""
        for name in sorted(state.dispatcher.to_tune - self._noted):
            self._noted.add(name)
            self._note(f"{state.registry.by_name[name].title} is new to {self._name} and {what_happens}")

    def _run_session(self, state: FunctionState, thunk: Callable[[], T], before: Snapshot | None = None) -> T:
        """Go on with the session, or open one. before: the call has run `thunk` once, from that state."""
        try:
            if self._session is not None:
                self._session.resume()
        finally:
            self._keep_if_over()
        session = self._session = self._session or self._new_session(state)
        try:
            session.open_once()
            INTERCEPTION.tuning = state.search.rules.tunes
            return session.online(thunk) if self._options.mode == "online" else session.replay(thunk, before)
        finally:
            INTERCEPTION.tuning = False
            self._keep_if_over()

    def _new_session(self, state: FunctionState) -> Session:
        tunes = state.function.tunes
        if tunes and not self._options.is_dist:
            diagnosis.warn_of_missing_is_dist(self._name)
        state.results.ignores_known = self._forgets and tunes
        self._wants_session = True
        return Session(state, self._log_dir)

    def _keep_if_over(self) -> None:
        """Keep what the session has found, if it is over."""
        session = self._session
        if session is not None and session.is_over:
            self._report, self._session = session.report(), None
            self._calls_in_vain = 0
            self._wants_session = session.wants_another
            self._forgets = self._forgets and (session.has_failed or not session.state.results.ignores_known)

    def _current_state(self, mode: str) -> FunctionState:
        """Return the state for the group as it is now; another group or mode starts anew."""
        options, known = self._options, self.state
        group = GROUPS.of(options.process_group()) if options.is_dist else GROUPS.single()
        if known is None or known.function.group is not group or known.function.mode != mode:
            try:
                source = identity.function_digest(self._function)
                known = FunctionState(TunedFunction(options, self._name, source, group, mode=mode))
            except BaseException as error:  # the peers wait for this rank to open a session
                group.fail(error)
                raise
            if self._session is not None:
                self._session.stop_compiling()
            self.state, self._session, self._wants_session = known, None, True
        return known
