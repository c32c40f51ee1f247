"""Search strategies by `next` and `send` alone: no kernel, no rank, no clock."""

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from flows import driven
from hypothesis import given
from hypothesis import strategies as st

from dist_autotune.search.strategies import STRATEGIES, AgreedMs, Flow, Warmup, racing, racing_runs


def drive(flow: Flow, answer: Callable[[int], float]) -> tuple[list[int | Warmup], int]:
    """Answer what `flow` asks for; return all it asked for, and its winner.

    As in a session, a warm-up of a candidate that has samples is answered by their time so far.
    """
    sampled: dict[int, float] = {}

    def tell(request: int | Warmup) -> float:
        ms = answer(index_of(request))
        if not isinstance(request, Warmup):
            sampled[request] = ms
        return ms if ms == math.inf else sampled.get(index_of(request), ms)

    return driven(flow, tell)


def index_of(request: int | Warmup) -> int:
    return request.index if isinstance(request, Warmup) else request


def start(strategy: str, candidates: Sequence[int], n_warmup: int = 0, n_repeat: int = 1) -> Flow:
    return STRATEGIES[strategy](candidates, n_warmup=n_warmup, n_repeat=n_repeat)


every_strategy = pytest.mark.parametrize("strategy", sorted(STRATEGIES))


# ---- what every strategy keeps to


@every_strategy
@given(
    ms=st.lists(st.sampled_from([1.0, 2.0, 4.0, 8.0, 16.0]), min_size=1, max_size=12, unique=False),
    n_warmup=st.integers(0, 3),
    n_repeat=st.integers(1, 5),
)
def test_the_fastest_wins_and_of_equals_the_earliest(strategy, ms, n_warmup, n_repeat):
    asked, winner = drive(start(strategy, range(len(ms)), n_warmup, n_repeat), ms.__getitem__)
    assert winner == ms.index(min(ms))
    assert {index_of(request) for request in asked} <= set(range(len(ms)))


@every_strategy
@given(ms=st.lists(st.sampled_from([1.0, 2.0, math.inf]), min_size=2, max_size=8))
def test_a_banned_candidate_never_wins_while_another_is_left(strategy, ms):
    _, winner = drive(start(strategy, range(len(ms)), 1, 2), ms.__getitem__)
    assert winner in range(len(ms))
    if min(ms) < math.inf:
        assert ms[winner] == min(ms)


# ---- racing: judged by noisy samples of known medians


def sampled(medians_ms: Sequence[float], noise: float, seed: int) -> Callable[[int], float]:
    """Return what answers with the median so far of samples with `noise` around each candidate's own."""
    random_numbers = random.Random(seed)
    samples: dict[int, list[float]] = {}

    def answer(index: int) -> float:
        own = samples.setdefault(index, [])
        own.append(medians_ms[index] * (1 + random_numbers.uniform(-noise, noise)))
        return statistics.median(own)

    return answer


def runs_of(asked: list[int | Warmup]) -> Counter[int]:
    return Counter(index_of(request) for request in asked)


def test_racing_spends_one_run_on_a_candidate_that_is_a_hundred_times_slower():
    ms = [1.0, 100.0, 1.01, 1.02]
    asked, winner = drive(racing(range(4), n_warmup=3, n_repeat=5), ms.__getitem__)
    assert runs_of(asked)[1] == 1
    assert winner == 0


@pytest.mark.parametrize(("candidates", "runs"), [(2, 69), (8, 69), (16, 69), (24, 103), (200, 860)])
def test_racing_keeps_to_its_budget_when_all_are_equal(candidates, runs):
    asked, _ = drive(racing(range(candidates), n_warmup=3, n_repeat=5), sampled([1.0] * candidates, 0.02, 3))
    assert int(racing_runs(candidates)) == runs
    assert len(asked) <= runs


def test_racing_drops_nobody_on_a_single_sample_who_is_not_ten_times_slower():
    asked, winner = drive(racing(range(3), n_warmup=3, n_repeat=5), [1.0, 9.0, 9.0].__getitem__)
    assert asked == [Warmup(0), Warmup(1), Warmup(2), 0, 1, 2, 2, 1, 0]
    assert winner == 0


# ---- racing: what may hold the host's time


def test_racing_drops_nobody_whom_the_host_may_have_slowed_down():
    """1 is read twenty times slower as long as the host is in its time: the warm-up and three samples."""
    held = iter([AgreedMs(20.0, 0.5)] * 4)
    asked, winner = drive(
        racing(range(3), n_warmup=3, n_repeat=5),
        lambda index: next(held, 1.0) if index == 1 else [2.0, 0.0, 3.0][index],
    )
    assert winner == 1
    assert runs_of(asked) == {0: 6, 1: 6, 2: 3}  # whose medians of three and five are the next to be compared


# ---- racing: ties


@pytest.mark.parametrize("near", [0.999, 0.997], ids=["0.1 %", "0.3 %"])
def test_a_near_tie_with_the_first_goes_to_the_first_in_95_of_100_sessions(near):
    medians_ms = [1.0, near, 1.3, near + 0.001, 1.5, 1.4, near + 0.002, 1.6]
    winners = Counter(
        drive(racing(range(8), n_warmup=3, n_repeat=5), sampled(medians_ms, 0.02, seed))[1]
        for seed in range(200)
    )
    assert winners[0] >= 190
