"""What a tuned function and a step tuner have in common."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .. import settings
from ..options import Options
from ..triton_api.interception import INTERCEPTION
from .report import TuningReport

if TYPE_CHECKING:
    from .calls import Calls


class BaseTuner:
    """Serialises the sessions of one function or loop, and keeps their report.

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
        """Whether nothing is left to try: the moment to capture a CUDA graph. With the mode off, always."""
        return settings.run_mode() == "off" or (self._calls is not None and self._calls.settled)

    def retune(self) -> None:
        """Tune anew at the next call, whatever memory and disk hold.

        Called on some ranks only, it is taken up by all of them a few calls later, if they vote (`watch`).
        """
        self._made_calls().retune()

    def _made_calls(self) -> Calls:
        if self._calls is None:
            from .calls import Calls  # imports all that a session needs: only for a call

            self._calls = Calls(self._function, self.options, self._name, self._log_dir, self._turn)
        return self._calls

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Take the turn for a session in the block; yield False where that is a part of another call."""
        turn = INTERCEPTION.turn
        if turn.belongs():
            yield False
        elif turn.is_mine:
            yield True
        else:
            lock, has_turn = turn.lock, False
            try:
                has_turn = turn.acquire(self._name, self.options.resolved_timeout_s)
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
    """End all that the call under way has begun, also if a Ctrl-C interrupts this."""
    try:
        INTERCEPTION.restore()
        INTERCEPTION.turn.end()
    except BaseException:
        INTERCEPTION.restore()
        INTERCEPTION.turn.end()
        raise
