"""Search strategies: generators that decide which candidate to try next.

A flow is `strategy(candidates, *, n_warmup, n_repeat)` over candidate indices. It yields an index, or
`Warmup(index)` for a run that is no sample, and is sent the candidate's agreed ms so far: `inf` where it is
banned, `nan` without a sample; after a `Warmup` that run's time. It returns the winner's index.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Container, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ..errors import FlowFailed, TuningError


@dataclass(frozen=True)
class Warmup:
    """Ask for a run of candidate `index` that is no sample."""

    index: int


@dataclass(frozen=True)
class Pause:
    """Ask for a run without a trial, in which ranks compile the next candidates; answered by nan."""


Flow: TypeAlias = Generator["int | Warmup | Pause", float, int]


class Strategy(Protocol):
    """The type of `search=`: a function that returns a flow."""

    def __call__(self, candidates: Sequence[int], *, n_warmup: int, n_repeat: int) -> Flow: ...


class Winner(int):
    """The winner's index; the incumbent wins if it is among `tied`. A bare index is final.

    ms: of candidates; of two samples the faster one, as the other may be a spike.
    """

    tied: frozenset[int]
    ms: Mapping[int, float]

    def __new__(cls, index: int, tied: Collection[int], ms: Mapping[int, float] = {}) -> Winner:
        winner = super().__new__(cls, index)
        winner.tied, winner.ms = frozenset(tied), ms
        return winner


class AgreedMs(float):
    """An agreed time of which a part may be the host's: the candidate's own is at least `least_ms`."""

    least_ms: float

    def __new__(cls, ms: float, least_ms: float) -> AgreedMs:
        agreed = super().__new__(cls, ms)
        agreed.least_ms = least_ms
        return agreed


def interval(ms: float, host_ms: float) -> float:
    """Return an agreed time that may hold `host_ms` of the host's."""
    return AgreedMs(ms, ms - host_ms) if host_ms > 0 else ms


def least(ms: float) -> float:
    """Return the least that a candidate of this agreed time may take."""
    return ms.least_ms if isinstance(ms, AgreedMs) else ms


_ASKS_PER_CANDIDATE = 1000  # a flow that asks for banned candidates again and again is broken


class RunningFlow:
    """Asks for one of so many candidates after another; FlowFailed where the strategy breaks its contract."""

    def __init__(
        self, strategy: Strategy, candidates: int, *, name: str, n_warmup: int, n_repeat: int
    ) -> None:
        self.index: int | None = None  # of the candidate asked for; None: it has not begun, or pauses
        self.is_warmup = self.is_paused = False
        self._name = name
        self._candidates = candidates
        self.count = 0  # which warm-up or sample of its candidate it asks for, from 1
        self._times_asked: Counter[tuple[int, bool]] = Counter()
        with self._named_errors():
            self._flow = strategy(range(candidates), n_warmup=n_warmup, n_repeat=n_repeat)
        if not hasattr(self._flow, "send"):
            raise FlowFailed(f"search={self._name}: returned {self._flow!r}, expected a generator")

    def samples(self, index: int) -> int:
        """Return how many samples of a candidate have been asked for."""
        return self._times_asked[index, False]

    def resume(self, ms: float | None, banned: Container[int]) -> int | None:
        """Send the time of the run asked for (None: begin); return the winner, None while there is none."""
        for _ in range(_ASKS_PER_CANDIDATE * self._candidates):
            try:
                with self._named_errors():
                    asked = next(self._flow) if ms is None else self._flow.send(ms)
            except StopIteration as stop:
                winner = self._checked(stop.value, "returned")
                return stop.value if isinstance(stop.value, Winner) else winner
            self.is_warmup, self.is_paused = isinstance(asked, Warmup), isinstance(asked, Pause)
            if isinstance(asked, Pause):
                self.index = None
                return None
            self.index = self._checked(asked.index if isinstance(asked, Warmup) else asked, "asked for")
            self._times_asked[self.index, self.is_warmup] += 1
            self.count = self._times_asked[self.index, self.is_warmup]
            if self.index not in banned:
                return None
            ms = math.inf  # banned: answered at once
        raise FlowFailed(
            f"search={self._name}: keeps asking for candidates that are banned, whose time is inf; ask for "
            "others, or return the winner"
        )

    def _checked(self, index: Any, verb: str) -> int:
        with contextlib.suppress(TypeError):  # no integer (numpy's are)
            if 0 <= operator.index(index) < self._candidates:
                return operator.index(index)
        raise FlowFailed(
            f"search={self._name}: {verb} {index!r}, which is none of {self._candidates} candidates"
        )

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (StopIteration, TuningError):
            raise
        except Exception as error:
            raise FlowFailed(f"search={self._name}: {type(error).__name__}: {error}") from error


def exhaustive(candidates: Sequence[int], *, n_warmup: int, n_repeat: int) -> Flow:
    """Give each candidate in order `n_warmup` unmeasured and `n_repeat` measured runs; return the fastest."""
    agreed_ms: dict[int, float] = {}
    for index in candidates:
        runs: list[int | Warmup] = [*[Warmup(index)] * n_warmup, *[index] * n_repeat]
        for asked in runs:
            ms = yield asked
            agreed_ms[index] = math.inf if math.isnan(ms) else ms
            if ms == math.inf:
                break
    best = min(candidates, key=agreed_ms.__getitem__)
    return Winner(best, [index for index in candidates if agreed_ms[index] == agreed_ms[best]])


# Thresholds of `racing`, chosen with benchmarks/simulation/search_simulator.py (table: docs/benchmarks).
_SINGLE_FACTOR = 10.0  # after the warm-up run, or a single sample: anything else may explain less
PAIR_FACTOR = 1.12  # after two samples, of the faster one of each: one of them may be a spike
_ERRORS = 1.0  # later a candidate stays within so many standard errors of the best ...
_FIRST_ERRORS = 6.0  # ... and the first one, which wins ties, within so many
_RACING_ROUNDS = 41
_RACING_RUNS_PER_CANDIDATE = 4.3
_RACING_RUNS_AT_LEAST = 69  # few candidates: near ties get more samples

TIE = 0.01  # candidates this near to the best are equals
_TIE_ERRORS = 2.8  # so is the first one within so many standard errors
_PRIOR_NOISE, _PRIOR_MOVES = 0.025, 4  # of one sample, agreed over the ranks; weighs as so many moves
_OF_DEFAULT = 3  # samples of a default that the race has not timed
_FEW_SAMPLES = 9  # of each candidate: after fewer a race knows little more of its noise than the prior
_MOST_NOISE = 0.06  # that one move may speak for: a median that moves further has met spikes


def racing_runs(candidates: int) -> float:
    """Return the budget of runs for so many candidates."""
    return max(_RACING_RUNS_PER_CANDIDATE * candidates, _RACING_RUNS_AT_LEAST)


def racing(candidates: Sequence[int], *, n_warmup: int, n_repeat: int) -> Flow:
    """Try candidates in interleaved rounds of alternating order; drop each as soon as the samples allow.

    One warm-up run each, then rounds until one is left or the budget is spent. An `AgreedMs` counts as its
    least. Candidates within 1 % of the best tie; so does the first one within the measured noise.
    """
    agreed_ms: dict[int, float] = {}
    for index in candidates:
        agreed_ms[index] = yield Warmup(index)
    alive = within(agreed_ms, list(candidates), _SINGLE_FACTOR)
    first = candidates[0]
    if first not in alive and agreed_ms[first] != math.inf:
        # Its run was the session's first: ranks came to it at different times, and a kernel waits for peers.
        agreed_ms[first] = yield Warmup(first)
        alive = within(agreed_ms, list(candidates), _SINGLE_FACTOR)
    return (yield from rounds(alive, first, racing_runs(len(candidates)) - len(candidates)))


def rounds(
    alive: list[int], first: int, runs_left: float, more_runs: int = 0
) -> Generator[int, float, Winner]:
    """Race the `alive` candidates without warm-up runs; `first` wins ties within the noise.

    more_runs: of the fastest and `first`, where the noise may still explain more than 1 % between them.
    """
    agreed_ms: dict[int, float] = {}
    single_ms: dict[int, float] = {}  # of the first sample
    known_ms: dict[int, float] = {}  # of two samples the faster one
    noise = _Noise()
    samples = 0
    while samples < _RACING_ROUNDS and (runs_left >= len(alive) or not samples):
        samples += 1
        for index in alive if samples % 2 else reversed(alive):
            agreed_ms[index] = yield index
        runs_left -= len(alive)
        known_ms |= {index: agreed_ms[index] for index in alive}
        if samples == 1:
            single_ms = dict(known_ms)
            alive = within(agreed_ms, alive, _SINGLE_FACTOR)
        elif samples == 2:
            known_ms |= {index: faster_of_two(single_ms[index], agreed_ms[index]) for index in alive}
            alive = within(known_ms, alive, PAIR_FACTOR)
        elif samples % 2:  # the median of an even number is half a spike off
            noise.learn(samples, {index: agreed_ms[index] for index in alive})
            error = noise.of_differences(samples)
            stay = set(within(agreed_ms, alive, 1 + _ERRORS * error))
            stay |= {first} & set(within(agreed_ms, alive, 1 + max(TIE, _FIRST_ERRORS * error)))
            alive = [index for index in alive if index in stay]
        if len(alive) == 1:
            break
    tied = set(_timed_within(agreed_ms, alive, 1 + TIE))
    best = min(tied, key=agreed_ms.__getitem__, default=first)
    if first in alive:
        made = yield from _duel(best, first, agreed_ms, noise, samples, more_runs)
        samples += made
        known_ms |= {index: agreed_ms[index] for index in (best, first) if made}
    tied |= {first} & set(_timed_within(agreed_ms, alive, noise.widest_tie(samples)))
    winner = first if first in tied else min(tied, default=alive[0])
    return Winner(winner, tied or {winner}, known_ms)


def _duel(
    best: int, first: int, agreed_ms: dict[int, float], noise: _Noise, samples: int, runs: int
) -> Generator[int, float, int]:
    """Run both on while the noise may explain their difference; return the rounds made.

    agreed_ms: is updated. samples: of each so far. runs: at most.
    """
    made = 0
    while runs >= 2 * (made + 1) and agreed_ms[best] * (1 + TIE) < agreed_ms[first] < math.inf:
        if agreed_ms[first] > noise.widest_tie(samples + made) * agreed_ms[best]:
            break
        for index in (best, first) if (samples + made) % 2 else (first, best):
            agreed_ms[index] = yield index
        made += 1
        # Else the race has learned it: more looks at two candidates would let one win by luck.
        if samples < _FEW_SAMPLES and (samples + made) % 2 and samples + made > 2:
            noise.learn(samples + made, {index: agreed_ms[index] for index in (best, first)})
    return made


def faster_of_two(first_ms: float, median_ms: float) -> float:
    """Return the faster one of two samples, of the first one and the median of both."""
    if not (math.isfinite(first_ms) and math.isfinite(median_ms)):
        return median_ms
    if isinstance(first_ms, AgreedMs) or isinstance(median_ms, AgreedMs):
        return AgreedMs(median_ms, min(least(first_ms), least(median_ms)))
    return min(first_ms, median_ms, 2 * median_ms - first_ms)


class _Noise:
    """The noise of a sample, estimated from how the candidates' medians move against each other.

    From n - 2 to n independent samples, a median's move has the sample's variance times 2 / (n (n - 2)).
    """

    def __init__(self) -> None:
        self._squares, self._moves = _PRIOR_NOISE**2 * _PRIOR_MOVES, float(_PRIOR_MOVES)
        self._before_ms: dict[int, float] = {}

    def learn(self, samples: int, agreed_ms: dict[int, float]) -> None:
        """Take in the medians of `samples` each, at least three; of fewer they say more of spikes."""
        # Only moves against the others count: the device's clock moves all alike, which is no noise.
        now_ms = {i: ms for i, ms in agreed_ms.items() if math.isfinite(ms)}
        both = now_ms.keys() & self._before_ms.keys()
        if len(both) > 1:
            mean_now = math.fsum(now_ms[i] for i in both) / len(both)
            mean_before = math.fsum(self._before_ms[i] for i in both) / len(both)
            moves = [now_ms[i] / mean_now - self._before_ms[i] / mean_before for i in sorted(both)]
            scale = samples * (samples - 2) / 2 * len(both) / (len(both) - 1)
            self._squares += math.fsum(min(scale * move * move, _MOST_NOISE**2) for move in moves)
            self._moves += len(moves)
        self._before_ms = now_ms

    def of_differences(self, samples: int) -> float:
        """Return the standard error of the difference of two medians of so many samples, as a part of one."""
        return math.sqrt(2 * self._squares / self._moves / max(samples, 1))

    def widest_tie(self, samples: int) -> float:
        """Return the factor of the best up to which the first candidate may be its equal."""
        return 1 + max(TIE, _TIE_ERRORS * self.of_differences(samples))


def timing_default(
    candidates: Sequence[int], *, n_warmup: int, n_repeat: int, strategy: Strategy, default: int
) -> Flow:
    """Search by `strategy`; then time `default`, if it ran and has no sample, so that the gain is known."""
    flow = strategy(candidates, n_warmup=n_warmup, n_repeat=n_repeat)
    ran, timed = set[int](), set[int]()
    ms: float | None = None
    while True:
        try:
            asked = next(flow) if ms is None else flow.send(ms)
        except StopIteration as stop:
            winner: int = stop.value
            break
        ms = yield asked
        if isinstance(asked, Warmup):
            ran |= {asked.index} if ms != math.inf else set()
        elif not isinstance(asked, Pause) and math.isfinite(ms):
            timed.add(int(asked))
    for _ in range(_OF_DEFAULT):
        if default in ran - timed and ms != math.inf:
            ms = yield default
    return winner


def within(agreed_ms: dict[int, float], alive: list[int], factor: float) -> list[int]:
    """Return the `alive` that may be within `factor` of the best; a missing time counts as good."""
    known = [agreed_ms[index] for index in alive if not math.isnan(agreed_ms[index])]
    limit = min(known, default=math.inf) * factor
    kept = [index for index in alive if not least(agreed_ms[index]) > limit and agreed_ms[index] != math.inf]
    return kept or alive[:1]


def _timed_within(agreed_ms: dict[int, float], alive: list[int], factor: float) -> list[int]:
    """Return the `alive` with a known time within `factor` of the best."""
    timed = [index for index in alive if math.isfinite(agreed_ms[index])]
    limit = min((agreed_ms[index] for index in timed), default=math.inf) * factor
    return [index for index in timed if agreed_ms[index] <= limit]


# `expected` races all candidates where other keys tell too little.
STRATEGIES: dict[str, Callable[..., Flow]] = {
    "exhaustive": exhaustive,
    "racing": racing,
    "expected": racing,
}
