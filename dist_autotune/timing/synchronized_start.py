"""Lets the ranks of one host begin a run at one moment.

A rank that begins a run early waits for its peers in the first kernel that needs them, and the sample holds
that wait. So each rank keeps its device busy until one moment, which all compute alike: the time when the
last rank sent its part of the exchange, plus the lag with which ranks have lately come to their runs.
Processes of one host read one monotonic clock; over several hosts there is no such moment.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from pathlib import Path

REMEMBERED = 5  # runs
MARGIN, MOST_MARGIN_MS = 1.25, 1.0  # of the longest lag of those; how much later than that it is at most
MOST_LAG_MS = 4.0  # of ranks that do nothing else between runs; nobody waits longer for a rank ...
MOST_FIT_LAG_MS = 60.0  # ... but for one that has to choose the run by a model
FIRST_FIT_LAG_NS = 20_000_000  # expected of the first such run


def clock_name() -> str:
    """Return a name that is equal in all processes that read this monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class SynchronizedStart:
    """The moment of the next run. Times are of `time.monotonic_ns`; no rank sleeps or waits here."""

    def __init__(self) -> None:
        self._lag_ns = 0  # how late this rank came to its last run
        self._sent_ns = 0  # when the last rank sent its part of the last exchange; 0: not known
        # Of the slowest rank in each run; apart, of runs that were chosen by a model.
        self._lags_of_runs_ns: deque[int] = deque(maxlen=REMEMBERED)
        self._lags_of_fits_ns = deque([FIRST_FIT_LAG_NS], maxlen=REMEMBERED)
        self._lags_ns = self._lags_of_runs_ns  # of the last run's kind

    def stamp(self) -> dict[str, int]:
        """Return the time, when this rank sends its part, and its lag, as a run's report names them."""
        return {"sent_ns": time.monotonic_ns(), "lag_ns": self._lag_ns}

    def apply_exchange(self, sent_ns: int, lag_ns: int) -> None:
        """Keep when the last rank sent its part, and the slowest rank's lag."""
        self._sent_ns = sent_ns
        if lag_ns:
            self._lags_ns.append(lag_ns)

    def lead_ms(self, filler_ms: float, most_ms: float = math.inf, *, follows_fit: bool = False) -> float:
        """Return how long to keep the device busy from now on; `filler_ms` covers this rank's host.

        It covers the slowest rank too, if that comes no later than usual; 0 on a rank that is much later than
        one that does nothing else between runs. most_ms: the longest. follows_fit: all ranks have chosen the
        run by a model, which takes them longer.
        """
        if not self._sent_ns:
            return filler_ms
        # Containers of one host may shift their clocks: then this is no common moment, but soon all the same.
        self._lag_ns = max(0, time.monotonic_ns() - self._sent_ns)
        self._lags_ns = self._lags_of_fits_ns if follows_fit else self._lags_of_runs_ns
        if not self._lags_ns:
            return filler_ms
        lag_ms, longest_ms = self._lag_ns * 1e-6, max(self._lags_ns) * 1e-6
        slack_ms = (most_ms - filler_ms) / 2  # for ranks that come later than usual; the other half: earlier
        if longest_ms <= (MOST_FIT_LAG_MS if follows_fit else MOST_LAG_MS) / MARGIN:
            usual_ms = min(MARGIN * longest_ms, longest_ms + slack_ms)
            return min(max(0.0, usual_ms + filler_ms - lag_ms), most_ms)
        # A program works between its calls. Once in a while it does more, which says nothing of other calls.
        usual_ms = sorted(self._lags_ns)[-2:][0] * 1e-6 + min(MOST_MARGIN_MS, slack_ms)
        return min(filler_ms + min(max(0.0, usual_ms - lag_ms), MOST_LAG_MS), most_ms)
