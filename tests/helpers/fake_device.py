"""A CUDA device that is arithmetic: one GPU, alone, with one stream, whatever is asked for (`virtual_gpu`).

    device = FakeDevice()
    device.install(monkeypatch)      # torch.cuda's events, streams and _sleep
    begin.record(); device.launch(ms=0.5, host_ms=0.03); end.record()

Only `time.perf_counter_ns` reads its host's time; waiting for it takes the time that it takes.
"""

from __future__ import annotations

import time

import pytest
from virtual_gpu import Command, VirtualGpu, VirtualGpus, VirtualStream


class FakeDevice(VirtualGpu):
    """`idle_ms`, when the device is done with all that is queued, may be set."""

    def __init__(self) -> None:
        gpus = VirtualGpus(0)
        super().__init__(gpus, 0)
        gpus.append(self)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
        self.gpus.install_device(monkeypatch)
        monkeypatch.setattr(time, "perf_counter_ns", lambda: round(self.host_ms * 1e6))
        return self

    @property
    def idle_ms(self) -> float:
        return super().idle_ms

    @idle_ms.setter
    def idle_ms(self, ms: float) -> None:
        self.stream.last = Command((), ms, [], begin_ms=ms, end_ms=ms)

    def launch(self, ms: float, host_ms: float = 0.03) -> None:  # type: ignore[override]
        """Spend `host_ms` on preparing a kernel of `ms`, then queue it."""
        super().launch(ms, host_ms=host_ms)

    def new_stream(self) -> VirtualStream:
        return self.streams[0] if self.streams else super().new_stream()
