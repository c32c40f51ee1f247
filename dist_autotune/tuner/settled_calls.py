"""The settled calls of one tuned function. They try no candidate and wait for no peer."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from ..errors import NotTuned
from ..formatting import described
from ..launch.fast_path import CallUnderWay
from ..launch.rank_context import RankContext
from ..options import Options
from ..ranks.watchdog import Watch
from . import diagnosis
from .function_state import FunctionState

SELDOM = (
    "{} launches it too seldom to try its configs. Decorate the function that launches it, such as an "
    "evaluation, with @contextual_autotune: it is tuned in its first call (docs/training-scripts.md)."
)


class SettledCalls:
    """Casts this rank's ballots around settled calls, and logs once which keys they leave untuned.

    note: writes a line of the log.
    """

    def __init__(self, name: str, options: Options, note: Callable[[str], None]) -> None:
        self._name, self._options, self._note = name, options, note
        self._noted: set[str] = set()  # contexts that are logged as untuned
        self._asking: set[str] = set()  # contexts that have asked for a session

    def begin(self, state: FunctionState, *, asks: bool) -> bool:
        """Begin a call of several ranks; return whether all open a session in it. asks: this one wants to."""
        if (ballot := state.ballot) is None:
            return False
        if ballot.watch is None:
            ballot.watch = self._watch(state)
        return ballot.begin(asks=asks)

    def has_missed_opening(self, state: FunctionState) -> bool:
        """Return whether this rank has gone on without a session that it has asked for."""
        return (ballot := state.ballot) is not None and ballot.has_missed_opening

    def end(self, state: FunctionState, call: CallUnderWay, *, asks_nobody: bool) -> bool:
        """End a call; return whether a session is opened now for its new keys, by all ranks alike."""
        function, new = state.function, call.new or ()
        opens = may_tune = self._may_tune(state, asks_nobody=asks_nobody)
        if not new and (function.is_alone or not may_tune):
            return False
        has_new_key = bool(new) and not asks_nobody
        if may_tune and (ballot := state.ballot) is not None:
            opens = ballot.end(has_new_key=has_new_key)
        if not (has_new_key or opens):
            return False
        if not may_tune:
            self._note_untuned(new)
        elif self._options.mode == "online":
            self._note_waiting(new)
        return opens

    def end_failed(
        self, state: FunctionState, call: CallUnderWay, error: BaseException, *, asks_nobody: bool
    ) -> None:
        """End a call that raised. The peers hear of NotTuned, once: they may wait in a collective."""
        function = state.function
        if function.is_alone:
            return
        if self._may_tune(state, asks_nobody=asks_nobody) and (ballot := state.ballot) is not None:
            ballot.report(described(error)[:2000])
            ballot.end(has_new_key=bool(call.new), waits=False)
        if isinstance(error, NotTuned) and not state.has_refused:
            state.has_refused = True  # each time costs the peers an exchange
            function.group.fail(error)

    def watched(self, state: FunctionState) -> AbstractContextManager[None]:
        """Watch a call in the strict mode, where a peer that refuses a launch fails its next exchange."""
        function = state.function
        if function.is_alone or not function.is_strict:
            return contextlib.nullcontext()
        return function.group.running(self._watch(state))

    def _watch(self, state: FunctionState) -> Watch:
        report = functools.partial(diagnosis.write_stuck, self._note)
        return Watch(f"a call of {self._name}", state.function.timeout_s, self._options.on_stuck, report)

    def _may_tune(self, state: FunctionState, *, asks_nobody: bool) -> bool:
        """Return whether new keys of a call may open a session."""
        function = state.function
        return function.tunes and (function.is_alone or self._options.watch) and not asks_nobody

    def _note_untuned(self, new: Iterable[RankContext]) -> None:
        """Log, once each, the keys that are new and that no call tunes."""
        titles = {context.name: context.title for context in new}
        for name in sorted(titles.keys() - self._noted):
            self._noted.add(name)
            text = "keeps the config of the nearest tuned key (watch=False)"
            self._note(f"{titles[name]} is new to {self._name} and {text}")

    def _note_waiting(self, new: Iterable[RankContext]) -> None:
        """Warn, once each, of keys that ask for a session again: the last one has not launched them."""
        asking = {context.name: context.title for context in new if context.claim is None}
        for name in sorted(asking.keys() & self._asking - self._noted):
            self._noted.add(name)
            self._note(text := f"{asking[name]} waits for launches: {SELDOM.format(self._name)}")
            logging.getLogger("dist_autotune").warning("%s", text)
        self._asking |= asking.keys()
