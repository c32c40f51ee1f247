"""What a tuned function and a step tuner have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import settings
from ..options import Options
from .report import TuningReport

if TYPE_CHECKING:
    from .calls import Calls

_FIRST_CALL = threading.Lock()  # several threads may make it at once


class BaseTuner:
    """The calls of one function or loop, made when there is the first one, and their report.

    function: its source text names the results that are not shared; None: there is none.
    """

    def __init__(self, function: Callable[..., Any] | None, options: Options, name: str) -> None:
        self.options = options
        self._function, self._name, self._log_dir = function, name, options.resolved_log_dir()
        self._calls: Calls | None = None

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

            made = Calls(self._function, self.options, self._name, self._log_dir)
            with _FIRST_CALL:
                self._calls = self._calls or made
        return self._calls
