"""What two CUDA events around a launch read beyond the kernel's own duration: measured once on a device.

Events around an empty kernel, less what an empty kernel takes by itself. On an H200 (driver 580) that is
2.2 us, the same for kernels of 2 us and of 1 ms, so the clock can take it off every reading
(docs/benchmarks/clock_error_with_events_1xH200_2026-11-20.md).

The launches go onto a stream of their own and nobody waits for them there: a stream of the caller's may be
behind a kernel that waits for a peer.
"""

from __future__ import annotations

import statistics
import time

import torch

from .stream_filler import CYCLES_PER_MS

EMPTY_KERNEL_MS = 0.0006  # an empty kernel's own duration by CUPTI, on an H200
PAIRS = 9
LEAD_MS = 0.2  # before the first pair: by then the host has queued all of them
BETWEEN_MS = 0.02
PATIENCE_S = 1.0
POLL_INTERVAL_S = 50e-6


class EventCost:
    """Launches the measurement on a device when made, and knows the result a little later.

    torch's spin kernel must be loaded on the device; with no cycles to spin it is the empty kernel.
    """

    def __init__(self, device: int) -> None:
        self._ms: float | None = None
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(int(LEAD_MS * CYCLES_PER_MS))
            self._pairs = [self._pair() for _ in range(PAIRS)]

    def ms(self) -> float:
        """Return the cost in ms, 0 if the device does not come to measuring it within `PATIENCE_S`."""
        if self._ms is None:
            deadline = time.monotonic() + PATIENCE_S
            while not self._pairs[-1][1].query() and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S)
            done = self._pairs if self._pairs[-1][1].query() else []
            readings = [begin.elapsed_time(end) for begin, end in done]
            self._ms = max(0.0, statistics.median(readings) - EMPTY_KERNEL_MS) if readings else 0.0
        return self._ms

    @staticmethod
    def _pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(BETWEEN_MS * CYCLES_PER_MS))
        begin.record()
        torch.cuda._sleep(0)
        end.record()
        return begin, end
