"""Whose turn it is: one call of a tuned function is active in a process, with the threads that it starts."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pools
from types import FrameType
from typing import Any, TypeAlias

import torch

from ..errors import TuningError

_POLL_S = 0.05  # between two looks at the call that has the turn
_MARK = "_dist_autotune_call"  # attribute of a thread: the call that it belongs to

Start: TypeAlias = Callable[..., None]


class ActiveCall:
    """The turn of calls, and the threads of the call that has it.

    A thread belongs to a call that has started it, directly or through others of its threads; or that waits
    for it or its future. Other waits cannot be seen: an older thread gives up when the call does not move.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._call: object | None = None  # the one that has the turn
        self._name = ""  # of its function
        self._owner = 0  # its thread
        self._start: tuple[Start, Start] | None = None  # `Thread.start` of the call, and the one before

    @property
    def is_mine(self) -> bool:
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    def belongs(self) -> bool:
        """Return whether this thread works for the call that has the turn, and has not taken it."""
        call = self._call
        return call is not None and (
            getattr(threading.current_thread(), _MARK, None) is call
            or torch._C._current_graph_task_id() != -1  # autograd runs backward on threads of its own
        )

    def works_for_call(self) -> bool:
        return self.is_mine or self.belongs()

    def acquire(self, name: str, timeout_s: Callable[[], float], is_active: Callable[[], bool]) -> bool:
        """Wait for the turn and take it; False: the active call waits for this thread.

        Raises TuningError when the call that has it has not moved for `timeout_s`.
        """
        if not self.lock.acquire(blocking=False):
            began, place = time.monotonic(), None
            while not self.lock.acquire(timeout=_POLL_S):
                if is_active() and (self.belongs() or self._is_awaited()):
                    return False
                now = self._whereabouts()
                if now != place:
                    began, place = time.monotonic(), now
                elif time.monotonic() - began >= timeout_s():
                    raise TuningError(self._given_up(name, time.monotonic() - began))
        if self._start is not None:  # a second Ctrl-C has left it so
            self.end()
        self._call, self._name, self._owner = object(), name, threading.get_ident()
        before, call, owner = threading.Thread.start, self._call, self._owner

        def start(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
            """Mark threads that this call's threads start as its own."""
            if self._call is call and (threading.get_ident() == owner or self.belongs()):
                setattr(thread, _MARK, call)
            before(thread, *args, **kwargs)

        self._start = start, before
        threading.Thread.start = start  # type: ignore[method-assign,assignment]
        return True

    def end(self) -> None:
        """End the call; whoever took the lock releases it."""
        if self._start is not None:
            own, before = self._start
            if vars(threading.Thread)["start"] is own:  # else others have wrapped it; it does nothing now
                threading.Thread.start = before  # type: ignore[method-assign]
        self._start, self._call, self._owner = None, None, 0

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Make the block a part of the active call, which waits for this thread."""
        thread, before = threading.current_thread(), getattr(threading.current_thread(), _MARK, None)
        setattr(thread, _MARK, self._call)
        try:
            yield
        finally:
            setattr(thread, _MARK, before)

    def _is_awaited(self) -> bool:
        """Return whether a thread of the call waits for this one, or for the future that it works on."""
        me, call = threading.current_thread(), self._call
        of_call = {t.ident for t in threading.enumerate() if getattr(t, _MARK, None) is call} | {self._owner}
        mine = {id(me), *(id(future) for future in _worked_on(sys._getframe()))}
        frames = [frame for ident, frame in sys._current_frames().items() if ident in of_call]
        return any(id(awaited) in mine for frame in frames for awaited in _awaited(frame))

    def _whereabouts(self) -> tuple[object, ...]:
        """Return where the call is: equal as long as it does not move."""
        frame = sys._current_frames().get(self._owner)
        return (self._call,) if frame is None else (self._call, id(frame), frame.f_lasti)

    def _given_up(self, name: str, waited_s: float) -> str:
        frame = sys._current_frames().get(self._owner)
        at = "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno}"
        thread = threading.current_thread().name
        return (
            f"{name} waited {waited_s:.0f} s on thread {thread} for a call of {self._name}, which has not "
            f"moved in that time{at}. If that call waits for this thread, start the thread in it, or wait by "
            f"join() or Future.result(): then {name} joins its session."
        )


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
