"""The turn of sessions: one call of a process has it, with the threads that work for that call."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pools
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from ..errors import TuningError

POLL_S = 0.05  # between two looks at the call that has the turn
STILL_S = 0.25  # a call that has not moved for so long may wait for a thread that it has started


@dataclass(frozen=True, eq=False)
class ActiveCall:
    """The call that has the turn."""

    name: str  # of its function
    owner: int  # its thread
    older: weakref.WeakSet[threading.Thread]  # threads from before it


class SessionTurn:
    """Who may run a session: the call that has the turn, and threads that work for it.

    A thread works for the call if the call waits for the thread, or for the future that the thread works on;
    or if the thread was started since the call began and the call does not move. Other waits cannot be seen:
    an older thread gives up when the call has not moved for `timeout_s`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.call: ActiveCall | None = None  # set by `acquire`; None again before the lock is released
        self._lent = threading.local()  # `call`: the one that waits for this thread

    @property
    def is_mine(self) -> bool:
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    def belongs(self) -> bool:
        """Return whether this thread works for the call that has the turn, and has not taken it."""
        call = self.call
        return call is not None and (
            getattr(self._lent, "call", None) is call
            or torch._C._current_graph_task_id() != -1  # autograd runs backward on threads of its own
        )

    def works_for_call(self) -> bool:
        """Return whether this thread has the turn, belongs to the call, or was started since it began."""
        return self.is_mine or self.belongs() or self._is_younger()

    def acquire(self, name: str, timeout_s: Callable[[], float]) -> bool:
        """Wait for the turn and take it; False: the active call waits for this thread.

        Raises TuningError when the call that has it has not moved for `timeout_s`.
        """
        if not self.lock.acquire(blocking=False):
            began, place = time.monotonic(), None
            while not self.lock.acquire(timeout=POLL_S):
                if (call := self.call) is None:
                    continue
                if self.belongs() or _is_awaited(call):
                    return False
                now = call, _position(call.owner)
                if now != place:
                    began, place = time.monotonic(), now
                    continue
                still_s = time.monotonic() - began
                if still_s >= STILL_S and self._is_younger():
                    return False
                if still_s >= timeout_s():
                    raise TuningError(_given_up(name, call, still_s))
        self.call = ActiveCall(name, threading.get_ident(), weakref.WeakSet(threading.enumerate()))
        return True

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Make the block a part of the active call, which waits for this thread."""
        before = getattr(self._lent, "call", None)
        self._lent.call = self.call
        try:
            yield
        finally:
            self._lent.call = before

    def _is_younger(self) -> bool:
        call = self.call
        return call is not None and threading.current_thread() not in call.older


def _is_awaited(call: ActiveCall) -> bool:
    """Return whether a thread of the call waits for this one, or for the future that it works on."""
    me = threading.current_thread()
    of_call = {call.owner, *(t.ident for t in threading.enumerate() if t not in call.older and t is not me)}
    mine = {id(me), *(id(future) for future in _worked_on(sys._getframe()))}
    frames = [frame for ident, frame in sys._current_frames().items() if ident in of_call]
    return any(id(awaited) in mine for frame in frames for awaited in _awaited(frame))


def _given_up(name: str, call: ActiveCall, waited_s: float) -> str:
    frame = sys._current_frames().get(call.owner)
    at = "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno}"
    thread = threading.current_thread().name
    return (
        f"{name} waited {waited_s:.0f} s on thread {thread} for a call of {call.name}, which has not "
        f"moved in that time{at}. If that call waits for this thread, start the thread in it, or wait by "
        f"join() or Future.result(): then {name} joins its session."
    )


def _position(ident: int) -> tuple[object, ...]:
    """Return where a thread is and how long it has run, which stay the same while it does not move."""
    frame = sys._current_frames().get(ident)
    known = [thread.native_id for thread in threading.enumerate() if thread.ident == ident]
    if frame is None or not known:
        return ()
    try:
        ran = Path(f"/proc/self/task/{known[0]}/schedstat").read_text()
    except OSError:  # not of this system, or the thread has ended
        ran = ""
    return id(frame), frame.f_lasti, ran


def _awaited(frame: FrameType) -> Iterator[object]:
    """Yield the threads and futures that the innermost waiting call of a stack waits for."""
    for call, _ in traceback.walk_stack(frame):
        code = call.f_code
        if code in (threading.Thread.join.__code__, concurrent.futures.Future.result.__code__):
            yield call.f_locals.get("self")
        elif code in (concurrent.futures.wait.__code__, concurrent.futures.as_completed.__code__):
            fs = call.f_locals.get("fs")
            yield from tuple(fs) if isinstance(fs, (set, list, tuple)) else ()  # a generator is the user's


def _worked_on(frame: FrameType) -> Iterator[object]:
    """Yield the futures of the pools' work that a stack is in."""
    run = getattr(getattr(pools, "_WorkItem", None), "run", None)  # no public name of it
    for call, _ in traceback.walk_stack(frame):
        if call.f_code is getattr(run, "__code__", None):
            yield getattr(call.f_locals.get("self"), "future", None)
