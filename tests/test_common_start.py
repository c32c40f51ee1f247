"""That the ranks of one host begin a run together, whatever each does between the exchange and the run."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_autotune import common_start, tunable
from dist_autotune.common_start import MARGIN, MOST_LAG_MS, CommonStart
from dist_autotune.feeding import RUN_MS
from dist_autotune.payload import Payload
from kernels_for_tests import Bench, launch, numbers
from rank_programs import tune
from ranks import assert_all_ok, run_ranks

MS = 1_000_000  # ns
SLOWER = 10_000  # RUN_MS of such a clock is longer than a rank ever waits for a core


class Ranks:
    """Ranks whose clock is told what it reads."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts = [CommonStart() for _ in range(count)]
        self.now_ns = 1000 * MS
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)

    def run(self, lags_ms: list[float]) -> list[float | None]:
        """Exchange, and let each rank come to its run so long after that; return when each is to begin."""
        payloads = [start.told(Payload("run", rank)) for rank, start in enumerate(self.starts)]
        merged = payloads[0]
        for payload in payloads[1:]:
            merged = merged.merged(payload)
        merged = Payload.decode(merged.encode())
        told_ns, moments = self.now_ns, []
        for start, lag_ms in zip(self.starts, lags_ms, strict=True):
            start.take(merged)
            self.now_ns = told_ns + round(lag_ms * MS)
            lead_ms = start.lead_ms()
            moments.append(None if lead_ms is None else (self.now_ns - told_ns) / MS + lead_ms)
        self.now_ns = told_ns + 100 * MS
        return moments


LAGS = st.lists(st.floats(0.05, MOST_LAG_MS / MARGIN), min_size=3, max_size=3)


@given(runs=st.lists(LAGS, min_size=3, max_size=8))
@settings(max_examples=200, deadline=None)
def test_ranks_that_are_no_later_than_before_begin_at_one_moment_with_time_for_the_host(runs):
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranks, before = Ranks(3, monkeypatch), []
        for lags in runs:
            moments = ranks.run(lags)
            if before and max(lags) <= max(before[-common_start.REMEMBERED :]):
                assert moments == [pytest.approx(moments[0], abs=1e-5)] * 3
                assert moments[0] >= max(lags) + RUN_MS - 1e-5
            before.append(max(lags))


def test_before_any_run_nothing_is_known(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    assert ranks.starts[0].lead_ms() is None
    assert ranks.run([0.3, 0.5]) == [None, None]
    assert ranks.run([0.3, 0.5]) == [pytest.approx(MARGIN * 0.5 + RUN_MS)] * 2


def test_a_rank_that_is_much_later_begins_at_once_and_nobody_waits_for_it_for_long(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    ranks.run([0.3, 0.5])
    assert ranks.run([0.3, 50.0]) == [pytest.approx(MARGIN * 0.5 + RUN_MS), 50.0]
    assert ranks.run([0.3, 0.5]) == [pytest.approx(MOST_LAG_MS + RUN_MS)] * 2


def test_a_peer_whose_clock_is_far_ahead_keeps_no_device_busy_for_long(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    ranks.run([0.3, 0.5])
    start = ranks.starts[0]
    start.take(Payload("run", told_ns=ranks.now_ns + 10**15, lag_ns=MS // 2))
    assert start.lead_ms() <= MOST_LAG_MS + RUN_MS
    assert start.told(Payload("run")).lag_ns == 0


def test_a_late_run_is_forgotten(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    ranks.run([0.3, 50.0])
    for _ in range(common_start.REMEMBERED):
        ranks.run([0.3, 0.5])
    assert ranks.run([0.3, 0.5]) == [pytest.approx(MARGIN * 0.5 + RUN_MS)] * 2


def test_where_the_clock_is_not_told_nothing_is_known(monkeypatch):
    start = CommonStart()
    start.take(Payload("run"))
    assert start.lead_ms() is None


# ---- in a session


class Feeder:
    def __init__(self, leads_ms: list[float | None]) -> None:
        self._leads_ms = leads_ms

    def feed(self, lead_ms: float | None = None) -> None:
        self._leads_ms.append(lead_ms)

    def learn(self, mark: object) -> None: ...


def leads(rank: int, hosts: str) -> tuple[list[int | None], int]:
    """Return at what ns of the host's clock each timed run is to begin on this rank.

    The clock is slow, for all ranks alike, so that a busy machine makes no rank late.
    """
    if hosts == "two":
        common_start.clock_name = lambda: f"host {rank}"
        from dist_autotune import domain

        domain.clock_name = common_start.clock_name
    read: list[int] = []
    monotonic_ns = time.monotonic_ns

    def reading() -> int:
        read.append(monotonic_ns() // SLOWER)
        return read[-1]

    common_start.time = type("time", (), {"monotonic_ns": staticmethod(reading)})
    bench, given_ms, moments = Bench(), [], []

    class Feeding(Feeder):
        def feed(self, lead_ms: float | None = None) -> None:
            super().feed(lead_ms)
            moments.append(None if not lead_ms else read[-1] + round(lead_ms * MS))

    bench.clock.run_feeder = lambda: Feeding(given_ms)
    kernel = bench.kernel({16: 2.0, 32: 1.0})

    def step() -> None:
        launch(kernel, numbers())
        bench.spend({1: 2.0, 2: 1.0, 3: 3.0}[tunable("way", [1, 2, 3])])

    tuned = tune(bench, step)
    tuned()
    return moments, tuned.report.runs


def test_in_a_session_all_ranks_of_a_host_begin_a_timed_run_at_one_moment():
    (moments, runs), *others = assert_all_ok(run_ranks(leads, 3, "one"))
    assert len(moments) >= 3
    for other, other_runs in others:
        assert other_runs == runs
        assert all(abs(ours - theirs) <= 2 for ours, theirs in zip(moments, other, strict=True))  # ns


def test_over_several_hosts_each_begins_as_it_comes():
    for moments, _ in assert_all_ok(run_ranks(leads, 2, "two")):
        assert moments
        assert not any(moments)
