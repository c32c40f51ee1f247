"""Expected times of the candidates of a key, from the times that other keys of the kernel have told.

The logarithm of a time is the level of its key, what its config adds at all keys, shrunk, and a rest. The
rest of a key varies as that of near keys does, and alike for configs with near fields: a Gaussian process,
whose covariance the other keys give, after K. Swersky, J. Snoek and R. Adams, "Multi-Task Bayesian
Optimization" (NIPS 2013). Each time observed at the key narrows it. Every step is arithmetic or a root: the
same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from .arithmetic import decay, log
from .fields import TimesByKey, fields_of, likeness
from .keys import distance

# Chosen on tables of real kernels, keys held back: tests/unit/search/test_expectation_tables.py.
_NEAR = 2.0  # doublings of sizes that make a key count less, by e
_FAR = 0.001  # how much the farthest counts at least
_SHRINK = 0.3  # told times, of weight 1, that what a config adds is pulled to 0 by
_FITS = 3  # levels and what configs add, in turns
_PRIOR_KEYS = 1.0  # that the fields' covariance weighs as much as
_DOUBT_KEYS = 4.0  # near ones, that leave a rest with twice the variance that they show
_LEAST_REST = 0.05  # standard deviation of a rest, at least
_NOISE = 0.02  # of one observed time
_LEVEL_VARIANCE = 16.0  # of a key's level, in squared logarithms: nothing is known of it

_Weighted: TypeAlias = list[tuple[float, dict[int, float]]]  # of each told key: its weight, and by candidate


class Expectation:
    """The expected log ms of each candidate of one key, up to what is common to all of them.

    means, variances: by candidate, given what `observe` has told. An observation takes time in the number of
    candidates times that of told keys and observations. Keys that `distance` cannot compare tell nothing.
    """

    def __init__(self, key: str, texts: Sequence[str], told: TimesByKey) -> None:
        places = {text: index for index, text in enumerate(texts)}
        pairs: _Weighted = []
        for other in sorted(told):
            far = distance(key, other)
            logs = {places[text]: log(ms) for text, ms in sorted(told[other].items()) if text in places}
            if other != key and far < math.inf and logs:
                pairs.append((max(decay(min(far, 100.0) / _NEAR), _FAR), logs))
        self.keys = len(pairs)  # that have told something of these candidates
        self.told = {index for _, logs in pairs for index in logs}  # candidates that some key has told of
        self._fields = fields_of(texts)
        self._fit(pairs)
        self._factors: list[list[float]] = []  # of the observations, as in a Cholesky decomposition

    def _fit(self, told: _Weighted) -> None:
        """Set the means, and what `_covariance` takes: the rests of the told keys from them."""
        count = len(self._fields)
        rests = told
        masses = _sums([(weight, dict.fromkeys(logs, 1.0)) for weight, logs in told], count)
        self.means = [0.0] * count
        for _ in range(_FITS):
            rests = [(weight, _without_level(logs, self.means)) for weight, logs in told]
            added = zip(_sums(rests, count), masses, strict=True)
            self.means = [total / (mass + _SHRINK) for total, mass in added]
        varied = [(w, {index: part - self.means[index] for index, part in rest.items()}) for w, rest in rests]
        squares = math.fsum(weight * part * part for weight, rest in varied for part in rest.values())
        total = math.fsum(weight for weight, _ in varied) or 1.0
        doubt = 1 + _DOUBT_KEYS / total
        self._rest = doubt * max(squares / (math.fsum(masses) or 1.0), _LEAST_REST**2)
        effective = total * total / (math.fsum(weight * weight for weight, _ in varied) or 1.0)
        self._prior = _PRIOR_KEYS / (_PRIOR_KEYS + effective)
        self._patterns: list[dict[int, float]] = []
        for weight, rest in varied:
            scale = math.sqrt((1 - self._prior) * weight / total)
            self._patterns.append({index: scale * part for index, part in rest.items()})
        self._own = [_NOISE**2 + (0.0 if mass else self._rest) for mass in masses]
        self.variances = [self._covariance(index, index) for index in range(count)]

    def _covariance(self, one: int, other: int) -> float:
        """Return the covariance of two candidates before anything is observed."""
        total = _LEVEL_VARIANCE + (self._own[one] if one == other else 0.0)
        total += self._prior * self._rest * likeness(self._fields[one], self._fields[other])
        for pattern in self._patterns:
            if one in pattern and other in pattern:
                total += pattern[one] * pattern[other]
        return total

    def observe(self, index: int, ms: float) -> None:
        """Take in the time of a candidate at this key: conditions all others on it."""
        column = [self._covariance(index, other) for other in range(len(self._fields))]
        for factor in self._factors:
            if weight := factor[index]:
                column = [c - weight * f for c, f in zip(column, factor, strict=True)]
        spread = math.sqrt(max(column[index], _NOISE**2 / 4))
        factor = [c / spread for c in column]
        step = (log(ms) - self.means[index]) / spread
        self.means = [mean + step * f for mean, f in zip(self.means, factor, strict=True)]
        self.variances = [max(v - f * f, 0.0) for v, f in zip(self.variances, factor, strict=True)]
        self._factors.append(factor)


def _without_level(logs: dict[int, float], added: Sequence[float]) -> dict[int, float]:
    """Return a key's times less its level, the mean of them without what their configs add."""
    level = math.fsum(ms - added[index] for index, ms in logs.items()) / len(logs)
    return {index: ms - level for index, ms in logs.items()}


def _sums(weighted: _Weighted, count: int) -> list[float]:
    sums = [0.0] * count
    for weight, parts in weighted:
        for index, part in parts.items():
            sums[index] += weight * part
    return sums
