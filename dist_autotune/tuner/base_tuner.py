"""What a tuned function and a step tuner have in common."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..options import Options
from ..triton_api.interception import INTERCEPTION
from .report import TuningReport

if TYPE_CHECKING:
    from .calls import Calls


class BaseTuner:
    """Takes its turn for each call, and keeps what its calls have found.

    function: its source text names the results that are not shared; None: there is none.
    """

    def __init__(self, function: Callable[..., Any] | None, options: Options, name: str) -> None:
        self.options = options
        self._function, self._name, self._log_dir = function, name, options.resolved_log_dir()
        self._calls: Calls | None = None  # made for the first call

    @property
    def report(self) -> TuningReport | None:
        """What the last session found, or has found so far; None before the first."""
        return None if self._calls is None else self._calls.report

    @property
    def settled(self) -> bool:
        """Whether nothing is left to try: the moment to capture a CUDA graph."""
        return self._calls is not None and self._calls.settled

    def retune(self) -> None:
        """Tune anew at the next call, whatever memory and disk hold. Call it on all ranks."""
        self._made_calls().retunes = True

    def _made_calls(self) -> Calls:
        if self._calls is None:
            from .calls import Calls  # imports all that a session needs: only for a call

            self._calls = Calls(self._function, self.options, self._name, self._log_dir)
        return self._calls

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Take the turn for the block; yield False where the block is a part of the call that has it."""
        turn = INTERCEPTION.turn
        if INTERCEPTION.active and (turn.belongs() or turn.is_mine):
            yield False
        elif turn.is_mine:
            yield True
        else:
            lock, has_turn = turn.lock, False
            try:
                timeout_s = self.options.resolved_timeout_s
                has_turn = turn.acquire(self._name, timeout_s, lambda: INTERCEPTION.active)
                if has_turn:
                    INTERCEPTION.restore()  # a second Ctrl-C may have left parts of the last call
                    yield True
                else:
                    with turn.lent():
                        yield False
            finally:
                try:
                    if has_turn or turn.is_mine:
                        _leave()
                finally:
                    # With `has_turn` nothing is called before the lock is free, so no Ctrl-C comes in
                    # between; without it, one came when the lock had just been taken.
                    if has_turn or turn.is_mine:
                        try:
                            lock.release()
                        except RuntimeError:  # a step that another thread has opened: only that one could
                            turn.lock = threading.RLock()  # threads that wait look for it at each poll


def _leave() -> None:
    """Restore all that the call under way has replaced, also if a Ctrl-C interrupts this."""
    try:
        INTERCEPTION.restore()
        INTERCEPTION.turn.end()
    except BaseException:
        INTERCEPTION.restore()
        INTERCEPTION.turn.end()
        raise
