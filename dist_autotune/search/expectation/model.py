"""Expected times of the candidates of a key, from the times that other keys of the kernel have told.

The logarithm of a time is the level of its key, what its config adds at all keys and for each doubling of a
size, shrunk, and a rest. The rest of a key varies as that of near keys does, and alike for configs with near
fields: a Gaussian process, whose covariance the other keys give, after K. Swersky, J. Snoek and R. Adams,
"Multi-Task Bayesian Optimization" (NIPS 2013). Each time observed at the key narrows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from .fields import UNKNOWN, Fills, Likeness, TimesByKey, by_place
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

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


class Expectation:
    """`means` and `variances` of each candidate's log ms at one key, up to what is common to all of them.

    Given what `observe` has told. Keys that `distance` cannot compare tell nothing. fills: of the key's own
    launches; where they are known, told ones count as if they filled the SMs' time.
    """

    def __init__(self, key: str, texts: Sequence[str], told: TimesByKey, fills: Fills = UNKNOWN) -> None:
        known = {other: by_place(told[other], texts, fills=bool(fills)) for other in sorted(told)}
        near = [k for k, each in known.items() if k != key and each and distance(key, k) < math.inf]
        logs = np.full((len(near), len(texts)), np.nan)
        for row, other in enumerate(near):
            logs[row, [*known[other]]] = np.log([*known[other].values()])
        self.keys = len(near)  # that have told something of these candidates
        self.told = {
            index for other in near for index in known[other]
        }  # candidates that some key has told of
        self._likeness, self.means = Likeness.of_texts(texts), np.zeros(len(texts))
        weights = np.array([max(math.exp(-distance(key, other) / _NEAR), _FAR) for other in near])
        self._fit(logs, weights, np.array([[1.0, *doublings(key, other)] for other in near]).T)
        if fills:
            self.means = self.means - np.log([fills.get(text, 1.0) for text in texts]) / 2

    def _fit(self, logs: Array, weights: Array, at: Array) -> None:
        """Set the means, and what `_covariances` takes: the rests of the told keys from them.

        at: 1, and the told keys' sizes in doublings of the new key's.
        """
        is_told = np.isfinite(logs)
        rests, count = _without_level(np.where(is_told, logs, 0.0), is_told), logs.shape[1]
        at = at if len(weights) >= _SLOPES_KEYS else at[:1]
        added = np.zeros((max(len(at), 1), count))
        masses = np.zeros_like(added)
        masses[: len(at)] = (weights * at * at) @ is_told
        for place in [*range(len(at))] * _FITS:
            before, mass = added[place].copy(), masses[place]
            shrink = _SHRINK_SLOPE if place else _SHRINK
            added[place] = ((weights * at[place]) @ rests + mass * before) / (mass + shrink)
            rests = _without_level(rests - np.outer(at[place], added[place] - before) * is_told, is_told)
        self.means = added[0]
        total = weights.sum() or 1.0
        doubt = 1 + _DOUBT_KEYS * len(added) / total
        squares = weights @ (rests * rests).sum(1)
        self._rest = doubt * max(squares / (masses[0].sum() or 1.0), _LEAST_REST**2)
        self._prior = _PRIOR_KEYS / (_PRIOR_KEYS + total * total / ((weights * weights).sum() or 1.0))
        self._patterns = np.sqrt((1 - self._prior) * weights / total)[:, None] * rests
        self._own = _NOISE**2 + np.where(masses[0] > 0, 0.0, self._rest)
        self.variances = _LEVEL_VARIANCE + self._own + self._prior * self._rest
        self.variances = self.variances + (self._patterns**2).sum(0)
        self._factors = np.empty((0, count))  # of the observations, as in a Cholesky decomposition

    def observe(self, index: int, ms: float) -> None:
        """Take in the time of a candidate at this key: conditions all others on it."""
        column = _LEVEL_VARIANCE + self._prior * self._rest * self._likeness.rows([index])[0]
        column += self._patterns[:, index] @ self._patterns - self._factors[:, index] @ self._factors
        column[index] += self._own[index]
        factor = column / math.sqrt(max(column[index], _NOISE**2 / 4))
        step = (math.log(ms) - self.means[index]) / factor[index] if factor[index] else 0.0
        self.means = self.means + step * factor
        self.variances = np.maximum(self.variances - factor * factor, 0.0)
        self._factors = np.vstack([self._factors, factor])


def _without_level(logs: Array, is_told: Any) -> Array:
    """Return each key's logs without their mean, 0 where it has none."""
    levels = logs.sum(1) / np.maximum(is_told.sum(1), 1)
    return np.asarray((logs - levels[:, None]) * is_told)
