"""Search strategies: pure generators that decide which candidate to try next.

A flow is `strategy(candidates, *, n_warmup, n_repeat)` over a sequence of candidate indices. It
yields an index (the next run launches that candidate and measures it) or `Warmup(index)` (the next
run launches it and measures nothing), and is sent that candidate's agreed time so far in
milliseconds: `inf` when it was banned or cannot win, `nan` while there is no sample of it. It
returns the winner's index. After `Warmup` of a candidate without samples it is sent that run's time.
A flow knows neither torch nor ranks, and since it is the same on all ranks it needs no message of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
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
    return min(candidates, key=agreed_ms.__getitem__)


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


# Thresholds of `racing`, chosen with benchmarks/search_simulator.py (its table is in docs/benchmarks):
# one spike (x1.5) in a first sample, or one of two, must not end a candidate; medians of three and more
# are compared at what their noise allows.
_COLD_FACTOR = 1.6  # after the warm-up run
_EARLY_FACTORS = {1: 1.6, 2: 1.35}  # after that many samples
_NOISE = 0.04  # after n samples a candidate stays within 1 + _NOISE / sqrt(n) of the best
_TIE = 0.003  # of the best: the earliest candidate wins
_RACING_ROUNDS = 13
_RACING_RUNS_PER_CANDIDATE = 4.2
_RACING_RUNS_AT_LEAST = 26


def racing_runs(candidates: int) -> float:
    """Return the budget of runs for so many candidates."""
    return max(_RACING_RUNS_PER_CANDIDATE * candidates, _RACING_RUNS_AT_LEAST)


def racing(candidates: Sequence[int], *, n_warmup: int, n_repeat: int) -> Flow:
    """Try candidates in interleaved rounds of alternating order; drop each as soon as the samples allow.

    One warm-up run each, then rounds over those that are left, until one is left or the budget of about
    4.2 runs a candidate is spent. `n_warmup` and `n_repeat` are those of `exhaustive` and not used. The
    idea of racing is that of Maron and Moore, "Hoeffding Races" (NIPS 1993); with medians, and thresholds
    from simulation, because launch times have spikes.
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
    for samples in range(1, _RACING_ROUNDS + 1):
        if runs_left < len(alive) and samples > 1:
            break
        for index in alive if samples % 2 else reversed(alive):
            agreed_ms[index] = yield index
        runs_left -= len(alive)
        if samples <= 2 or samples % 2:  # the median of an even number is half a spike off
            alive = _within(agreed_ms, alive, _EARLY_FACTORS.get(samples, 1 + _NOISE / math.sqrt(samples)))
        if len(alive) == 1:
            break
    return min(_within(agreed_ms, alive, 1 + _TIE))


def _within(agreed_ms: dict[int, float], alive: list[int], factor: float) -> list[int]:
    """Return those of `alive` whose time is within `factor` of the best; a missing time counts as good."""
    known = [agreed_ms[index] for index in alive if not math.isnan(agreed_ms[index])]
    limit = min(known, default=math.inf) * factor
    kept = [index for index in alive if not agreed_ms[index] > limit and agreed_ms[index] != math.inf]
    return kept or alive[:1]


STRATEGIES: dict[str, Callable[..., Flow]] = {"exhaustive": exhaustive, "racing": racing}
TIES = {"racing": _TIE}  # this part above the best is still equal to it; others: equal times only
