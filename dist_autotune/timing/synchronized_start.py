"""When the ranks of one host begin a run together.

After an exchange the ranks go on at different times: one has its answer sooner, another writes its log
longer. A rank that begins a run before its peers waits for them in the first kernel or copy that needs them,
and that wait is in what is timed, of which the slowest rank's counts.
So the device of each is kept busy until one moment, which all ranks compute from what they have agreed on:
when the last of them told its part of the exchange, and how much later than that the last of them has come
to its run lately. Processes of one host read one monotonic clock; over several hosts there is no such moment.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from ..search.messages import RunReport

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
REMEMBERED = 5  # runs
MARGIN = 1.25  # of the longest lag of those
MOST_LAG_MS = 4.0  # a rank that is later than that begins late


def clock_name() -> str:
    """Return what is the same in all processes that read this monotonic clock."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


class SynchronizedStart:
    """The moment of the next run. Times are of `time.monotonic_ns`; no rank sleeps or waits here."""

    def __init__(self) -> None:
        self._lag_ns = 0  # of this rank in the run under way or the last one: how late it has come to it
        self._told_ns = 0  # when the last rank told its part of the last exchange; 0: not known
        self._lags_ns: deque[int] = deque(maxlen=REMEMBERED)  # of the slowest rank in each run

    def told(self, report: RunReport) -> RunReport:
        """Return what this rank tells now, at the end of a run."""
        return replace(report, told_ns=time.monotonic_ns(), lag_ns=self._lag_ns)

    def take(self, merged: RunReport) -> None:
        """Take in what all ranks told at an exchange."""
        self._told_ns = merged.told_ns
        if merged.lag_ns:
            self._lags_ns.append(merged.lag_ns)

    def lead_ms(self, filler_ms: float) -> float:
        """Return how long from now the device is to be busy, where a filler of `filler_ms` covers the host.

        Enough for the slowest rank too, if it comes no later than usual; on a rank that is much later, 0.
        """
        if not self._told_ns:
            return filler_ms
        # Containers of one host may shift their clocks: then this is no common moment, but soon all the same.
        self._lag_ns = max(0, time.monotonic_ns() - self._told_ns)
        if not self._lags_ns:
            return filler_ms
        expected_ms = min(MARGIN * max(self._lags_ns) * 1e-6, MOST_LAG_MS)
        return max(0.0, expected_ms + filler_ms - self._lag_ns * 1e-6)
