"""What keeps the stream busy while the host prepares a run: how long, when not, what it tells of hosts."""

import pytest
import torch
from virtual_gpu import LAUNCH_MS, VirtualGpu, VirtualGpus

from dist_autotune import EventClock
from dist_autotune.timing.stream_filler import FIRST_MS, LONGEST_MS, StreamFiller

LONGEST = LONGEST_MS["replay"]


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


# ---- how long


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


@pytest.mark.parametrize("waits", [False, True], ids=["", "it waits for the device"])
def test_a_rank_that_compiles_behind_its_first_run_is_late_by_that(gpu, waits):
    """Its peers may wait for its data in that run, and took what it compiled for the candidate's time."""
    filler = filler_of(gpu)
    compiled = [run(gpu, filler, 0.2, waits=waits, compiled_ms=300.0) for _ in range(2)]
    assert compiled[0] == 0.0  # all ranks compile
    assert compiled[1] == pytest.approx(300.0, abs=2 * FIRST_MS)
    found = [run(gpu, filler, 0.2, waits=waits, compiled_ms=each) for each in (0.0, 0.01, 300.0)]
    assert found == [0.0, 0.0, pytest.approx(300.0, abs=2 * FIRST_MS)]
