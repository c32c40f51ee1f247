"""The clock of CUDA events, on a device that is arithmetic: whose time it reads, what is done about it."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from fake_device import CALL_MS, FakeDevice

from dist_autotune import EventClock, TuningError, WallClock
from dist_autotune.errors import LaunchFailed, LaunchTimeout
from dist_autotune.timing.clock import EventCost
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


# ---- whole runs


def test_a_whole_run_that_always_keeps_the_host_busy_longer_is_timed_as_it_comes_and_not_flagged(device):
    """The first, whose filler is too short, is no later than the others."""
    runs = Runs(device, EventClock(), times="runs")
    for _ in range(3):
        ms, gap_ms = runs.sample(host_ms=1.5 * LONGEST_MS)
        assert ms >= 1.5 * LONGEST_MS - FIRST_MS
        assert gap_ms == 0.0
    assert device.fillers_ms == [FIRST_MS]


# ---- what the events cost


def test_a_device_that_does_not_come_to_the_measurement_costs_a_second_once(device, monkeypatch):
    device.event_cost_ms = 0.0028
    device.queue(10_000.0)
    cost = EventCost(0)
    now = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    assert cost.ms() == 0.0
    asked = next(now)
    assert cost.ms() == 0.0
    assert next(now) == asked + 1  # not asked again


def test_nothing_waits_for_the_device_before_the_run_ends(device):
    samples = samples_of(EventClock())
    for _ in range(50):
        timed(device, samples, ms=1000.0)
    assert device.host_ms < 50 * (0.03 + 8 * CALL_MS)
    assert device.synchronized == 0


@pytest.mark.parametrize(
    ("gaps", "told"),
    [
        ([0.2, 0.0, 0.0], (0.55, 0.0)),  # the median of the two without a host's part
        ([0.0, 0.3, 0.3], (0.4, 0.0)),  # the one without
        ([0.01, 0.3, 0.3], (0.4, 0.0)),  # a part too small to count is none
        ([0.1, 0.3, 0.2], (0.5, 0.2)),  # the median of all
        ([9.0, 9.0, 9.0], (0.5, 0.5)),  # no more than the time
    ],
)
def test_where_the_host_had_no_part_in_some_runs_only_these_count(gaps, told):
    times = [0.4, 0.5, 0.6]

    class Gapped(WallClock):
        def read_ms(self, mark):
            return times.pop(0)

        def gap_ms(self, mark):
            return gaps.pop(0)

    samples = Samples(Gapped(), "median", flags_gaps=True)
    for _ in range(3):
        samples.begin_run()
        samples.stop(samples.start())
        part = samples.report_run("a", waits=True)
        samples.apply_outcome(waiting=False, counts=True)
    assert (part.ms, part.gap_ms) == pytest.approx(told)


# ---- trouble on the device


def test_a_launch_that_does_not_end_is_a_timeout(device):
    clock = EventClock(timeout_s=0.01)
    mark = clock.start()
    device.launch(1e9)
    clock.stop(mark)
    device.pass_ms(0.1)
    assert clock.is_running(mark)
    with pytest.raises(TimeoutError, match=r"cuda:0 did not end a launch within 0\.01 s") as caught:
        clock.read_ms(mark)
    assert isinstance(caught.value, LaunchTimeout)
    assert isinstance(caught.value, TuningError)


def test_a_launch_is_running_from_its_first_event_to_its_second(device):
    clock = EventClock()
    device.queue(1.0)
    mark = clock.start()
    device.launch(1.0)
    clock.stop(mark)
    states = []
    for _ in range(3):
        states.append(clock.is_running(mark))
        device.pass_ms(0.99)
    assert states == [False, True, False]


ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("call", ["start", "stop", "ready", "read_ms", "begin", "end", "prepare"])
def test_what_the_device_reports_is_ours_and_is_caught_as_ever(device, kind, call):
    clock = EventClock()
    filler = clock.filler(LONGEST_MS)
    if call == "begin":
        clock.prepare()
    if call == "end":
        filler.begin(lambda: 1.0)
    mark = clock.start()
    if call != "stop":
        clock.stop(mark)
    device.trouble = lambda: kind(ILLEGAL)
    calls = {
        "start": clock.start,
        "begin": lambda: filler.begin(lambda: 1.0),
        "end": filler.end,
        "prepare": clock.prepare,
    }
    with pytest.raises(
        kind, match=r"reports \w+: CUDA error: an illegal memory access was encountered$"
    ) as caught:
        calls[call]() if call in calls else getattr(clock, call)(mark)
    assert isinstance(caught.value, LaunchFailed)
    assert isinstance(caught.value, TuningError)
    assert type(caught.value.__cause__) is kind


def test_the_mean_of_a_runs_launches_holds_the_mean_of_their_gaps(device):
    samples = samples_of(EventClock(feeds=False))
    timed(device, samples, ms=1.0, host_ms=0.5)  # waits for the host
    timed(device, samples, ms=1.0, host_ms=0.5)  # queued behind the first
    finish(device)
    part = samples.report_run("a", waits=True)
    first_gap_ms = 0.5 + 2 * CALL_MS
    assert part.gap_ms == pytest.approx(statistics.fmean([first_gap_ms, 0.0]), abs=EXACT)
