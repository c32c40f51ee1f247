"""How the marks of a clock become a run's sample, and samples the statistic that a rank tells."""

from __future__ import annotations

import math
import re

import pytest

from dist_autotune.errors import InvalidOption
from dist_autotune.timing.samples import Reading, Samples


class ListClock:
    """A clock whose marks are read in the order they were made."""

    def __init__(self, *times_ms: float, ready: bool | None = None) -> None:
        self.times_ms = list(times_ms)
        self.is_ready = ready
        self.events: list[str] = []
        if ready is not None:
            self.ready = lambda mark: self.is_ready

    def start(self) -> float:
        self.events.append("start")
        return self.times_ms.pop(0)

    def stop(self, mark: float) -> None:
        self.events.append("stop")

    def read_ms(self, mark: float) -> float:
        self.events.append("read")
        return mark


def run(samples: Samples, launches: int = 1, ran: str = "a", **given: bool) -> Reading:
    samples.begin_run()
    for _ in range(launches):
        samples.stop(samples.start())
    return samples.report_run(ran, **{"waits": True, **given})


def sample(samples: Samples, launches: int = 1, ran: str = "a") -> Reading:
    report = run(samples, launches, ran)
    samples.apply_outcome(waiting=False, counts=True)
    return report


def kept(samples: Samples) -> dict[str, list[float]]:
    return {ran: [sample.ms for sample in samples] for ran, samples in samples.by_candidate.items()}


def told(ms: float) -> Reading:
    return Reading("a", is_timed=True, ms=ms)


def test_marks_are_read_at_the_end_of_the_run_only():
    clock = ListClock(1.0, 2.0)
    run(Samples(clock, "median"), launches=2)
    assert clock.events == ["start", "stop", "start", "stop", "read", "read"]


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [("median", [5.0, 3.0, 2.0]), ("mean", [5.0, 3.0, 8 / 3]), ("min", [5.0, 1.0, 1.0])],
)
def test_what_is_told_is_the_statistic_of_the_samples_so_far(statistic, expected):
    samples = Samples(ListClock(5.0, 1.0, 2.0), statistic)
    assert [sample(samples).ms for _ in range(3)] == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0, None])
def test_a_time_that_cannot_be_is_left_out(bad):
    samples = Samples(ListClock(bad, 2.0, 4.0), "median")
    assert sample(samples, launches=3).ms == 3.0


@pytest.mark.parametrize("bad", ["1.0", b"1", [1.0], 1j], ids=repr)
def test_what_is_no_number_is_an_error_with_the_method_and_the_value(bad):
    with pytest.raises(InvalidOption, match=r"read_ms\(\) returned " + re.escape(repr(bad))):
        run(Samples(ListClock(bad), "median"))
    clock = ListClock(1.0)
    clock.gap_ms = lambda mark: bad
    with pytest.raises(InvalidOption, match=r"gap_ms\(\) returned " + re.escape(repr(bad))):
        run(Samples(clock, "median", flags_gaps=True))


def test_a_run_of_several_candidates_is_no_sample_of_any():
    samples = Samples(ListClock(2.0, 3.0), "median")
    assert run(samples, launches=2, is_mixed=True) == Reading("a", is_timed=True)
    samples.apply_outcome(waiting=False, counts=False)
    assert not any(samples.by_candidate.values())


def test_without_waiting_a_sample_is_read_once_the_clock_is_ready():
    clock = ListClock(2.0, ready=False)
    samples = Samples(clock, "median")
    assert run(samples, waits=False) == Reading("a", is_pending=True)
    samples.apply_outcome(waiting=True, counts=False)
    samples.begin_run()
    assert samples.report_run("b", waits=False) == Reading(
        "a", is_pending=True
    )  # the same report until it is read
    samples.apply_outcome(waiting=True, counts=False)
    assert "read" not in clock.events
    clock.is_ready = True
    samples.begin_run()
    assert samples.report_run("b", waits=False) == told(2.0)
    samples.apply_outcome(waiting=False, counts=True)
    assert kept(samples) == {"a": [2.0]}


def test_a_sample_that_is_read_is_told_again_while_a_peer_is_late():
    samples = Samples(ListClock(2.0, ready=True), "median")
    first = run(samples, waits=False)
    samples.apply_outcome(waiting=True, counts=False)
    samples.begin_run()
    assert samples.report_run(None, waits=False) == first
    samples.apply_outcome(waiting=False, counts=True)
    assert kept(samples) == {"a": [2.0]}
