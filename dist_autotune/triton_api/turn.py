"""The turn of sessions, taken for a block and given back whatever ends the block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from .interception import INTERCEPTION


@contextlib.contextmanager
def session_turn(name: str, timeout_s: Callable[[], float]) -> Iterator[bool]:
    """Take the turn for a session in the block; yield False where the block is a part of another call.

    name: of the function, for messages. timeout_s: see `SessionTurn.acquire`.
    """
    turn = INTERCEPTION.turn
    if turn.belongs():
        yield False
    elif turn.is_mine:
        yield True
    else:
        lock, has_turn = turn.lock, False
        try:
            has_turn = turn.acquire(name, timeout_s)
            if has_turn:
                INTERCEPTION.restore()
                yield True
            else:
                with turn.lent():
                    yield False
        finally:
            try:
                if has_turn or turn.is_mine:
                    INTERCEPTION.restore()
            finally:
                # With `has_turn` nothing is called before the lock is free, so no Ctrl-C comes in
                # between; without it, one came when the lock had just been taken.
                if has_turn or turn.is_mine:
                    turn.call = None
                    try:
                        lock.release()
                    except RuntimeError:  # a step that another thread has opened: only that one could
                        turn.lock = threading.RLock()  # threads that wait look for it at each poll
