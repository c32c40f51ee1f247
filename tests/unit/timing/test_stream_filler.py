"""What the filler of a stream, which keeps it busy while the host prepares a run, tells of hosts."""

import pytest
from virtual_gpu import VirtualGpus

from dist_autotune import EventClock
from dist_autotune.timing.stream_filler import FIRST_MS, LONGEST_MS


@pytest.mark.parametrize("waits", [False, True], ids=["", "it waits for the device"])
def test_a_rank_that_compiles_behind_its_first_run_is_late_by_that(monkeypatch, waits):
    """Its peers may wait for its data in that run, and took what it compiled for the candidate's time."""
    (gpu,), clock = VirtualGpus(1).install(monkeypatch), EventClock()
    clock.prepare()
    gpu.synchronize()
    filler = clock.filler(LONGEST_MS["replay"])

    def late_ms(compiled_ms):
        filler.begin(lambda: filler.length_ms(filler.wanted_ms))
        gpu.launch(0.01, host_ms=0.2 + compiled_ms)
        if waits:
            gpu.synchronize()
        late = filler.end(compiled_ms)
        gpu.synchronize()  # what a session does when it reads its events
        return late

    by_compiling = pytest.approx(300.0, abs=2 * FIRST_MS)
    # In the first run all ranks compile.
    assert [*map(late_ms, (300.0, 300.0, 0.0, 0.01, 300.0))] == [0.0, by_compiling, 0.0, 0.0, by_compiling]
