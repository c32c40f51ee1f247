"""Where the seconds of a session go on this rank: compiling, runs of the function, exchanges."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SecondsSpent:
    """Seconds of one rank. The rest of a session is the tuner's own, and the program's between calls."""

    compiling_s: float = 0.0  # with loading; waiting for a peer that compiles is in `exchanges_s`
    runs_s: float = 0.0  # of the function, without compilations in it
    exchanges_s: float = 0.0  # with waiting for slower ranks


class TimeSpent:
    """Adds up the seconds of one session; any thread may compile."""

    def __init__(self) -> None:
        self.seconds = SecondsSpent()
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds = replace(self.seconds, **{name: getattr(self.seconds, name) + seconds})

    @contextlib.contextmanager
    def adding(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`, without the time of compilations in it."""
        began, compiled_s = time.monotonic(), self.seconds.compiling_s
        try:
            yield
        finally:
            self.add(name, time.monotonic() - began - (self.seconds.compiling_s - compiled_s))
