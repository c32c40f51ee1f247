"""That the ranks of one host begin a run together, whatever each does between the exchange and the run."""

import math
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_for_tests import Bench, launch, numbers
from rank_programs import tune

from dist_autotune import tunable
from dist_autotune.search.messages import HostTimes, RunReport
from dist_autotune.search.reports import agreed_run
from dist_autotune.timing import synchronized_start
from dist_autotune.timing.synchronized_start import (
    MARGIN,
    MOST_FIT_LAG_MS,
    MOST_LAG_MS,
    MOST_MARGIN_MS,
    SynchronizedStart,
)
from ranks import assert_all_ok, run_ranks

MS = 1_000_000  # ns
SLOWER = 10_000  # FILLER_MS of such a clock is longer than a rank ever waits for a core
FILLER_MS = 1.0  # what the host needs


class Ranks:
    """Ranks whose clock is told what it reads."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts = [SynchronizedStart() for _ in range(count)]
        self.now_ns = 1000 * MS
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)

    def run(
        self, lags_ms: list[float], most_ms: float = math.inf, *, follows_fit: bool = False
    ) -> list[float]:
        """Exchange, and let each rank come to its run so long after that; return when each is to begin."""
        reports = {rank: RunReport(host=HostTimes(**start.stamp())) for rank, start in enumerate(self.starts)}
        agreed = agreed_run(reports, {}, {})
        sent_ns, moments = self.now_ns, []
        for start, lag_ms in zip(self.starts, lags_ms, strict=True):
            start.apply_exchange(agreed.host.sent_ns, agreed.host.lag_ns)
            self.now_ns = sent_ns + round(lag_ms * MS)
            lead_ms = start.lead_ms(FILLER_MS, most_ms, follows_fit=follows_fit)
            moments.append((self.now_ns - sent_ns) / MS + lead_ms)
        self.now_ns = sent_ns + 10_000 * MS
        return moments


LAGS = st.lists(st.floats(0.05, MOST_LAG_MS / MARGIN), min_size=3, max_size=3)


@given(runs=st.lists(LAGS, min_size=3, max_size=8))
@settings(max_examples=50, deadline=None)
def test_ranks_that_are_no_later_than_before_begin_at_one_moment_with_time_for_the_host(runs):
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranks, before = Ranks(3, monkeypatch), []
        for lags in runs:
            moments = ranks.run(lags)
            if before and max(lags) <= max(before[-synchronized_start.REMEMBERED :]):
                assert moments == [pytest.approx(moments[0], abs=1e-5)] * 3
                assert moments[0] >= max(lags) + FILLER_MS - 1e-5
            before.append(max(lags))


def test_a_rank_that_is_much_later_begins_at_once_and_nobody_waits_for_it_for_long(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    ranks.run([0.3, 0.5])
    assert ranks.run([0.3, 50.0]) == [pytest.approx(MARGIN * 0.5 + FILLER_MS), 50.0]
    assert ranks.run([0.3, 0.5]) == [pytest.approx(0.5 + MOST_MARGIN_MS + FILLER_MS)] * 2


def test_ranks_begin_together_behind_a_model_and_nobody_waits_so_long_for_other_runs(monkeypatch):
    """Of 452 runs that a model had chosen, on two H100, 350 took longer by the wait for the other rank."""
    ranks = Ranks(2, monkeypatch)
    for fit_ms, later_ms in ((9.0, 2.0), (12.0, 0.5), (10.0, 1.5), (13.0, 1.0)):
        moments = ranks.run([fit_ms, fit_ms + later_ms], follows_fit=True)
        assert moments == [pytest.approx(moments[0])] * 2
        assert moments[0] >= fit_ms + later_ms + FILLER_MS
        for _ in range(3):
            assert max(ranks.run([0.3, 0.5])) <= MARGIN * 0.5 + FILLER_MS + 1e-5
    late_ms = MOST_FIT_LAG_MS + 10
    for _ in range(2):
        ranks.run([late_ms, late_ms], follows_fit=True)
    assert max(ranks.run([9.0, 9.0], follows_fit=True)) <= 9.0 + MOST_LAG_MS + FILLER_MS


def test_ranks_begin_together_whatever_a_program_does_between_its_calls(monkeypatch):
    """Online the runs of two ranks began up to 1.8 ms apart, a third of the time of their step."""
    ranks = Ranks(2, monkeypatch)
    for lags in ([30.0, 30.4], [30.1, 30.9]):
        ranks.run(lags)
    for lags in ([31.2, 30.2], [30.0, 31.9], [30.5, 30.5]):
        moments = ranks.run(lags)
        assert moments == [pytest.approx(moments[0])] * 2
        assert moments[0] >= max(lags) + FILLER_MS
        assert moments[0] <= max(lags) + MOST_MARGIN_MS + FILLER_MS + 2


# ---- in a session


OWN_MS = {0: 1.0, 1: 2.5, 2: 1.5}  # of each rank: the filler that its host wants


class Filler:
    """Notes how long it is asked to be, and takes no time."""

    def __init__(self, wanted_ms: float) -> None:
        self.wanted_ms = wanted_ms
        self.host_ms = 0.0
        self.agreed_ms: list[float] = []
        self.leads_ms: list[float] = []

    def length_ms(self, wanted_ms: float) -> float:
        self.agreed_ms.append(wanted_ms)
        return wanted_ms

    def begin(self, length_ms: Callable[[], float]) -> None:
        self.leads_ms.append(length_ms())

    def end(self, compiled_ms: float) -> float:
        return 0.0


def fillers(rank: int, hosts: str, mode: str = "replay") -> tuple[list[int], list[float], list[float], int]:
    """Return of each trial at what ns of the host's clock it is to begin on this rank, the filler that the
    ranks agreed on, and the one that was asked for; and the runs of the session.

    The clock is slow, for all ranks alike, so that a busy machine makes no rank late.
    """
    if hosts == "two":
        synchronized_start.clock_name = lambda: f"host {rank}"
        from dist_autotune.tuner import function_state

        function_state.clock_name = synchronized_start.clock_name
    read: list[int] = [0]
    monotonic_ns = time.monotonic_ns

    def reading() -> int:
        read.append(monotonic_ns() // SLOWER)
        return read[-1]

    synchronized_start.time = type("time", (), {"monotonic_ns": staticmethod(reading)})
    bench, moments = Bench(), []

    class Noting(Filler):
        def begin(self, length_ms: Callable[[], float]) -> None:
            super().begin(length_ms)
            moments.append(read[-1] + round(self.leads_ms[-1] * MS))

    filler = Noting(OWN_MS[rank])
    bench.clock.filler = lambda longest_ms: filler
    kernel = bench.kernel({16: 2.0, 32: 1.0})

    def step() -> None:
        launch(kernel, numbers())
        bench.spend({1: 2.0, 2: 1.0, 3: 3.0}[tunable("way", [1, 2, 3])])

    tuned = tune(bench, step, mode=mode, filler_ms=20.0)
    while not tuned.settled:
        tuned()
    tuned()  # settled: no trial, no filler
    return moments, filler.agreed_ms, filler.leads_ms, tuned.report.runs


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_in_a_session_all_ranks_of_a_host_begin_each_trial_at_one_moment_with_time_for_the_slowest_host(mode):
    (moments, agreed_ms, _, runs), *others = assert_all_ok(run_ranks(fillers, 3, "one", mode))
    assert len(moments) == runs - (mode == "replay")  # all but the final run
    assert agreed_ms == [OWN_MS[0]] + [max(OWN_MS.values())] * (len(moments) - 1)
    assert len(set(moments[2:])) > 1  # of the clock that ranks share, by what peers said
    for other, agreed_there, _, other_runs in others:
        assert other_runs == runs
        assert agreed_there[1:] == agreed_ms[1:]
        from_third = zip(moments[2:], other[2:], strict=True)  # how late ranks come is known by then
        assert all(abs(ours - theirs) <= 2 for ours, theirs in from_third)  # ns


def test_over_several_hosts_each_begins_as_it_comes_behind_a_filler_for_the_slowest_host():
    longest_ms = max(OWN_MS[rank] for rank in range(2))
    for rank, (_, agreed_ms, leads_ms, _) in enumerate(assert_all_ok(run_ranks(fillers, 2, "two"))):
        assert len(leads_ms) > 3
        assert leads_ms == agreed_ms == [OWN_MS[rank]] + [longest_ms] * (len(leads_ms) - 1)
