"""The turn of sessions: one call of a process has it, and the others wait for a bounded time."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, ClassVar

from .interception import INTERCEPTION, SESSION

POLL_S = 0.05  # between two looks at the run under way
WAIT_S = 2.0  # for one run of another session to end: it may wait for the thread that waits here


@contextlib.contextmanager
def session_turn(bystander: Any, take: Callable[[ProcessTurn], bool] | None = None) -> Iterator[bool]:
    """Take the turn for a session in the block; yield False where the block goes on without a session.

    Then the block's launches are those of a thread without a call, so it does not wait for the session that
    has the turn.

    bystander: launches for this thread until a run of the session begins, and between runs. take: takes the
    turn where ranks take theirs together.
    """
    calls, thread, has_turn = INTERCEPTION.calls, get_ident(), False
    if _is_here():
        yield True
        return
    calls[thread] = bystander
    try:
        wanted = ProcessTurn()
        has_turn = wanted.acquire() if take is None else take(wanted)
        if has_turn:
            INTERCEPTION.restore()
        else:
            calls.pop(thread, None)
        yield has_turn
    finally:
        try:
            if has_turn or _is_here():
                INTERCEPTION.restore()
        finally:
            # No function is called before the entry is gone, so no Ctrl-C comes in between. The lock may have
            # been taken without `has_turn`, when one came.
            if thread in calls:
                del calls[thread]
            if has_turn or _is_here():
                try:
                    INTERCEPTION.session_lock.release()
                except RuntimeError:  # of a step that another thread has opened, or in a forked child
                    INTERCEPTION.session_lock = threading.RLock()  # who waits looks for it at each poll


@contextlib.contextmanager
def one_at_a_time(inside: dict[str, object]) -> Iterator[bool | None]:
    """Let one thread at a time into the block; yield whether it has waited, and None where it is not let in.

    A wait ends as one for the turn does. inside: has the thread that is in, for all that wait for it.
    """
    mine, turn, has_waited = object(), ProcessTurn(), False
    try:
        while inside.setdefault("thread", mine) is not mine:  # no lock: a Ctrl-C might leave it taken
            if turn.is_overdue():
                yield None
                return
            has_waited = True
            time.sleep(POLL_S)
        yield has_waited
    finally:
        if inside.get("thread") is mine:
            del inside["thread"]


class ProcessTurn:
    """The turn of sessions in this process, for one call that waits for it."""

    _in_vain: ClassVar[Callable[[], Any]] = staticmethod(lambda: None)  # whose run a call has waited for so

    def __init__(self) -> None:
        self._run: Any = None  # of another session, under way
        self._since = time.monotonic()

    def acquire(self, waiting: Callable[[], None] = lambda: None) -> bool:
        """Wait for the turn and take it; return False where the wait is over without it.

        waiting: called at each look.
        """
        while not INTERCEPTION.session_lock.acquire(timeout=POLL_S):
            if self.is_overdue():
                return False
            waiting()
        return True

    def try_acquire(self) -> bool:
        return bool(INTERCEPTION.session_lock.acquire(blocking=False))

    def is_overdue(self) -> bool:
        """Return whether a run of another session has lasted for `WAIT_S`, compiling apart.

        Runs of a function that a call has waited for so long are not waited for again: there may be many.
        """
        under_way: Any = INTERCEPTION.calls.get(SESSION)
        if under_way is None or under_way is not self._run or under_way.is_compiling:
            self._run, self._since = under_way, time.monotonic()
        waited_s, launcher = time.monotonic() - self._since, getattr(under_way, "launcher", None)
        if waited_s > WAIT_S:
            ProcessTurn._in_vain = weakref.ref(launcher)
        return waited_s > (POLL_S if launcher is ProcessTurn._in_vain() else WAIT_S)

    def release(self) -> None:
        """Give the turn back, if this thread has it."""
        if _is_here():
            INTERCEPTION.session_lock.release()


def _is_here() -> bool:
    """Return whether this thread has the turn."""
    return INTERCEPTION.session_lock._is_owned()  # type: ignore[attr-defined, no-any-return]
