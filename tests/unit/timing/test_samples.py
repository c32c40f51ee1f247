"""How the marks of a clock become a run's sample, and samples the statistic that a rank tells."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from dist_autotune.search.messages import MIXED, Part, RunReport, decode, femtoseconds
from dist_autotune.timing.samples import Samples


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


def run(stopwatch: Samples, launches: int = 1, ran: str = "a", *, waits: bool = True) -> Part:
    stopwatch.begin_run()
    for _ in range(launches):
        stopwatch.stop(stopwatch.start())
    return stopwatch.tell(ran, waits=waits)


def sample(stopwatch: Samples, launches: int = 1, ran: str = "a") -> Part:
    report = run(stopwatch, launches, ran)
    stopwatch.take(waiting=False, counts=True)
    return report


def told(ms: float) -> Part:
    return Part("a", ms, ms, femtoseconds(ms), measured=1)


def test_marks_are_read_at_the_end_of_the_run_only():
    clock = ListClock(1.0, 2.0)
    run(Samples(clock, "median"), launches=2)
    assert clock.events == ["start", "stop", "start", "stop", "read", "read"]


def test_a_sample_is_the_mean_of_the_launches_of_its_run():
    stopwatch = Samples(ListClock(1.0, 2.0, 6.0), "median")
    assert sample(stopwatch, launches=3) == told(3.0)
    assert stopwatch.samples == {"a": [3.0]}


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [("median", [5.0, 3.0, 2.0]), ("mean", [5.0, 3.0, 8 / 3]), ("min", [5.0, 1.0, 1.0])],
)
def test_what_is_told_is_the_statistic_of_the_samples_so_far(statistic, expected):
    stopwatch = Samples(ListClock(5.0, 1.0, 2.0), statistic)
    assert [sample(stopwatch).worst_ms for _ in range(3)] == expected


@pytest.mark.parametrize(
    "kind", [np.float32, np.int64, torch.tensor, Fraction], ids=lambda kind: kind.__name__
)
def test_a_clock_may_read_any_kind_of_number_and_it_can_be_told(kind):
    stopwatch = Samples(ListClock(kind(2), kind(4)), "mean")
    payload = RunReport(parts={"context": sample(stopwatch, launches=2)})
    assert decode(payload.encode()).parts["context"].worst_ms == 3.0


def test_each_candidate_has_samples_of_its_own():
    stopwatch = Samples(ListClock(1.0, 9.0, 3.0), "mean")
    told = [sample(stopwatch, ran=ran).worst_ms for ran in ("a", "b", "a")]
    assert told == [1.0, 9.0, 2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0, None])
def test_a_time_that_cannot_be_is_left_out(bad):
    stopwatch = Samples(ListClock(bad, 2.0, 4.0), "median")
    assert sample(stopwatch, launches=3).worst_ms == 3.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_rank_without_a_usable_time_says_so(bad):
    stopwatch = Samples(ListClock(bad, bad), "median")
    assert sample(stopwatch, launches=2) == Part("a", unmeasured=1)
    assert stopwatch.samples == {"a": []}


def test_an_unusable_run_leaves_earlier_samples_standing():
    stopwatch = Samples(ListClock(2.0, math.nan), "median")
    assert [sample(stopwatch).worst_ms for _ in range(2)] == [2.0, 2.0]
    assert stopwatch.samples == {"a": [2.0]}


def test_a_run_of_several_candidates_is_no_sample_of_any():
    stopwatch = Samples(ListClock(2.0, 3.0), "median")
    assert run(stopwatch, launches=2, ran=MIXED).unmeasured == 1
    stopwatch.take(waiting=False, counts=False)
    assert not any(stopwatch.samples.values())


def test_a_run_that_turns_out_not_to_count_is_taken_back():
    stopwatch = Samples(ListClock(9.0, 1.0), "median")
    run(stopwatch)
    stopwatch.take(waiting=False, counts=False)
    assert stopwatch.samples == {"a": []}
    assert sample(stopwatch).worst_ms == 1.0


def test_a_run_that_raised_leaves_nothing():
    stopwatch = Samples(ListClock(9.0, 1.0), "median")
    stopwatch.stop(stopwatch.start())
    stopwatch.abandon()
    assert sample(stopwatch).worst_ms == 1.0
    assert stopwatch.samples == {"a": [1.0]}


def test_a_run_without_a_timed_launch_has_nothing_to_read():
    stopwatch = Samples(ListClock(), "median")
    assert run(stopwatch, launches=0) == Part("a")


def test_without_waiting_a_sample_is_read_once_the_clock_is_ready():
    clock = ListClock(2.0, ready=False)
    stopwatch = Samples(clock, "median")
    assert run(stopwatch, waits=False) == Part("a", pending=1)
    stopwatch.take(waiting=True, counts=False)
    stopwatch.begin_run()
    assert stopwatch.tell("b", waits=False) == Part("a", pending=1)  # the same report until it is read
    stopwatch.take(waiting=True, counts=False)
    assert "read" not in clock.events
    clock.is_ready = True
    stopwatch.begin_run()
    assert stopwatch.tell("b", waits=False) == told(2.0)
    stopwatch.take(waiting=False, counts=True)
    assert stopwatch.samples == {"a": [2.0]}


def test_a_sample_that_is_read_is_told_again_while_a_peer_is_late():
    stopwatch = Samples(ListClock(2.0, ready=True), "median")
    first = run(stopwatch, waits=False)
    stopwatch.take(waiting=True, counts=False)
    stopwatch.begin_run()
    assert stopwatch.tell(None, waits=False) == first
    stopwatch.take(waiting=False, counts=True)
    assert stopwatch.samples == {"a": [2.0]}


def test_a_clock_that_does_not_say_whether_it_is_ready_is_read_at_once():
    assert run(Samples(ListClock(2.0), "median"), waits=False).measured == 1
