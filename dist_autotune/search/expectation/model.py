"""Expected times of a key's candidates, from times of the kernel's other keys and from its own trials.

The logarithm of a time is the sum of the level of its key, the shrunk effect of its config at all keys and
per doubling of a size, and a rest. The rest is a Gaussian process over near keys and configs with near
fields; the other keys give its covariance, after K. Swersky, J. Snoek and R. Adams, "Multi-Task Bayesian
Optimization" (NIPS 2013). Without other keys, fields alone do. Each time observed at the key narrows it
(C. Rasmussen and C. Williams, "Gaussian Processes for Machine Learning", 2006, 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from .fields import UNKNOWN, Fills, Likeness, TimesByKey, by_place, texts_by_field
from .keys import distance, doublings

# Chosen on tables of real kernels: python -m benchmarks.simulation.expected_search
_NEAR = 2.0  # doublings of sizes that make a key count less, by e
_FAR = 0.001  # how much the farthest counts at least
_SHRINK = 0.1  # told times, of weight 1, that what a config adds is pulled to 0 by
_SHRINK_SLOPE = 1.0  # the same of what it adds more for each doubling of a size
_SLOPES_KEYS = 8  # told keys; of fewer, such slopes are too sure of themselves
_FITS = 4  # levels and what configs add, in turns
_PRIOR_KEYS = 1.0  # that the fields' covariance weighs as much as
_DOUBT_KEYS = 4.0  # near ones, that leave a rest with twice the variance that they show
_LEAST_REST = 0.05  # standard deviation of a rest, at least
_UNTOLD_REST = 0.35  # of one that no key tells of
_APART = 0.02  # of its variance: what a candidate shares with no other, however alike
_OWN_EFFECT = 0.3  # of what a config adds at all keys, that its fields say nothing of
_NOISE = 0.02  # of one observed time
_LEVEL_VARIANCE = 16.0  # of a key's level, in squared logarithms: nothing is known of it
_WEIGHT = 3.0  # trials that the prior variance weighs as much as
_DOUBT = 1.5  # times what trials show: variances where no key tells

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


class Expectation:
    """`means` and `variances` of each place's log ms, given the times sent to `observe`.

    Means are up to a common term. rest: the standard deviation of the part that fields explain.
    """

    def __init__(self, likeness: Likeness, *, rest: float = _UNTOLD_REST, noise: float = _NOISE) -> None:
        self._likeness, self.means = likeness, np.zeros(likeness.count)
        self.keys, self.told = 0, frozenset[int]()  # other keys that tell, and the candidates they tell of
        self._noise, self._prior_rest = noise, rest**2 * (1 - _APART)
        self._own = np.full(likeness.count, noise**2 + rest**2 * _APART)
        self._patterns = np.empty((0, likeness.count))  # how the rests of told keys vary together
        self._effects = 0.0  # variance of what configs add at all keys; `_smooth` tells it from told ones
        self._smooth = self._alike = np.empty((0, likeness.count))
        self._begin()

    def _begin(self) -> None:
        self._left = _LEVEL_VARIANCE + self._own + self._prior_rest + (self._patterns**2).sum(0)
        self._left = self._left + self._effects * np.maximum(1 - (self._alike * self._smooth).sum(0), 0.0)
        self._factors = np.empty((0, self._likeness.count))  # of observations, as in a Cholesky decomposition
        self._surprise, self._observed = _WEIGHT, _WEIGHT

    @classmethod
    def of_key(cls, key: str, texts: Sequence[str], told: TimesByKey, fills: Fills = UNKNOWN) -> Expectation:
        """Return the expectation of a key from other keys, but for those that `distance` cannot compare.

        fills: of the key's own launches; if they are known, times of other keys count as if their launches
        filled the SMs' time.
        """
        expected = cls(Likeness([*map(texts_by_field, texts)]))
        known = {other: by_place(told[other], texts, fills=bool(fills)) for other in sorted(told)}
        near = [k for k, each in known.items() if k != key and each and distance(key, k) < math.inf]
        if near:
            logs = np.full((len(near), len(texts)), np.nan)
            for row, other in enumerate(near):
                logs[row, [*known[other]]] = np.log([*known[other].values()])
            weights = np.array([max(math.exp(-distance(key, other) / _NEAR), _FAR) for other in near])
            expected._fit(logs, weights, np.array([[1.0, *doublings(key, other)] for other in near]).T)
        if fills:
            expected.means = expected.means - np.log([fills.get(text, 1.0) for text in texts]) / 2
        return expected

    @property
    def variances(self) -> Array:
        shown = self._surprise / self._observed
        return np.asarray(self._left * (shown if self.keys else _DOUBT * shown))

    def _fit(self, logs: Array, weights: Array, at: Array) -> None:
        """Fit the expectation to the observed keys.

        at: 1, and the told keys' sizes in doublings of the new key's.
        """
        is_told = np.isfinite(logs)
        self.keys, places = len(logs), np.flatnonzero(is_told.any(0))
        self.told = frozenset(places.tolist())
        rests = _without_level(np.where(is_told, logs, 0.0), is_told)
        at = at if len(weights) >= _SLOPES_KEYS else at[:1]
        added = np.zeros((len(at), logs.shape[1]))
        masses = (weights * at * at) @ is_told
        alike = self._config_rows(places.tolist())

        def smoothing(shrink: float) -> Array:
            return np.asarray(np.linalg.solve(alike[:, places] + np.diag(shrink / masses[0][places]), alike))

        smooth = smoothing(_SHRINK)
        for place in [*range(len(at))] * _FITS:
            before, mass = added[place].copy(), masses[place]
            found = (weights * at[place]) @ rests + mass * before
            if place:
                added[place] = found / (mass + _SHRINK_SLOPE)
            else:
                effects = found[places] / mass[places]
                added[0] = effects @ smooth
            rests = _without_level(rests - np.outer(at[place], added[place] - before) * is_told, is_told)
        self.means = added[0]
        total = weights.sum()
        doubt = 1 + _DOUBT_KEYS * len(added) / total
        squares = weights @ (rests * rests).sum(1)
        shown = max(squares / masses[0].sum(), _LEAST_REST**2)
        rest = doubt * shown
        prior = _PRIOR_KEYS / (_PRIOR_KEYS + total * total / (weights * weights).sum())
        self._prior_rest = prior * rest
        self._patterns = np.sqrt((1 - prior) * weights / total)[:, None] * rests
        self._own = np.full(logs.shape[1], self._noise**2)
        self._effects, self._alike = max(float(effects @ effects) / len(effects), shown), alike
        self._smooth = smoothing(shown / self._effects)
        self._begin()

    def _config_rows(self, places: Sequence[int]) -> Array:
        """Return the expected likeness of what configs add."""
        rows = (1 - _OWN_EFFECT) * self._likeness.rows(places)
        rows[range(len(places)), list(places)] += _OWN_EFFECT
        return rows

    def observe(self, index: int, ms: float) -> None:
        """Take in the time at a place: conditions all others on it."""
        column = _LEVEL_VARIANCE + self._prior_rest * self._likeness.rows([index])[0]
        column += self._patterns[:, index] @ self._patterns - self._factors[:, index] @ self._factors
        if self._effects:
            effects = self._config_rows([index])[0] - self._alike[:, index] @ self._smooth
            column += self._effects * effects
        column[index] += self._own[index]
        factor = column / math.sqrt(max(column[index], self._noise**2 / 4))
        step = (math.log(ms) - self.means[index]) / factor[index] if factor[index] else 0.0
        self.means = self.means + step * factor
        self._left = np.maximum(self._left - factor * factor, 0.0)
        if len(self._factors):  # the first one tells the level
            self._surprise, self._observed = self._surprise + step * step, self._observed + 1
        self._factors = np.vstack([self._factors, factor])


def _without_level(logs: Array, is_told: Any) -> Array:
    """Return each key's logs without their mean, 0 where it has none."""
    levels = logs.sum(1) / np.maximum(is_told.sum(1), 1)
    return np.asarray((logs - levels[:, None]) * is_told)
