"""Expected times of the candidates of a key from a few times: alike configs at near keys take alike times.

A Gaussian process over the logarithms of times (C. Rasmussen and C. Williams, "Gaussian Processes for Machine
Learning", 2006, 2.2). Each key has a level of its own; what is beyond it, two times share the more, the more
alike their configs are and the nearer their keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .fields import Likeness, TimesByKey, by_place
from .keys import by_distance, distance

# Chosen on tables of real kernels: tests/unit/search/test_expectation_tables.py.
_APART = 0.02  # of the variance of the rest: what a candidate shares with no other, however alike
_LEVEL = 100.0  # variance of a key's level, over that of the rest: nothing is known of it
_WEIGHT = 3.0  # times, that the expected deviation of the rest weighs as much as
_SHARED = 0.9  # of the variance of the rest that a key has in common with another of the same sizes
_NEAR = 16.0  # doublings of sizes at which it shares 1/e of that
_DOUBT = 1.5  # variances count as so many times what is fitted: few times seem surer than they are
_KIN, _MOST_ROWS = 6, 120  # other keys that count, and times: fitting takes the cube of their number

Kin = Sequence[tuple[float, Mapping[int, float]]]  # how much other keys share with a key, and their times


class GaussianProcess:
    """`means` and `variances` of each candidate's log ms at one key, as last fitted.

    deviation: of the rest, expected. noise: of a time, over the variance of the rest. fills: how much of the
    SMs' time its launches fill, by candidate.
    """

    def __init__(
        self,
        likeness: Likeness,
        *,
        deviation: float = 0.35,
        noise: float = 1e-3,
        fills: Sequence[float] = (),
    ) -> None:
        self._likeness, self._deviation, self._noise = likeness, deviation, noise
        self._log_scales = np.log(fills or np.ones(likeness.count)) / 2
        self.fit({})

    def fit(self, own: Mapping[int, float], kin: Kin = ()) -> None:
        """Expect from these times alone. own: of the key itself, by place."""
        count = self._likeness.count
        self.means, self.variances = np.zeros(count), np.full(count, 1 + _LEVEL)
        groups = [(1.0, own), *kin]
        places = np.array([index for _, known in groups for index in known], int)
        if not len(places):
            return
        group = np.repeat(np.arange(len(groups)), [len(known) for _, known in groups])
        near = np.array([near for near, _ in groups])[group]
        logs = np.log([ms for _, known in groups for ms in known.values()])
        logs += np.where(group == 0, self._log_scales[places], 0.0)
        sums = np.bincount(group, logs, len(groups))
        levels = sums / np.maximum(np.bincount(group, minlength=len(groups)), 1)
        alike = (1 - _APART) * self._likeness.rows(places.tolist())
        alike[np.arange(len(places)), places] = 1.0
        same = group[:, None] == group
        between = alike[:, places] * np.where(same, 1.0, near[:, None] * near) + _LEVEL * same
        lower = np.linalg.cholesky(between + self._noise * np.eye(len(places)))
        is_own = (group == 0)[:, None]
        columns = np.linalg.solve(lower, alike * np.where(is_own, 1.0, near[:, None]) + _LEVEL * is_own)
        weights = np.linalg.solve(lower, logs - levels[group])
        variance = (_WEIGHT * self._deviation**2 + weights @ weights) / (_WEIGHT + len(places))
        self.means = levels[0] + weights @ columns - self._log_scales
        left = np.maximum(1 + _LEVEL - (columns * columns).sum(0), self._noise)
        self.variances = _DOUBT * variance * left


def kin_of(
    key: str, texts: Sequence[str], told: TimesByKey, *, fills: bool = False
) -> list[tuple[float, dict[int, float]]]:
    """Return how much the nearest told keys share with a key, and their times by place.

    fills: they count as if they filled the SMs' time.
    """
    rows = 0
    kin: list[tuple[float, dict[int, float]]] = []
    for other in by_distance(key, told.keys() - {key})[:_KIN]:
        known = by_place(told[other], texts, fills=fills)
        rows += len(known)
        if rows > _MOST_ROWS:
            break
        kin.append((math.sqrt(_SHARED * math.exp(-2 * distance(key, other) / _NEAR)), known))
    return kin
