"""The clock of CUDA events, on a device that is arithmetic: whose time it reads, what is done about it."""

from __future__ import annotations

import pytest
import torch
from fake_device import CALL_MS, FakeDevice

from dist_autotune import EventClock
from dist_autotune.timing.samples import Samples
from dist_autotune.timing.stream_filler import FIRST_MS

KERNEL_MS = 0.01
LONGEST_MS = 20.0  # of a filler
EXACT = 1e-9  # ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice().install(monkeypatch)


def timed(device: FakeDevice, samples: Samples, ms: float = KERNEL_MS, host_ms: float = 0.03) -> None:
    mark = samples.start()
    device.launch(ms, host_ms)
    samples.stop(mark)


def finish(device: FakeDevice) -> None:
    device.host_ms = max(device.host_ms, device.idle_ms)


class Runs:
    """Runs of a function with one launch, each on an idle stream; behind a filler, if the clock makes one."""

    def __init__(self, device: FakeDevice, clock: EventClock, *, times: str = "launches") -> None:
        prepare(clock)
        self.device = device
        self.filler = clock.filler(LONGEST_MS)
        self.watch = Samples(clock, "median", flags_gaps=times == "launches")
        self._times_runs = times == "runs"

    def sample(
        self, ms: float = KERNEL_MS, host_ms: float = 0.03, busy_ms: float = 0.0
    ) -> tuple[float, float]:
        """Return (ms, gap ms) of the next run; `busy_ms`: of the device, before the function is called."""
        device, filler, watch = self.device, self.filler, self.watch
        watch.begin_run()
        finish(device)
        if busy_ms:
            device.queue(busy_ms)
        if filler is not None:
            filler.begin(lambda: filler.length_ms(filler.wanted_ms))
        if self._times_runs:
            mark = watch.start()
            device.launch(ms, host_ms)
            watch.stop(mark)
        else:
            timed(device, watch, ms, host_ms)
        late_ms = 0.0 if filler is None else filler.end()
        finish(device)
        watch.report_run("a", waits=True)
        watch.apply_outcome(waiting=False, counts=True, late_ms=late_ms)
        return watch.sample.ms, watch.sample.gap_ms


def prepare(clock: EventClock) -> None:
    """Prepare the clock and forget what it launched for that."""
    clock.prepare()
    device = torch.cuda.current_stream().gpu
    finish(device)
    device.fillers_ms.clear()


def samples_of(clock: EventClock) -> Samples:
    prepare(clock)
    return Samples(clock, "median", flags_gaps=True)


# ---- whose time it is


@pytest.mark.parametrize("kernel_ms", [0.002, 0.01, 0.1, 5.0])
@pytest.mark.parametrize("host_ms", [0.01, 0.12, 0.9, 12.0])
def test_behind_a_filler_a_launch_reads_the_kernels_own_time(device, kernel_ms, host_ms):
    runs = Runs(device, EventClock())
    found = [runs.sample(ms=kernel_ms, host_ms=host_ms) for _ in range(4)]
    settled = [(pytest.approx(kernel_ms, abs=EXACT), 0.0)] * 4
    assert found[1:] == settled[1:]
    assert (found[0] == settled[0]) == (host_ms < FIRST_MS)  # else its host was not known yet


def test_a_stream_that_runs_dry_before_a_launch_is_found_out(device):
    runs = Runs(device, EventClock())
    ms, gap_ms = runs.sample(busy_ms=0.012)  # at work when the run begins, done before it is queued
    assert ms > KERNEL_MS + EXACT
    assert ms - gap_ms <= KERNEL_MS + EXACT


def test_the_filler_is_loaded_before_the_run_and_elsewhere_there_is_none(device):
    clock = EventClock()
    filler = clock.filler(LONGEST_MS)
    filler.begin(lambda: 1.0)
    device.launch(KERNEL_MS)
    filler.end()
    assert device.fillers_ms == []  # its module is not loaded: loading might wait for a kernel that waits
    finish(device)
    clock.prepare()
    assert device.fillers_ms  # what measures events has loaded it
    finish(device)
    filler.begin(lambda: 1.0)
    launched = len(device.fillers_ms)
    assert device.fillers_ms[-1] == 1.0
    clock.prepare()
    assert len(device.fillers_ms) == launched


# ---- what the events cost


def test_nothing_waits_for_the_device_before_the_run_ends(device):
    samples = samples_of(EventClock())
    for _ in range(50):
        timed(device, samples, ms=1000.0)
    assert device.host_ms < 50 * (0.03 + 8 * CALL_MS)
    assert device.synchronized == 0
