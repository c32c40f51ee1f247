"""The benchmark of the clock: what it judges, and the page it leaves. The times themselves need a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from programs import torchrun

from benchmarks.tuner import clock_error
from benchmarks.tuner.clock_error import Row


def row(clock_us: float, gpu_us: float, *, launch_bound: bool = False, feeds: bool = True) -> Row:
    return Row(gpu_us, "idle", feeds, clock_us, gpu_us, launch_bound)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (row(10.29, 10.0), "ok"),
        (row(9.71, 10.0), "ok"),
        (row(10.31, 10.0), "MISSED"),
        (row(9.69, 10.0), "MISSED"),
        (row(60.0, 10.0, launch_bound=True), "flagged"),
        (row(10.0, 10.0, launch_bound=True), "ok"),
        (row(60.0, 9.9), ""),
        (row(60.0, 9.9, launch_bound=True), "flagged"),
    ],
)
def test_a_kernel_of_ten_microseconds_is_right_or_flagged_or_missed(measured, verdict):
    assert measured.verdict == verdict


def event(name: str, us: float) -> Any:
    return SimpleNamespace(name=lambda: name, duration_ns=lambda: us * 1e3)


def test_the_profilers_durations_are_those_of_the_kernel_alone():
    events = [event("spin_kernel", 100.0), *(event("spend", us) for us in (9.0, 11.0, 10.0))]
    assert clock_error.median_us(events, "spend", 3) == 10.0
    with pytest.raises(
        RuntimeError, match=r"3 of 4 launches of spend in the profile: \['spend', 'spin_kernel'\]"
    ):
        clock_error.median_us(events, "spend", 4)


@pytest.mark.gpu(alone=True, seconds=20)
def test_on_a_gpu_it_ends_with_a_record(tmp_path):
    arguments = ("--microseconds", "2", "500", "2000", "--json", "record.json")
    result = torchrun("benchmarks.tuner.clock_error", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    arms = {(found["function"], found["feeds"]) for found in record["measured"]}
    assert arms == {("idle", False), ("idle", True), ("busy", False), ("busy", True)}


@pytest.mark.gpu(alone=True)
def test_times_in_context_are_the_gpus_own_within_3_percent_and_two_events_or_flagged():
    rows, nothing_us = clock_error.measure((2, 10, 20, 50, 100, 500, 5000), 15)
    assert nothing_us < 5  # a constant that all candidates carry; more would be no clock
    wrong = [
        row
        for row in rows
        if row.gpu_us >= clock_error.JUDGED_FROM_US
        and not row.launch_bound
        and abs(row.clock_us - row.gpu_us) > 0.03 * row.gpu_us + nothing_us
    ]
    assert not wrong
    by_arm = {(row.wanted_us, row.function, row.feeds): row for row in rows}
    for wanted_us in (10, 20, 50, 100):  # the host takes longer than 3 % of these
        assert by_arm[wanted_us, "idle", False].launch_bound
    for wanted_us in (2, 10, 20, 50, 100, 500, 5000):
        assert not by_arm[wanted_us, "idle", True].launch_bound  # feeding is enough
        assert not by_arm[wanted_us, "busy", False].launch_bound  # and not needed here
