"""What keeps the stream busy while the host prepares a run: how long, when not, what it tells of hosts."""

from typing import Any

import pytest
import torch
from virtual_gpu import LAUNCH_MS, VirtualGpu, VirtualGpus

from dist_autotune import EventClock
from dist_autotune.timing.stream_filler import FIRST_MS, LATE_SHARE, LONGEST_MS, StreamFiller

LONGEST = LONGEST_MS["replay"]
RATE_ERROR = 0.005  # of a filler's length: what the host takes between an event and the filler is in it


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGpu:
    return VirtualGpus(1).install(monkeypatch)[0]


def filler_of(gpu: VirtualGpu, longest_ms: float = LONGEST) -> StreamFiller:
    """Return a filler of a clock that is prepared, on an idle device."""
    clock = EventClock()
    clock.prepare()
    gpu.synchronize()
    gpu.fillers_ms.clear()
    return clock.filler(longest_ms)


def run(
    gpu: VirtualGpu,
    filler: StreamFiller,
    host_ms: float,
    ms: float = 0.01,
    *,
    waits: bool = False,
    compiled_ms: float = 0.0,
) -> float:
    """Make a run of one launch; return how late the host was."""
    filler.begin(lambda: filler.length_ms(filler.wanted_ms))
    gpu.launch(ms, host_ms=host_ms + compiled_ms)
    if waits:
        gpu.synchronize()
    late_ms = filler.end(compiled_ms)
    gpu.synchronize()  # what a session does when it reads its events
    return late_ms


def near(ms: float) -> Any:
    return pytest.approx(ms, abs=0.05)  # what the calls around a launch take of the host


# ---- how long


@pytest.mark.parametrize("mode", sorted(LONGEST_MS))
def test_a_host_that_is_usually_slower_than_the_longest_filler_gets_none(gpu, mode):
    longest_ms = LONGEST_MS[mode]
    filler = filler_of(gpu, longest_ms)
    for _ in range(3):
        assert run(gpu, filler, host_ms=1.2 * longest_ms) == 0.0
    assert filler.wanted_ms > longest_ms
    assert gpu.fillers_ms == [FIRST_MS]  # when that was not known
    for _ in range(4):
        run(gpu, filler, host_ms=0.3 * longest_ms)
    assert gpu.fillers_ms == [
        FIRST_MS,
        pytest.approx(longest_ms, rel=RATE_ERROR),
    ]  # of the second longest: soon it is forgotten


def test_what_is_enqueued_on_other_streams_that_were_forked_begins_behind_the_filler(gpu):
    filler, side = filler_of(gpu), torch.cuda.Stream()
    filler.begin(lambda: 2.0)
    side.wait_stream(torch.cuda.current_stream())
    copy = gpu.launch(0.3, on=side)
    kernel = gpu.launch(0.1)
    filler.end()
    assert copy.begin_ms == pytest.approx(kernel.begin_ms, abs=4 * LAUNCH_MS)
    assert min(copy.begin_ms, kernel.begin_ms) >= 2.0


# ---- what it tells of the host


def test_a_host_that_is_slow_for_all_fillers_is_late_only_when_it_is_slower_than_usual(gpu):
    filler, usual_ms = filler_of(gpu), 2 * LONGEST
    found = [
        run(gpu, filler, share * usual_ms, ms=1e4)
        for share in (1.0, 1.0, 1.0, 0.9, 1 + 0.9 * LATE_SHARE, 1 + 2 * LATE_SHARE, 1.0)
    ]
    assert found[:5] == [0.0] * 5
    assert found[5:] == [near(2 * LATE_SHARE * usual_ms), 0.0]


@pytest.mark.parametrize("waits", [False, True], ids=["", "it waits for the device"])
def test_a_rank_that_compiles_behind_its_first_run_is_late_by_that(gpu, waits):
    """Its peers may wait for its data in that run, and took what it compiled for the candidate's time."""
    filler = filler_of(gpu)
    compiled = [run(gpu, filler, 0.2, waits=waits, compiled_ms=300.0) for _ in range(2)]
    assert compiled[0] == 0.0  # all ranks compile
    assert compiled[1] == pytest.approx(300.0, abs=2 * FIRST_MS)
    found = [run(gpu, filler, 0.2, waits=waits, compiled_ms=each) for each in (0.0, 0.01, 300.0)]
    assert found == [0.0, 0.0, pytest.approx(300.0, abs=2 * FIRST_MS)]
