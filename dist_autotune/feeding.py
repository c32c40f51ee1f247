"""Keeps a stream busy while the host prepares a trial launch, so that the launch's events time the kernel.

Before the first event of a trial launch goes onto an idle stream, the stream gets a *filler*: torch's
spin kernel, one thread that counts clock cycles. It lasts somewhat longer than the host takes for the
launch, so the device comes to the first event when the kernel behind it is queued already.

Why a spin kernel. It sits on the stream of the launch itself: what keeps it from starting (a grid that
holds every SM) would keep the kernel from starting too, so it adds no way to deadlock. It ends by itself,
whatever the host does next. A gate that the host opens (cuStreamWaitValue32) would be exact, but a launch
that blocks before the gate is open, on a full queue or in loading a module, would hang for ever. A memset
or copy of some size takes memory bandwidth from what runs beside it, for a time that depends on that.
The one thread takes one of the device's thousands of warp slots, for at most `LONGEST_MS`, or `RUN_MS`.

Its module is loaded beforehand (`load_filler`): lazy loading may wait for the whole device, and so for a
kernel that waits for a peer. A device on which it is not loaded yet is not fed.

The lengths are few and fixed, so that ranks whose hosts are about equally fast delay a launch equally: a
kernel that waits for its peers is charged with how much later they come.

A whole run that is timed (`RunFeeder`) is fed likewise, if the host enqueues it in a millisecond: while
configs are tried the host does more in a run than in a settled call, and that must not decide between them.
Work on another stream that does not wait for the one that is fed begins under the filler, in every run alike.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

import torch

from .device_errors import told_as_ours

LENGTHS_MS = (0.05, 0.1, 0.2, 0.4)
LONGEST_MS = LENGTHS_MS[-1]
MARGIN = 1.5  # of what the host took for the last launches: of the longest but one, as one may be an outlier
FIRST_MS = 0.1  # before that time is known
RUN_MS = 1.0  # the filler of a whole run, and the longest time of the host for a run that is fed
CYCLES_PER_MS = 2_000_000  # of an SM at 2 GHz; at lower clocks a filler lasts longer
_REMEMBERED = 9  # launches


def load_filler(device: int) -> None:
    """Load the spin kernel on a device, by a launch of no length."""
    with torch.cuda.device(device):
        torch.cuda._sleep(0)


class Feeder:
    """Feeds the launches of one context: `feed` before a launch, `learn` after it."""

    def __init__(self, fillable: set[int]) -> None:
        self.length_ms = FIRST_MS
        self._fillable = fillable  # devices on which the filler is loaded
        self._host_ms: deque[float] = deque(maxlen=_REMEMBERED)
        self._passed = False  # the last launch was not fed, as its stream was not idle
        self._always = False  # the stream is not idle just before, but runs dry while the host prepares

    def feed(self) -> None:
        """Keep the current stream busy for a while if it is idle. Not for a stream that is being captured."""
        with told_as_ours():
            if torch.cuda.current_device() not in self._fillable:
                return
            self._passed = not self._always and not torch.cuda.current_stream().query()
            if not self._passed:
                _spin(self.length_ms)

    def learn(self, mark: Any) -> None:
        """Take in how the launch went: `mark.host_ms` and `mark.was_fed`, as `EventClock` leaves them."""
        self._host_ms.append(mark.host_ms)
        wanted_ms = MARGIN * sorted(self._host_ms)[-2:][0]
        self.length_ms = next((length for length in LENGTHS_MS if length >= wanted_ms), LONGEST_MS)
        if self._passed and not mark.was_fed:
            self._always = True


class RunFeeder:
    """Feeds whole runs: `feed` before a run, `learn` after it."""

    def __init__(self, fillable: set[int]) -> None:
        self._fillable = fillable
        self._host_ms: deque[float] = deque(maxlen=_REMEMBERED)

    def feed(self, lead_ms: float = RUN_MS) -> None:
        """Keep the current stream busy so long if it is idle and the host is usually done with a run in time.

        A host that takes longer than `RUN_MS` hides nothing behind a filler: its run is timed as it comes.
        """
        if self._host_ms and statistics.median(self._host_ms) > RUN_MS:
            return
        with told_as_ours():
            if torch.cuda.current_device() in self._fillable and torch.cuda.current_stream().query():
                _spin(lead_ms)

    def learn(self, mark: Any) -> None:
        """Take in how long the host took for the run: `mark.host_ms`."""
        self._host_ms.append(mark.host_ms)


def _spin(length_ms: float) -> None:
    torch.cuda._sleep(int(length_ms * CYCLES_PER_MS))
