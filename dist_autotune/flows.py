"""Search strategies: pure generators that decide which candidate to try next.

A flow is `strategy(candidates, *, n_warmup, n_repeat)` over a sequence of candidate indices. It
yields an index (the next run launches that candidate and measures it) or `Warmup(index)` (the next
run launches it and measures nothing), and is sent that candidate's agreed time so far in
milliseconds: `inf` when it was banned or cannot win, `nan` while there is no sample of it. After
`Warmup` of a candidate without samples it is sent that run's time. It returns the winner's index, or
a `Winner`.
A flow knows neither torch nor ranks, and since it is the same on all ranks it needs no message of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class Warmup:
    """Ask for a run of candidate `index` that is no sample."""

    index: int


Flow: TypeAlias = Generator["int | Warmup", float, int]


class Strategy(Protocol):
    """What `search=` takes: a function that returns a flow."""

    def __call__(self, candidates: Sequence[int], *, n_warmup: int, n_repeat: int) -> Flow: ...


def exhaustive(candidates: Sequence[int], *, n_warmup: int, n_repeat: int) -> Flow:
    """Try every candidate in order; return the fastest, the earliest one of equals.

    Each gets `n_warmup` unmeasured and `n_repeat` measured runs; a banned one is left at once.
    """
    agreed_ms: dict[int, float] = {}
    for index in candidates:
        agreed_ms[index] = yield from _measure(index, n_warmup, n_repeat)
    best = min(candidates, key=agreed_ms.__getitem__)
    return Winner(best, [index for index in candidates if agreed_ms[index] == agreed_ms[best]])


def _measure(index: int, n_warmup: int, n_repeat: int) -> Generator[int | Warmup, float, float]:
    for _ in range(n_warmup):
        if (yield Warmup(index)) == math.inf:
            return math.inf
    ms = math.inf
    for _ in range(n_repeat):
        ms = yield index
        if ms == math.inf:
            break
    return math.inf if math.isnan(ms) else ms


class Winner(int):
    """The winner's index, and the candidates that the flow cannot tell from it: a tie, in any order.

    The incumbent wins a tie, and where hosts may have delayed the launches, also what they may have decided
    (`search.Context`). A flow that returns a bare index has decided itself: that candidate wins unless it is
    banned, or was launched and has no sample.
    """

    tied: frozenset[int]

    def __new__(cls, index: int, tied: Collection[int]) -> Winner:
        winner = super().__new__(cls, index)
        winner.tied = frozenset(tied)
        return winner


# Thresholds of `racing`, chosen with benchmarks/search_simulator.py (its table is in docs/benchmarks):
# one spike (x1.5) in a first sample, or one of two, must not end a candidate; medians of three and more
# are compared at what their noise allows.
_COLD_FACTOR = 1.6  # after the warm-up run
_EARLY_FACTORS = {1: 1.6, 2: 1.35}  # after that many samples
_NOISE = 0.05  # after n samples a candidate stays within 1 + _NOISE / sqrt(n) of the best
_RACING_ROUNDS = 31
_RACING_RUNS_PER_CANDIDATE = 4.3
_RACING_RUNS_AT_LEAST, _AND_PER_CANDIDATE = 22, 2  # for few candidates: the last rounds take what they take

# What is a tie: candidates of equal speed, measured with the noise that was seen, lie no further apart.
_TIE = 0.001  # and this much anyway
_TIE_RANGES = 0.7  # of the range that so many equal ones have on average
_PRIOR_NOISE, _PRIOR_MOVES = (
    0.0165,
    1,
)  # of one sample, agreed over the ranks; weighs as much as so many moves


def racing_runs(candidates: int) -> float:
    """Return the budget of runs for so many candidates."""
    few = _RACING_RUNS_AT_LEAST + _AND_PER_CANDIDATE * candidates
    return max(_RACING_RUNS_PER_CANDIDATE * candidates, few)


def racing(candidates: Sequence[int], *, n_warmup: int, n_repeat: int) -> Flow:
    """Try candidates in interleaved rounds of alternating order; drop each as soon as the samples allow.

    One warm-up run each, then rounds over those that are left, until one is left or the budget of about
    4.3 runs a candidate is spent. Of those that are left, the largest group that the noise allows to be
    equals is a tie, and its earliest candidate wins. `n_warmup` and `n_repeat` are those of `exhaustive`
    and not used. The idea of racing is that of Maron and Moore, "Hoeffding Races" (NIPS 1993), that of the
    tie Tukey's studentized range; with medians, and thresholds from simulation, because launch times have
    spikes.
    """
    agreed_ms: dict[int, float] = {}
    for index in candidates:
        agreed_ms[index] = yield Warmup(index)
    alive = _within(agreed_ms, list(candidates), _COLD_FACTOR)
    first = candidates[0]
    if first not in alive and agreed_ms[first] != math.inf:
        # Its run was the session's first: ranks came to it at different times, and a kernel waits for peers.
        agreed_ms[first] = yield Warmup(first)
        alive = _within(agreed_ms, list(candidates), _COLD_FACTOR)
    runs_left = racing_runs(len(candidates)) - len(candidates)
    noise = _Noise()
    samples = 0
    while samples < _RACING_ROUNDS and (runs_left >= len(alive) or not samples):
        samples += 1
        for index in alive if samples % 2 else reversed(alive):
            agreed_ms[index] = yield index
        runs_left -= len(alive)
        if samples <= 2 or samples % 2:  # the median of an even number is half a spike off
            noise.learn(samples, {index: agreed_ms[index] for index in alive})
            alive = _within(agreed_ms, alive, _EARLY_FACTORS.get(samples, 1 + _NOISE / math.sqrt(samples)))
        if len(alive) == 1:
            break
    tied = _equals(agreed_ms, alive, noise.of_medians(samples))
    return Winner(min(tied), tied)


class _Noise:
    """The noise of a sample, estimated from how the candidates' medians move against each other.

    When a median of n - 2 independent samples becomes one of n, the variance of the move is the sample's
    times 2 / (n (n - 2)). What moves all candidates alike, as the clock does, is not noise.
    """

    def __init__(self) -> None:
        self._squares, self._moves = _PRIOR_NOISE**2 * _PRIOR_MOVES, float(_PRIOR_MOVES)
        self._before_ms: dict[int, float] = {}

    def learn(self, samples: int, agreed_ms: dict[int, float]) -> None:
        """Take in the medians of `samples` each; of one and two they say more of spikes than of noise."""
        now_ms = {i: ms for i, ms in agreed_ms.items() if math.isfinite(ms) and samples >= 3}
        both = now_ms.keys() & self._before_ms.keys()
        if len(both) > 1:
            mean_now = math.fsum(now_ms[i] for i in both) / len(both)
            mean_before = math.fsum(self._before_ms[i] for i in both) / len(both)
            moves = [now_ms[i] / mean_now - self._before_ms[i] / mean_before for i in sorted(both)]
            scale = samples * (samples - 2) / 2 * len(both) / (len(both) - 1)
            self._squares += scale * math.fsum(move * move for move in moves)
            self._moves += len(moves)
        self._before_ms = now_ms

    def of_medians(self, samples: int) -> float:
        """Return the standard deviation of a median of so many samples, as a part of it."""
        return math.sqrt(self._squares / self._moves / max(samples, 1))


def _equals(agreed_ms: dict[int, float], alive: list[int], noise: float) -> list[int]:
    """Return the most candidates, the best among them, that may be equals under this noise."""
    timed = [index for index in alive if math.isfinite(agreed_ms[index])]
    if not timed:
        return alive[:1]
    fastest_first = sorted(timed, key=lambda index: (agreed_ms[index], index))
    best_ms = agreed_ms[fastest_first[0]]
    tied = 1
    for count in range(2, len(timed) + 1):
        over_best = agreed_ms[fastest_first[count - 1]] / best_ms - 1
        if over_best <= _TIE + _TIE_RANGES * noise * _mean_range(count):
            tied = count
    return fastest_first[:tied]


def _mean_range(count: int) -> float:
    """Return the mean range of `count` draws from the standard normal distribution (Blom's approximation)."""
    return 2 * NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _within(agreed_ms: dict[int, float], alive: list[int], factor: float) -> list[int]:
    """Return those of `alive` whose time is within `factor` of the best; a missing time counts as good."""
    known = [agreed_ms[index] for index in alive if not math.isnan(agreed_ms[index])]
    limit = min(known, default=math.inf) * factor
    kept = [index for index in alive if not agreed_ms[index] > limit and agreed_ms[index] != math.inf]
    return kept or alive[:1]


STRATEGIES: dict[str, Callable[..., Flow]] = {"exhaustive": exhaustive, "racing": racing}
