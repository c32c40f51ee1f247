"""Contexts whose times hold the host's part: fed where that helps, flagged, and not decided by it."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_device import FakeDevice
from kernels_for_tests import Bench, ScriptedClock, launch, numbers, only, records
from rank_programs import tune

from dist_autotune import EventClock
from dist_autotune.logs.records import Agreed
from dist_autotune.timing.clock import PAIRS
from ranks import assert_all_ok, run_ranks

# ---- in a session


class GappedClock(ScriptedClock):
    """A scripted clock whose every reading may hold so much of the host's time."""

    def __init__(self, gap_ms: float) -> None:
        super().__init__()
        self._gap_ms = gap_ms

    def gap_ms(self, mark: list[int]) -> float:
        return self._gap_ms


class GappedBench(Bench):
    def __init__(self, gap_ms: float) -> None:
        self.clock = GappedClock(gap_ms)
        self.launches = self.clock.launches


def test_one_launch_bound_rank_keeps_all_ranks_from_deciding_by_its_host():
    def program(rank):
        bench = GappedBench(0.5 if rank == 1 else 0.0)
        kernel = bench.kernel({16: 1.0, 32: 0.9, 64: 0.8})
        step = tune(bench, lambda: launch(kernel, numbers()))
        step()
        found = only(step.report)
        agreed = [record.gap_ms for record in records(Agreed, rank=rank)]
        return found.config.kwargs["BLOCK"], found.launch_bound, agreed

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one == (16, True, [0.5, 0.5, 0.5])


# ---- a session on a device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice().install(monkeypatch)


def on_device(
    device: FakeDevice, times_ms: dict[int, float], host_ms: float | Callable[[], float], **options: Any
) -> Any:
    """Return a tuned function of one kernel whose launches take so long on the device and on the host."""
    bench = Bench()

    def ms(block: int) -> Any:
        return lambda launched: (
            device.launch(times_ms[block], host_ms() if callable(host_ms) else host_ms) or 0.0
        )

    kernel = bench.kernel({block: ms(block) for block in times_ms})

    def thunk() -> Any:
        y = launch(kernel, numbers())
        device.host_ms = max(device.host_ms, device.idle_ms)  # the function waits for its result
        return y

    return bench, bench.tune(thunk, **{"clock": EventClock(), "cache": False, **options})


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_a_host_bound_function_is_tuned_by_the_kernels_own_times(device, mode):
    bench, tuned = on_device(device, {16: 0.012, 32: 0.010, 64: 0.011}, host_ms=0.04, n_repeat=3, mode=mode)
    calls = 0
    while not tuned.settled:
        tuned()
        calls += 1
    found = only(tuned.report)
    assert found.config.kwargs["BLOCK"] == 32
    assert not found.launch_bound
    assert list(found.timings.values()) == pytest.approx([0.012, 0.010, 0.011])
    assert len(bench.blocks()) == (tuned.report.runs if mode == "replay" else calls)  # the user's, no more
    assert device.synchronized == 0


@pytest.mark.parametrize(("filler_ms", "block"), [(None, 16), (8.0, 32)], ids=["1 ms", "8 ms"])
def test_online_a_host_slower_than_the_filler_decides_nothing_until_a_longer_filler_is_allowed(
    device, filler_ms, block
):
    options = {"mode": "online", "n_repeat": 3, "filler_ms": filler_ms}
    _, tuned = on_device(device, {16: 0.012, 32: 0.010}, host_ms=5.0, **options)
    while not tuned.settled:
        tuned()
    found = only(tuned.report)
    assert (found.config.kwargs["BLOCK"], found.launch_bound) == (block, filler_ms is None)
    fillers_ms = device.fillers_ms[1 + 2 * PAIRS :]  # the first are to know what events cost
    assert all(ms <= (filler_ms or 1.0) for ms in fillers_ms)


def test_without_fillers_the_same_function_is_flagged_and_keeps_its_incumbent(device):
    clock = EventClock(feeds=False)
    clock.prepare()
    device.host_ms = device.idle_ms  # what that has launched would keep the device busy in the first run
    _, tuned = on_device(device, {16: 0.012, 32: 0.010}, host_ms=0.04, n_repeat=3, clock=clock)
    tuned()
    found = only(tuned.report)
    assert (found.config.kwargs["BLOCK"], found.launch_bound) == (16, True)
    assert len(device.fillers_ms) == 1 + 2 * PAIRS  # to know what events cost, before the first run
