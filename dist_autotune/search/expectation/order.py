"""The order in which the candidates of a key are tried, and when the untried ones cannot pay."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from ...codec import digest
from .arithmetic import log, normal_below
from .model import Expectation, Told

GAIN = 0.01  # an untried candidate must win by more
CHANCE = 0.05  # that any untried one does so, below which the search ends
AT_LEAST = 3  # candidates: the incumbent and two more
KEYS = 4  # other keys that have told times; with fewer all candidates are tried
LIKELY = 3  # times as many as are tried may be tried: what is observed changes what is expected
MANY = 256  # candidates: of more, a few are tried even if no other key tells anything
FIRST_WAVE, WAVE, MOST_COMPILED = 48, 24, 144  # of them: spread ones, then by what these let expect
FAILED = 2.0  # times the slowest of them
IDLE_WAVES = 2  # in a row that find nothing faster by more than GAIN: then no more are compiled
_MANY, _SHARE, _SHARE_OF_MANY = 100, 0.25, 0.07


def most_tried(candidates: int) -> int:
    """Return how many candidates are tried at most: a quarter, of a hundred and more 7 %."""
    share = _SHARE if candidates < _MANY else _SHARE_OF_MANY
    return min(max(AT_LEAST, int(share * candidates)), candidates)


def best_start(key: str, texts: Collection[str], told: Told) -> str:
    """Return the text of the candidate that is expected to be the fastest at an untuned key; "": unknown.

    Unknown: fewer than KEYS other keys have told times of these candidates. The order of `texts` is nothing.
    """
    ordered = sorted(texts)
    if len(told) < KEYS or (expectation := Expectation(key, ordered, told)).keys < KEYS:
        return ""
    return ordered[min(expectation.told, key=lambda index: (expectation.means[index], index))]


class Order:
    """Which candidate to try next, one after another; the first ones are given.

    first: the incumbent. After each trial call `tell`.
    likely: the candidates that may be tried, those expected to be the fastest; others need not be compiled.
    most: how many are tried at most.
    """

    def __init__(self, expectation: Expectation, first: int) -> None:
        self.expectation = expectation
        means = expectation.means
        self.most = most_tried(len(means))
        ordered = sorted(range(len(means)), key=lambda index: (means[index], index))
        self.likely = frozenset({first, *ordered[: min(LIKELY * self.most, MOST_COMPILED)]})
        self.tried: list[int] = []
        self._failed: set[int] = set()
        self._first, self._best = first, math.inf

    def next(self) -> int | None:
        """Return the candidate of the greatest chance to win; None: no untried one is worth a trial."""
        if not (self.tried or self._first in self._failed):
            return self._first
        if len(self.tried) >= self.most:
            return None
        ordered, none_wins = self._promising(self.likely)
        if not ordered or (len(self.tried) >= AT_LEAST and 1 - none_wins < CHANCE):
            return None
        return ordered[0]

    def widen(self) -> bool:
        """Let more candidates be tried, after all that `next` has given; return whether there are any."""
        return False

    def tell(self, index: int, ms: float) -> None:
        """Record the time of a candidate that was tried; nan: it has none; inf: it was banned."""
        if ms == math.inf:
            self._failed.add(index)
            return
        self.tried.append(index)
        if ms > 0:
            self.expectation.observe(index, ms)
            self._best = min(self._best, log(ms))

    def untried_text(self) -> str:
        """Return what was not tried, and why; "": nothing."""
        out, means = {*self.tried, *self._failed}, self.expectation.means
        left = [mean for index, mean in enumerate(means) if index not in out]
        if not left or self._best == math.inf:
            return ""
        percent = int(100 * (math.exp(min(left) - self._best) - 1))
        why = f"the rest was expected at least {percent} % slower"
        if percent < 1:
            why = "more is not allowed, though some of the rest may be faster"
        return f"tried {len(means) - len(left)} of {len(means)}; {why}"

    def _promising(self, among: Collection[int]) -> tuple[list[int], float]:
        """Return the untried candidates, the likeliest winner first, and the chance that none wins."""
        chances, means = dict(self._chances(among)), self.expectation.means
        none_wins = 1.0
        for chance in chances.values():
            none_wins *= 1 - chance
        return sorted(chances, key=lambda index: (-chances[index], means[index], index)), none_wins

    def _chances(self, among: Collection[int]) -> Iterator[tuple[int, float]]:
        """Yield the untried candidates, each with its chance to win by more than GAIN."""
        limit, means, variances = (
            self._best + log(1 - GAIN),
            self.expectation.means,
            self.expectation.variances,
        )
        for index in sorted({*among}.difference(self.tried, self._failed)):
            known = self._best < math.inf
            z = (limit - means[index]) / math.sqrt(max(variances[index], 1e-8)) if known else -means[index]
            yield index, normal_below(z)


class Waves(Order):
    """The order of many candidates of which other keys tell too little.

    FIRST_WAVE of them are spread over all; their times let expect which WAVE to try next, and so on.
    """

    def __init__(self, key: str, texts: Sequence[str], told: Told) -> None:
        super().__init__(Expectation(key, texts, told), first=0)
        self._key, self._texts, self._told = key, texts, told
        self._own: dict[int, float] = {}
        self._best_of_waves: list[float] = []
        self.most = MOST_COMPILED
        self._spread = [0, *sorted(range(1, len(texts)), key=lambda index: digest(texts[index]))]
        self._wave = self._spread[:FIRST_WAVE]
        self.likely = frozenset(self._wave)

    def next(self) -> int | None:
        out = {*self.tried, *self._failed}
        return next((index for index in self._wave if index not in out), None)

    def tell(self, index: int, ms: float) -> None:
        if 0 < ms < math.inf:
            self._own[index], self._best = ms, min(self._best, log(ms))
        super().tell(index, math.nan if ms < math.inf else ms)  # `widen` takes them all in at once

    def widen(self) -> bool:
        # What times of one key alone say of chances is too sure of itself: waves that find nothing say more.
        self._best_of_waves.append(self._best)
        earlier = self._best_of_waves[:-IDLE_WAVES]
        is_idle = bool(earlier) and earlier[-1] - self._best < GAIN
        if len(self.likely) >= self.most or is_idle:
            return False
        # What fails counts as slow: so do its fields, and the next wave has fewer that do not fit the device.
        failed = dict.fromkeys(sorted(self._failed), FAILED * max(self._own.values(), default=1.0))
        self.expectation = Expectation(self._key, self._texts, self._told, {**self._own, **failed})
        ordered = self._promising(range(len(self._texts)))[0] if self._own else self._spread
        self._wave = [index for index in ordered if index not in self.likely][:WAVE]
        self.likely |= {*self._wave}
        return bool(self._wave)
