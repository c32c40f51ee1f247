"""Where the seconds of a session go on this rank: compiling, runs of the function, exchanges."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class SecondsSpent:
    """Seconds of one rank. The rest of a session's time is the tuner's own, and the program's between calls.

    compiling_s: with loading. What a rank waits while its peers compile is in `exchanges_s`.
    runs_s: of the function, without what was compiled at launches in it.
    exchanges_s: with waiting for slower ranks.
    """

    compiling_s: float = 0.0
    runs_s: float = 0.0
    exchanges_s: float = 0.0


class TimeSpent:
    """Adds up what one session spends; any thread may compile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Begin anew, for another session."""
        with self._lock:
            self._compiling_s = self._runs_s = self._exchanges_s = 0.0

    @property
    def spent(self) -> SecondsSpent:
        with self._lock:
            return SecondsSpent(self._compiling_s, self._runs_s, self._exchanges_s)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Add the time of the block to that of compiling."""
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._compiling_s += time.monotonic() - began

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the block to that of runs, but for what is compiled in it."""
        began, compiled_s = time.monotonic(), self._compiling_s
        try:
            yield
        finally:
            with self._lock:
                self._runs_s += time.monotonic() - began - (self._compiling_s - compiled_s)

    def exchanged(self, seconds: float) -> None:
        """Add the time of an exchange."""
        with self._lock:
            self._exchanges_s += seconds
