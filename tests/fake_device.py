"""A CUDA device that is arithmetic: one stream at a time, host and device clocks that only move when told to.

    device = FakeDevice()
    device.install(monkeypatch)      # torch.cuda's events, streams and _sleep
    begin.record(); device.launch(ms=0.5, host_ms=0.03); end.record()

The device works off its queue in order, never before a command was queued. Events remember when the device
came to them. The host's time passes through `pass_ms`, and by what each call of torch.cuda costs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dist_autotune.feeding import CYCLES_PER_MS

CALL_MS = 0.002  # of the host, for each call of torch.cuda that does something


@dataclass
class FakeDevice:
    """Time in ms. `idle_ms` is when the device is done with all that is queued."""

    host_ms: float = 0.0
    idle_ms: float = 0.0
    fillers_ms: list[float] = field(default_factory=list)
    trouble: Callable[[], BaseException] | None = None  # raised by every question and command ...
    breaks_ms: float = 0.0  # ... from this time of the host's on
    capturing: bool = False
    synchronized: int = 0
    events: int = 0  # recorded
    event_cost_ms: float = 0.0  # what two events read beyond what is between them

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "current_device", lambda: 0)
        monkeypatch.setattr(cuda, "device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(cuda, "current_stream", lambda: FakeStream(self))
        monkeypatch.setattr(cuda, "Stream", lambda: FakeStream(self))
        monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(cuda, "Event", lambda enable_timing: FakeEvent(self))
        monkeypatch.setattr(cuda, "_sleep", self._sleep)
        monkeypatch.setattr(cuda, "synchronize", self._synchronize)
        monkeypatch.setattr(time, "perf_counter_ns", lambda: round(self.host_ms * 1e6))
        return self

    def pass_ms(self, ms: float) -> None:
        self.host_ms += ms

    def launch(self, ms: float, host_ms: float = 0.03) -> None:
        """Spend `host_ms` on preparing a kernel of `ms`, then queue it."""
        self.pass_ms(host_ms)
        self.queue(ms)

    def queue(self, ms: float = 0.0) -> float:
        """Queue work of `ms`; return when the device is done with it."""
        self._check()
        self.idle_ms = max(self.idle_ms, self.host_ms) + ms
        return self.idle_ms

    def has_passed(self, at_ms: float | None) -> bool:
        self.pass_ms(CALL_MS)
        self._check()
        return at_ms is not None and self.host_ms >= at_ms

    def _check(self) -> None:
        if self.trouble is not None and self.host_ms >= self.breaks_ms:
            raise self.trouble()

    def _sleep(self, cycles: int) -> None:
        assert not self.capturing
        self.pass_ms(CALL_MS)
        self.fillers_ms.append(cycles / CYCLES_PER_MS)
        self.queue(cycles / CYCLES_PER_MS)

    def _synchronize(self) -> None:
        self.synchronized += 1


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at_ms: float | None = None

    def record(self) -> None:
        self.device.events += 1
        self.device.pass_ms(CALL_MS)
        self.at_ms = self.device.queue()

    def query(self) -> bool:
        return self.device.has_passed(self.at_ms)

    def elapsed_time(self, end: Any) -> float:
        assert self.at_ms is not None
        return float(end.at_ms - self.at_ms) + self.device.event_cost_ms


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def query(self) -> bool:
        return self.device.has_passed(self.device.idle_ms)
