"""Keeps the device busy while the host prepares a run, so that samples hold device time alone.

An idle stream gets a *filler* before a run with a trial: torch's spin kernel, for somewhat longer than the
host takes to enqueue the run. All work of the function, also on streams that it forks, is queued behind it,
as behind other work in a settled call; directly before one launch it would hide copies the kernel waits for.

It ends by itself, not by a gate that the host opens: a launch that blocks would then hang for ever. It is
loaded beforehand: lazy loading may wait for a kernel that waits for a peer. Ranks end their fillers at one
moment (`synchronized_start`), so each filler measures the device's rate anew.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Container

import torch

from .device_errors import as_launch_failed

LONGEST_MS = {"replay": 20.0, "online": 1.0}  # unless filler_ms= says; a filler delays the run by its length
FIRST_MS = 1.0  # before the host's time is known
MARGIN = 1.5  # of the host's longest time but one of the last runs: one may be an outlier
LATE_SHARE = 0.25  # a host that takes so much longer than usual may have delayed the device
COMPILED_MS = 5.0  # in a run: less is a look for what is compiled
CYCLES_PER_MS = 2_000_000  # of an SM at 2 GHz, before the rate is measured
MEASURED_MS = 0.2  # fillers that are shorter say too little of the rate
_REMEMBERED = 9  # runs


class StreamFiller:
    """Fills the stream before each run, and learns how long the host takes: `begin`, then `end`."""

    def __init__(self, fillable: Container[int], longest_ms: float) -> None:
        self._fillable = fillable  # devices on which the filler is loaded
        self._longest_ms = longest_ms  # a slower host gets none
        self._host_ms: deque[float] = deque(maxlen=_REMEMBERED)
        self._enqueued_ms: deque[float] = deque(maxlen=_REMEMBERED)  # the same, of runs that did not wait
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)  # cycles a ms, of the last fillers
        self._last: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None  # until its rate is known
        self._begin: torch.cuda.Event | None = None  # of the run under way, behind the filler
        self._filled_ms = 0.0
        self._began_ns = 0
        self._is_first = True  # run: all ranks compile in it

    @property
    def wanted_ms(self) -> float:
        """Return the length of the filler that this host needs; more than the longest: none is of use."""
        if not self._host_ms:
            return FIRST_MS
        usual_ms = statistics.median(self._host_ms)
        if usual_ms > self._longest_ms:
            return usual_ms
        return min(MARGIN * sorted(self._host_ms)[-2:][0], self._longest_ms)

    @property
    def host_ms(self) -> float:
        """Return the ms that the host takes to enqueue a run; 0.0: not known, as it waits for the device."""
        return round(statistics.median(self._enqueued_ms), 3) if self._enqueued_ms else 0.0

    def length_ms(self, wanted_ms: float) -> float:
        """Return the length of the filler, where the slowest of all ranks wants so much."""
        return 0.0 if wanted_ms > self._longest_ms else wanted_ms

    def begin(self, length_ms: Callable[[], float]) -> None:
        """Keep the current stream busy, if it is idle. Not for one that is being captured.

        The length is asked for last: it counts from that moment.
        """
        with as_launch_failed():
            is_loaded = torch.cuda.current_device() in self._fillable
            if self._last is not None and self._last[1].query():
                before, behind, cycles = self._last
                self._last = None
                if (took_ms := before.elapsed_time(behind)) > 0:
                    self._rates.append(cycles / took_ms)
            before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            is_idle = is_loaded and torch.cuda.current_stream().query()
            wanted_ms = length_ms()
            self._filled_ms = wanted_ms if is_idle else 0.0
            if self._filled_ms > 0:
                cycles = int(self._filled_ms * (statistics.median(self._rates or [CYCLES_PER_MS])))
                before.record()
                torch.cuda._sleep(cycles)
                self._last = (before, behind, cycles) if self._filled_ms >= MEASURED_MS else None
            self._begin, self._began_ns = behind, time.perf_counter_ns()
            behind.record()

    def end(self, compiled_ms: float = 0.0) -> float:
        """Return the ms that the host may have added to the run, beyond its usual ones.

        0.0 if a filler covered the host. If the function waits for the device at its end, the host's own time
        is unknown, and only its compilations count. compiled_ms: of the run; a run that compiles says nothing
        of others.
        """
        if self._begin is None:
            return 0.0
        with as_launch_failed():
            host_ms = (time.perf_counter_ns() - self._began_ns) * 1e-6
            was_fed = not self._begin.query()
            has_waited = not was_fed and torch.cuda.current_stream().query()
        self._begin = None
        usual_ms = statistics.median(self._host_ms or [host_ms])
        if has_waited:  # for the filler too: the host took no longer, and maybe less
            host_ms = max(host_ms - self._filled_ms, usual_ms if self._host_ms else 0.0)
        if not compiled_ms:
            self._host_ms.append(host_ms)
            if not has_waited:
                self._enqueued_ms.append(host_ms)
        is_first, self._is_first = self._is_first, False
        has_compiled = compiled_ms > COMPILED_MS and not is_first
        late_ms = compiled_ms - self._filled_ms if has_compiled else 0.0
        if not has_waited and host_ms > (1 + LATE_SHARE) * usual_ms:
            late_ms = max(late_ms, host_ms - max(usual_ms, self._filled_ms))
        return 0.0 if was_fed else max(late_ms, 0.0)
