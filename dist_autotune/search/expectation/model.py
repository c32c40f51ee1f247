"""Expected times of the candidates of a key, from the times that other keys of the kernel have told.

The logarithm of a time is the level of its key, what its config adds at all keys and for each doubling of a
size, shrunk, and a rest. The rest of a key varies as that of near keys does, and alike for configs with near
fields: a Gaussian process, whose covariance the other keys give, after K. Swersky, J. Snoek and R. Adams,
"Multi-Task Bayesian Optimization" (NIPS 2013). Each time observed at the key narrows it. Every step is
arithmetic or a root: the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .arithmetic import decay, log
from .fields import UNKNOWN, Fills, TimesByKey, by_place, fields_of, likenesses
from .keys import distance, doublings

# Chosen on tables of real kernels, keys held back: tests/unit/search/test_expectation_tables.py.
_NEAR = 2.0  # doublings of sizes that make a key count less, by e
_FAR = 0.001  # how much the farthest counts at least
_SHRINK = 0.3  # told times, of weight 1, that what a config adds is pulled to 0 by
_SHRINK_SLOPE = 1.0  # the same of what it adds more for each doubling of a size
_SLOPES_KEYS = 8  # told keys; of fewer, such slopes are too sure of themselves
_FITS = 4  # levels and what configs add, in turns
_PRIOR_KEYS = 1.0  # that the fields' covariance weighs as much as
_DOUBT_KEYS = 4.0  # near ones, that leave a rest with twice the variance that they show
_LEAST_REST = 0.05  # standard deviation of a rest, at least
_NOISE = 0.02  # of one observed time
_LEVEL_VARIANCE = 16.0  # of a key's level, in squared logarithms: nothing is known of it


@dataclass(frozen=True)
class _Told:
    """What a key has told: logs of ms by candidate. at: 1, and its sizes in doublings of the new key's."""

    weight: float
    logs: dict[int, float]
    at: tuple[float, ...]


class Expectation:
    """The expected log ms of each candidate of one key, up to what is common to all of them.

    means, variances: by candidate, given what `observe` has told. An observation takes time in the number of
    candidates times that of told keys and observations. Keys that `distance` cannot compare tell nothing.
    fills: of the key's own launches; where they are known, told ones count as if they filled the SMs' time.
    """

    def __init__(self, key: str, texts: Sequence[str], told: TimesByKey, fills: Fills = UNKNOWN) -> None:
        self.means: list[float] = []
        pairs: list[_Told] = []
        for other in sorted(told):
            far = distance(key, other)
            known = by_place(told[other], texts, fills=bool(fills))
            if other != key and far < math.inf and known:
                logs = {index: log(ms) for index, ms in known.items()}
                weight = max(decay(min(far, 100.0) / _NEAR), _FAR)
                pairs.append(_Told(weight, logs, (1.0, *doublings(key, other))))
        self.keys = len(pairs)  # that have told something of these candidates
        self.told = {index for each in pairs for index in each.logs}  # candidates that some key has told of
        self._fields = fields_of(texts)
        self._fit(pairs)
        if fills:
            unfilled = (log(fills.get(text, 1.0)) / 2 for text in texts)
            self.means = [mean - each for mean, each in zip(self.means, unfilled, strict=True)]
        self._factors: list[list[float]] = []  # of the observations, as in a Cholesky decomposition

    def _fit(self, told: list[_Told]) -> None:
        """Set the means, and what `_covariance` takes: the rests of the told keys from them."""
        count = len(self._fields)
        unknowns = len(told[0].at) if len(told) >= _SLOPES_KEYS else 1
        rests = [_without_level(each.logs) for each in told]
        added = [[0.0] * count for _ in range(unknowns)]
        masses = [_masses(told, place, count) for place in range(unknowns)]
        for place in [*range(unknowns)] * _FITS:
            sizes = [each.at[place] for each in told]
            pulls = [0.0] * count
            for each, size, rest in zip(told, sizes, rests, strict=True):
                weight = each.weight * size
                for index, part in rest.items():
                    pulls[index] += weight * part
            shrink, before = _SHRINK_SLOPE if place else _SHRINK, added[place]
            added[place] = [
                (pull + mass * own) / (mass + shrink)
                for pull, mass, own in zip(pulls, masses[place], before, strict=True)
            ]
            steps = [now - own for now, own in zip(added[place], before, strict=True)]
            rests = [
                _without_level({index: part - size * steps[index] for index, part in rest.items()})
                for size, rest in zip(sizes, rests, strict=True)
            ]
        self.means = added[0]
        varied = [(each.weight, rest) for each, rest in zip(told, rests, strict=True)]
        squares = math.fsum(weight * part * part for weight, rest in varied for part in rest.values())
        total = math.fsum(weight for weight, _ in varied) or 1.0
        doubt = 1 + _DOUBT_KEYS * unknowns / total
        self._rest = doubt * max(squares / (math.fsum(masses[0]) or 1.0), _LEAST_REST**2)
        effective = total * total / (math.fsum(weight * weight for weight, _ in varied) or 1.0)
        self._prior = _PRIOR_KEYS / (_PRIOR_KEYS + effective)
        self._patterns: list[dict[int, float]] = []
        for weight, rest in varied:
            scale = math.sqrt((1 - self._prior) * weight / total)
            self._patterns.append({index: scale * part for index, part in rest.items()})
        self._own = [_NOISE**2 + (0.0 if mass else self._rest) for mass in masses[0]]
        self.variances = [self._covariance(index, index, 1.0) for index in range(count)]

    def _covariance(self, one: int, other: int, alike: float) -> float:
        """Return the covariance of two candidates before anything is observed."""
        total = _LEVEL_VARIANCE + (self._own[one] if one == other else 0.0)
        total += self._prior * self._rest * alike
        for pattern in self._patterns:
            if one in pattern and other in pattern:
                total += pattern[one] * pattern[other]
        return total

    def observe(self, index: int, ms: float) -> None:
        """Take in the time of a candidate at this key: conditions all others on it."""
        alike = likenesses(self._fields, index)
        column = [self._covariance(index, other, each) for other, each in enumerate(alike)]
        for factor in self._factors:
            if weight := factor[index]:
                column = [c - weight * f for c, f in zip(column, factor, strict=True)]
        spread = math.sqrt(max(column[index], _NOISE**2 / 4))
        factor = [c / spread for c in column]
        step = (log(ms) - self.means[index]) / spread
        self.means = [mean + step * f for mean, f in zip(self.means, factor, strict=True)]
        self.variances = [max(v - f * f, 0.0) for v, f in zip(self.variances, factor, strict=True)]
        self._factors.append(factor)


def _without_level(logs: dict[int, float]) -> dict[int, float]:
    level = math.fsum(logs.values()) / len(logs)
    return {index: part - level for index, part in logs.items()}


def _masses(told: list[_Told], place: int, count: int) -> list[float]:
    """Return of each candidate what told keys weigh, times the square of that place of `at`."""
    masses = [0.0] * count
    for each in told:
        mass = each.weight * each.at[place] * each.at[place]
        for index in each.logs:
            masses[index] += mass
    return masses
