"""A call of a tuned function: it goes on with a session, or runs with what is settled."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ..errors import NotTuned, RankMismatch
from ..logs.records import Note
from ..logs.writer import SessionLog
from ..options import Options
from ..ranks.group import GROUPS, RankGroup
from ..ranks.watchdog import Watch
from ..search.messages import Vote, checked, decode, merge
from ..triton_api import identity, interception
from ..triton_api.interception import INTERCEPTION, Interception
from . import diagnosis
from .function_state import FunctionSetup, FunctionState
from .report import TuningReport
from .session import Session
from .snapshot import Snapshot

T = TypeVar("T")

SELDOM = (
    "{} launches it too seldom to try its configs. Decorate the function that launches it, such as an "
    "evaluation, with @contextual_autotune: it is tuned in its first call (docs/training-scripts.md)."
)
# A key that is new in a settled call is tuned by that call, from the state before it, which is copied for it
# (random states alone: 0.1 ms). Keys come in sweeps: after so many calls without one, no copy is made.
CALLS_THAT_KEEP_STATE = 16


@dataclass(slots=True)
class SettledRun:
    """The outcome of a run without trials."""

    before: Snapshot | None = None  # the state before it
    wants_session: bool = False  # it has met a new key


class Calls:
    """The calls of one tuned function, one after another, and what they have found so far.

    function: its source text names the results that are not shared; None: steps have none.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        options: Options,
        name: str,
        log_dir: Path | None,
        interception: Interception = INTERCEPTION,
    ) -> None:
        self._interception = interception
        self._function, self._options, self._name, self._log_dir = function, options, name, log_dir
        self.state: FunctionState | None = None
        self._session: Session | None = None
        self._report: TuningReport | None = None
        self._wants_session = True
        self._ignores_known = False  # the results in memory and on disk, in the next session
        self.retunes = False  # the next call tunes anew, whatever memory and disk hold
        self._noted: set[str] = set()  # contexts that are logged as not tuned
        self._asking: set[str] = set()  # contexts that have asked for a session
        self._calls_without_new_keys = 0  # settled calls since one met a new key, or a session

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

    def call(self, mode: str, thunk: Callable[[], T]) -> T:
        """Make one call. `mode`: "tune", "cached" or "strict", as DIST_AUTOTUNE_MODE says now."""
        if self._options.mode == "online":
            with self.step(mode):
                return thunk()
        state = self._begin_call(mode)
        if interception.is_capturing():
            with self._quiet_run(state):
                return thunk()
        if not self.settled:
            with self._session_under_way(state) as session:
                return session.replay(thunk)
        with self._settled_run(state) as run:
            result = thunk()
        if not self._wants_session:
            return result
        if run.before is None and self._options.preserve:
            self._note_new(state, "is tuned by the next call: the preserve= state was not copied")
            return result
        del result  # the function's outputs must not add to the memory of the next run
        with self._session_under_way(state) as session:
            return session.replay(thunk, run.before or Snapshot(()))

    def step(self, mode: str) -> AbstractContextManager[object]:
        """Make the block one call of mode="online": a trial, or a run with what is settled."""
        state = self._begin_call(mode)
        if interception.is_capturing():
            return self._quiet_run(state)
        return self._settled_run(state) if self.settled else self._trial(state)

    def quiet_step(self, mode: str) -> AbstractContextManager[object]:
        """Make the block a run with known configs: no trial, no exchange."""
        return self._quiet_run(self._begin_call(mode))

    def close(self) -> None:
        """End the session under way, if there is one; its report stays."""
        if self._session is not None:
            self._session.close()
            self._report, self._session = self._session.report(), None

    def _begin_call(self, mode: str) -> FunctionState:
        if self.retunes:
            self.close()
            self._wants_session, self._ignores_known, self.retunes = True, True, False
        return self._current_state(mode)

    @contextlib.contextmanager
    def _settled_run(self, state: FunctionState, *, is_quiet: bool = False) -> Iterator[SettledRun]:
        """Run the block without trials; unless quiet, new keys in it ask for a session."""
        options, function, dispatcher, run = self._options, state.function, state.dispatcher, SettledRun()
        votes = function.tunes and options.watch and not (function.is_alone or is_quiet)
        may_tune = votes or (function.tunes and function.is_alone and not is_quiet)
        keeps = may_tune and options.mode == "replay" and self._calls_without_new_keys < CALLS_THAT_KEEP_STATE
        self._calls_without_new_keys += 1
        dispatcher.begin_run(tunes=False)
        dispatcher.to_tune.clear()
        if votes or (function.is_strict and not function.is_alone):
            with self._reporting_run(state, run, votes=votes, keeps=keeps):
                yield run
        else:
            run.before = Snapshot(options.preserve) if keeps else None
            with self._interception.installed(dispatcher.runner, dispatcher.choose):
                yield run
            run.wants_session = bool(dispatcher.to_tune)
        if run.wants_session and not is_quiet:
            self._calls_without_new_keys = 0
            self._wants_session = may_tune
            for name in dispatcher.to_tune if function.tunes else ():
                state.results.record_waiting(state.registry.by_name[name])
            if not may_tune:
                self._note_new(state, "keeps the config of the nearest tuned key (watch=False)")
            elif options.mode == "online":
                self._note_waiting(state)

    @contextlib.contextmanager
    def _reporting_run(
        self, state: FunctionState, run: SettledRun, *, votes: bool, keeps: bool
    ) -> Iterator[None]:
        """Run the block with settled configs, then learn whether some rank met a new key.

        A rank that raises reports that instead, so that its peers do not wait for its vote. The strict mode
        has no vote, but reports NotTuned: peers may wait for this rank in a collective.
        """
        function, dispatcher, what = state.function, state.dispatcher, f"a call of {self._name}"
        write_stuck = functools.partial(diagnosis.write_stuck, self._note)
        try:
            run.before = Snapshot(self._options.preserve) if keeps else None
            with (
                function.group.running(Watch(what, function.timeout_s, self._options.on_stuck, write_stuck)),
                self._interception.installed(dispatcher.runner, dispatcher.choose),
            ):
                yield
            run.wants_session = bool(dispatcher.to_tune)
            vote = Vote(function.group.rank, function.facts({}), wants_session=run.wants_session)
        except BaseException as error:
            if votes or (isinstance(error, NotTuned) and not state.has_refused):
                state.has_refused |= not votes  # once: each time costs the peers an exchange
                function.group.fail(error)
            raise
        if not votes:
            return
        answer = function.group.exchange(vote.encode(), merge, function.timeout_s, what)
        try:
            run.wants_session = checked(decode(answer), Vote).wants_session
        except RankMismatch as error:
            self._wants_session = error.starts_anew
            raise

    def _quiet_run(self, state: FunctionState) -> AbstractContextManager[object]:
        """Run the block without trials and exchanges, as in a capture."""
        if not self._ignores_known:
            state.results.looks_on_disk |= state.function.is_alone
        return self._settled_run(state, is_quiet=True)

    def _note(self, text: str) -> None:
        rank = 0 if self.state is None else self.state.function.group.rank
        with SessionLog(self._log_dir, rank) as log:
            log.write(Note(rank=rank, text=text))

    def _note_new(self, state: FunctionState, what_happens: str) -> None:
        """Log, once each, the keys that are new and are not tuned by this call."""
        for name in sorted(state.dispatcher.to_tune - self._noted):
            self._noted.add(name)
            self._note(f"{state.registry.by_name[name].title} is new to {self._name} and {what_happens}")

    def _note_waiting(self, state: FunctionState) -> None:
        """Say, once each, which keys ask again for a session: the last one has not launched them."""
        asking = state.dispatcher.to_tune
        for name in sorted(asking & self._asking - self._noted):
            self._noted.add(name)
            text = f"{state.registry.by_name[name].title} waits for launches: {SELDOM.format(self._name)}"
            self._note(text)
            logging.getLogger("dist_autotune").warning("%s", text)
        self._asking |= asking

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
            session.open_once()
            self._interception.tuning = state.search.rules.tunes
            yield session
        finally:
            self._interception.tuning = False
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
        state.results.ignores_known = self._ignores_known and tunes
        self._wants_session = True
        return Session(state, self._log_dir, self._interception)

    def _keep_if_over(self) -> None:
        """Keep the report of the session, if it is over."""
        session = self._session
        if session is not None and session.is_over:
            self._report, self._session = session.report(), None
            self._calls_without_new_keys = 0
            self._wants_session = session.wants_another
            has_retuned = session.state.results.ignores_known and not session.has_failed
            self._ignores_known = self._ignores_known and not has_retuned

    def _current_state(self, mode: str) -> FunctionState:
        """Return the state for the group as it is now; another group or mode starts anew."""
        options, known, group = self._options, self.state, self._current_group()
        if known is None or known.function.group is not group or known.function.mode != mode:
            try:
                source = "" if self._function is None else identity.function_digest(self._function)
                setup = FunctionSetup(options, self._name, source, group, mode=mode)
                known = FunctionState(setup, self._note)
            except BaseException as error:  # the peers wait for this rank to open a session
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
