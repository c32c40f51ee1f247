"""The order in which the candidates of a key are tried, and when the untried ones cannot pay."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from .arithmetic import log, normal_below
from .model import Expectation, Told

GAIN = 0.01  # an untried candidate must win by more
CHANCE = 0.05  # that any untried one does so, below which the search ends
AT_LEAST = 3  # candidates: the incumbent and two more
KEYS = 4  # other keys that have told times; with fewer all candidates are tried
LIKELY = 3  # times as many as are tried may be tried: what is observed changes what is expected
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
    expectation = Expectation(key, ordered, told)
    if expectation.keys < KEYS:
        return ""
    return ordered[min(expectation.told, key=lambda index: (expectation.means[index], index))]


class Order:
    """Which candidate to try next, one after another; the first ones are given.

    first: the incumbent. After each trial call `tell`.
    likely: the candidates that may be tried, those expected to be the fastest; others need not be compiled.
    """

    def __init__(self, expectation: Expectation, first: int) -> None:
        self.expectation = expectation
        means = expectation.means
        ordered = sorted(range(len(means)), key=lambda index: (means[index], index))
        self.likely = frozenset({first, *ordered[: LIKELY * most_tried(len(means))]})
        self.tried: list[int] = []
        self._failed: set[int] = set()
        self._first, self._best = first, math.inf

    def next(self, banned: Collection[int] = ()) -> int | None:
        """Return the candidate of the greatest chance to win; None: no untried one is worth a trial."""
        if not (self.tried or self._first in self._failed or self._first in banned):
            return self._first
        chances = dict(self._chances(banned))
        if not chances or len(self.tried) >= most_tried(len(self.expectation.means)):
            return None
        none_wins = 1.0
        for chance in chances.values():
            none_wins *= 1 - chance
        if len(self.tried) >= AT_LEAST and 1 - none_wins < CHANCE:
            return None
        means = self.expectation.means
        return max(chances, key=lambda index: (chances[index], -means[index], -index))

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

    def _chances(self, banned: Collection[int]) -> Iterator[tuple[int, float]]:
        """Yield the untried candidates, each with its chance to win by more than GAIN."""
        out, limit = {*self.tried, *self._failed, *banned}, self._best + log(1 - GAIN)
        means, variances = self.expectation.means, self.expectation.variances
        for index, (mean, variance) in enumerate(zip(means, variances, strict=True)):
            if index in self.likely and index not in out:
                known = self._best < math.inf
                z = (limit - mean) / math.sqrt(max(variance, 1e-8)) if known else -mean
                yield index, normal_below(z)
