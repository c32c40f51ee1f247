"""The clock of CUDA events, on a device that is arithmetic: whose time it reads, what is done about it."""

import pytest
from fake_device import FakeDevice

from dist_autotune import EventClock
from dist_autotune.timing.samples import Samples
from dist_autotune.timing.stream_filler import FIRST_MS

KERNEL_MS = 0.01
LONGEST_MS = 20.0  # of a filler
EXACT = 1e-9  # ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice().install(monkeypatch)


def finish(device: FakeDevice) -> None:
    device.host_ms = max(device.host_ms, device.idle_ms)


class Runs:
    """Runs of a function with one launch, each on an idle stream, behind a filler."""

    def __init__(self, device: FakeDevice) -> None:
        clock = EventClock()
        clock.prepare()
        self.device = device
        self.filler = clock.filler(LONGEST_MS)
        self.watch = Samples(clock, flags_gaps=True)

    def sample(
        self, ms: float = KERNEL_MS, host_ms: float = 0.03, busy_ms: float = 0.0
    ) -> tuple[float, float]:
        """Return (ms, gap ms) of the next run; `busy_ms`: of the device, before the function is called."""
        device, filler, watch = self.device, self.filler, self.watch
        watch.begin_run()
        finish(device)
        if busy_ms:
            device.queue(busy_ms)
        filler.begin(lambda: filler.length_ms(filler.wanted_ms))
        mark = watch.start()
        device.launch(ms, host_ms)
        watch.stop(mark)
        late_ms = filler.end()
        finish(device)
        watch.report_run("a", waits=True)
        watch.apply_outcome(waiting=False, counts=True, late_ms=late_ms)
        return watch.sample.ms, watch.sample.gap_ms


@pytest.mark.parametrize("kernel_ms", [0.002, 0.01, 0.1, 5.0])
@pytest.mark.parametrize("host_ms", [0.01, 0.12, 0.9, 12.0])
def test_behind_a_filler_a_launch_reads_the_kernels_own_time(device, kernel_ms, host_ms):
    runs = Runs(device)
    found = [runs.sample(ms=kernel_ms, host_ms=host_ms) for _ in range(4)]
    settled = [(pytest.approx(kernel_ms, abs=EXACT), 0.0)] * 4
    assert found[1:] == settled[1:]
    assert (found[0] == settled[0]) == (host_ms < FIRST_MS)  # else its host was not known yet


def test_a_stream_that_runs_dry_before_a_launch_is_found_out(device):
    runs = Runs(device)
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
