"""The settled calls of one tuned function: they try nothing, and ask peers where something is new."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any

from ..errors import NotRepeatable, NotTuned, PutAside
from ..formatting import described
from ..launch.fast_path import INCUMBENTS, CallUnderWay
from ..launch.rank_context import RankContext
from ..options import Options
from ..ranks.questions import Answer, CallCount
from ..ranks.watchdog import Watch
from ..repeats.arguments import Arguments
from ..triton_api.interception import INTERCEPTION
from . import diagnosis
from .function_state import FunctionState
from .session_exchanges import MOST_ASIDES

SELDOM = (
    "{} launches it too seldom to try its configs. Decorate the function that launches it, such as an "
    "evaluation, with @contextual_autotune: it is tuned in its first call (docs/training-scripts.md)."
)
ATTEMPTS = 3  # calls that ask about a key, and questions in a row without an answer that end the asking


class SettledCalls:
    """Asks the peers about new keys of settled calls, and keeps why keys stay untuned.

    note: writes a line of the log.
    """

    def __init__(self, name: str, options: Options, note: Callable[[str], None]) -> None:
        self._name, self._options, self._note = name, options, note
        self._untuned: dict[str, tuple[RankContext, str]] = {}  # by name, with reasons
        self._asked: collections.Counter[str] = collections.Counter()  # contexts: in how many calls
        self._stopped = ""  # why no key asks for a session
        self._unanswered = 0  # questions in a row that some rank gave no answer to
        self._has_unshared = False  # results that no session has shared: this rank asks before its next call
        self._told_of = ""  # the session after which stderr has a line
        self._met: collections.Counter[str] = collections.Counter()  # online: in how many settled calls
        self._asides = 0  # openings in a row to which peers have not come

    @property
    def untuned(self) -> tuple[tuple[str, Any, str], ...]:
        """(kernel, key, reason) of each context that was launched and stays untuned."""
        left = [(context, reason) for context, reason in self._untuned.values() if context.tuned is None]
        return tuple((each.identity.source.short_name, each.identity.key, reason) for each, reason in left)

    def leave_untuned(self, left: Iterable[RankContext], reason: str, *, stops: bool = False) -> None:
        """Keep why keys stay untuned, and log it once each.

        stops: all new ones stay so, too, until a session is opened: `retune()` does.
        """
        self._stopped = reason if stops else self._stopped
        for context in sorted(left, key=lambda each: each.title):
            if context.name not in self._untuned and context.tuned is None:
                self._note(f"{context.title} is new to {self._name} and keeps its config: {reason}")
            self._untuned[context.name] = context, reason

    def drop_unrepeatable(self, call: CallUnderWay, thunk: Callable[[], Any]) -> None:
        """Leave new keys of a call untuned where a further run would not find its arguments."""
        if call.new is None or self._options.mode != "replay":
            return
        try:
            Arguments(thunk)
        except NotRepeatable:
            self.leave_untuned(call.new, "the call was given an iterator, which its run has used")
            call.new = None

    def begin_session(self) -> None:
        """Ask anew: a session is opened."""
        self._stopped = ""
        self._untuned.clear()
        self._asked.clear()
        self._unanswered, self._has_unshared, self._asides = 0, False, 0

    def give_up_opening(self, state: FunctionState, error: PutAside) -> bool:
        """Note that peers have not come to open a session; return whether none is to be opened."""
        self._asides += 1
        if self._asides == 1:
            diagnosis.write_stuck(self._note, f"{self._name}: {error}. The next call goes on.")
        if self._asides < MOST_ASIDES:
            return False
        self._asides = 0
        text = f"{error}, {MOST_ASIDES} times in a row"
        diagnosis.write_stuck(
            self._note, f"{self._name}: {text}. No session is opened; retune() asks for one."
        )
        self.leave_untuned(state.registry.untuned(), text)
        return True

    def begin(self, state: FunctionState, *, retunes: bool) -> bool:
        """Begin a call of several ranks; return whether all open a session in it. retunes: this one is to.

        A Ctrl-C while it asks is raised: the call is not made, and the next one asks again.
        """
        if (count := state.call_count) is None:
            return False
        asks = retunes or count.is_called or (self._has_unshared and self.is_heard)
        call = count.begin(asks=asks)
        if not asks:
            return False
        try:
            answer = count.ask(call, begins=True)
        except BaseException:
            count.begun -= 1
            count.end()
            count.is_called = True  # the next call asks the same: peers may have opened a session
            raise
        self._keep_answer(count, answer, "tuning anew waits")
        return answer.opens

    @property
    def is_heard(self) -> bool:
        """Whether the peers answer questions."""
        return self._unanswered < ATTEMPTS

    def end(self, state: FunctionState, call: CallUnderWay, *, asks_nobody: bool) -> bool:
        """End a call; return whether a session is opened now for its new keys, by all ranks alike."""
        may_tune = self._may_tune(state, asks_nobody=asks_nobody)
        count = state.call_count if may_tune else None
        if (new := call.new) is None:  # as in most calls
            if count is not None:
                count.end()
            return False
        due = [each for each in new if not may_tune or self._is_due(each)]
        unasked = (each for each in due if each.tuned is None and self._asked[each.name] < ATTEMPTS)
        asking = list(unasked) if self.is_heard and not self._stopped else []
        number = 0
        if count is not None:
            # 0: the call was begun before the session of another thread.
            number = count.under_way.get(get_ident(), 0)
            if asking and number:
                count.asks[number, False] = None
            count.end()
        if asks_nobody:
            return False
        if self._stopped or not may_tune:
            why = "watch=False" if state.function.tunes else f"DIST_AUTOTUNE_MODE={state.function.mode}"
            self.leave_untuned(new, self._stopped or why)
            return False
        if count is None:
            return state.function.is_alone and bool(due)
        self._has_unshared = any(each.tuned is not None for each in new)
        return bool(asking and number) and self._ask(state, count, number, asking)

    def _ask(
        self, state: FunctionState, count: CallCount, number: int, asking: Collection[RankContext]
    ) -> bool:
        with INTERCEPTION.standing_by(INCUMBENTS):
            answer = count.ask(number)
        self._asked.update(context.name for context in asking)
        if not answer.opens:
            self.leave_untuned(asking, answer.reason)
        titles = ", ".join(sorted(context.title for context in asking))
        self._keep_answer(count, answer, f"{titles} keeps its config")
        # Online the next call of any thread opens the session, which may have been before this answer.
        has_opened = self._options.mode == "online" and count.session != state.orders.session
        return answer.opens and not has_opened

    def end_failed(self, state: FunctionState, error: BaseException, *, asks_nobody: bool) -> None:
        """End a call that raised, which counts as a call. Peers hear of it: they may wait in a collective."""
        function = state.function
        if function.is_alone:
            return
        if self._may_tune(state, asks_nobody=asks_nobody) and (count := state.call_count) is not None:
            count.tell(described(error)[:2000])
            count.end()
        if isinstance(error, NotTuned) and not state.has_refused:
            state.has_refused = True  # each time costs the peers an exchange
            function.group.fail(error)

    @contextlib.contextmanager
    def under_way(
        self, state: FunctionState, call: CallUnderWay, place: str | int, *, asks_nobody: bool
    ) -> Iterator[None]:
        """Make the block a settled call, at its place among those of the process."""
        calls = INTERCEPTION.calls
        calls[place] = call
        try:
            with self.watched(state):
                yield
        except BaseException as error:
            self.end_failed(state, error, asks_nobody=asks_nobody)
            raise
        finally:
            if place in calls and calls[place] is call:  # not in a child that was forked in the call
                del calls[place]

    def watched(self, state: FunctionState) -> AbstractContextManager[None]:
        """Watch a call in the strict mode, where a peer that refuses a launch fails its next exchange."""
        function = state.function
        if function.is_alone or not function.is_strict:
            return contextlib.nullcontext()
        return function.group.running(self.watch(state))

    def watch(self, state: FunctionState) -> Watch:
        report = functools.partial(diagnosis.write_stuck, self._note)
        return Watch(f"a call of {self._name}", state.function.timeout_s, self._options.on_stuck, report)

    def _may_tune(self, state: FunctionState, *, asks_nobody: bool) -> bool:
        """Return whether new keys of a call may open a session."""
        function = state.function
        return function.tunes and (function.is_alone or self._options.watch) and not asks_nobody

    def _keep_answer(self, count: CallCount, answer: Answer, refused: str) -> None:
        """Keep whether peers answer. Say once after a session, on stderr, what a refusal means, and why."""
        self._unanswered = self._unanswered + 1 if answer.is_late else 0
        if not answer.opens and self._told_of != count.session:
            self._told_of = count.session
            calls = ", ".join(f"rank {rank}: {calls}" for rank, calls in sorted(answer.calls.items()))
            text = f"{refused}: {answer.reason}"
            counted = f". Calls since the last session: {calls}" if calls else ""  # lost with the store
            diagnosis.write_stuck(self._note, f"rank {count.rank}: {self._name}: {text}{counted}")

    def _is_due(self, context: RankContext) -> bool:
        """Return whether a key that is met here opens a session: online, one that waits does so ever less."""
        if self._options.mode != "online" or context.claim is not None or context.tuned is not None:
            return True
        self._met[context.name] += 1
        if self._met[context.name] == 2 and not self._stopped:  # the first session did not launch it
            self._note(text := f"{context.title} waits for launches: {SELDOM.format(self._name)}")
            logging.getLogger("dist_autotune").warning("%s", text)
        return self._met[context.name].bit_count() == 1  # 1, 2, 4, 8, ...
