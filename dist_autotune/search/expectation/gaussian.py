"""Expected times of the candidates of a key from a few times: alike configs at near keys take alike times.

A Gaussian process over the logarithms of times (C. Rasmussen and C. Williams, "Gaussian Processes for Machine
Learning", 2006, 2.2). Each key has a level of its own; what is beyond it, two times share the more, the more
alike their configs are and the nearer their keys. Every step is arithmetic or a root: the same on all ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

from .arithmetic import cholesky, decay, forward, log
from .fields import Likenesses, TimesByKey
from .keys import by_distance, distance

# Chosen on tables of real kernels: tests/unit/search/test_expectation_tables.py.
_APART = 0.02  # of the variance of the rest: what a candidate shares with no other, however alike
_LEVEL = 100.0  # variance of a key's level, over that of the rest: nothing is known of it
_WEIGHT = 3.0  # times, that the expected deviation of the rest weighs as much as
_SHARED = 0.9  # of the variance of the rest that a key has in common with another of the same sizes
_NEAR = 16.0  # doublings of sizes at which it shares 1/e of that
_DOUBT = 1.5  # variances count as so many times what is fitted: few times seem surer than they are
_KIN, _MOST_ROWS = 6, 120  # other keys that count, and times: fitting takes the cube of their number


class GaussianProcess:
    """The expected log ms of each candidate of one key.

    alike: of its candidates, for all processes over them. own: times of the key itself, by place. kin: how
    much of the rest other keys share, and their times. deviation: of the rest, expected. noise: of a time,
    over the variance of the rest.
    """

    def __init__(
        self,
        alike: Likenesses,
        own: Mapping[int, float],
        kin: Sequence[tuple[float, Mapping[int, float]]] = (),
        *,
        deviation: float = 0.35,
        noise: float = 1e-3,
    ) -> None:
        self._likenesses, self._deviation, self._noise = alike, deviation, noise
        self._groups = [(1.0, own), *kin]
        self.means, self.variances = [0.0] * len(alike.fields), [1 + _LEVEL] * len(alike.fields)
        if any(known for _, known in self._groups):
            self._fit()

    def _fit(self) -> None:
        rows = [(group, index) for group, (_, known) in enumerate(self._groups) for index in known]
        rests, levels = [], []
        for _, known in self._groups:
            logs = [log(ms) for ms in known.values()]
            levels.append(math.fsum(logs) / max(len(logs), 1))
            rests += [each - levels[-1] for each in logs]
        alike = {i: self._alike(i) for _, i in rows}
        near = [near for near, _ in self._groups]

        def shared(row: tuple[int, int], group: int, index: int) -> float:
            part = alike[row[1]][index]
            return part + _LEVEL if row[0] == group else part * near[row[0]] * near[group]

        matrix = [
            [shared(row, *other) + (self._noise if row is other else 0.0) for other in rows[: place + 1]]
            for place, row in enumerate(rows)
        ]
        lower = cholesky(matrix)
        weights = forward(lower, rests)
        variance = (_WEIGHT * self._deviation**2 + _square(weights)) / (_WEIGHT + len(rows))
        for candidate in range(len(self.means)):
            column = forward(lower, [shared(row, 0, candidate) for row in rows])
            self.means[candidate] = levels[0] + math.fsum(map(operator.mul, column, weights))
            self.variances[candidate] = _DOUBT * variance * max(1 + _LEVEL - _square(column), self._noise)

    def _alike(self, index: int) -> list[float]:
        """Return what a candidate shares with each, itself included, at one key."""
        alike = [(1 - _APART) * each for each in self._likenesses.of(index)]
        alike[index] = 1.0
        return alike


def kin_of(key: str, texts: Sequence[str], told: TimesByKey) -> list[tuple[float, dict[int, float]]]:
    """Return how much the nearest told keys share with a key, and their times by place."""
    places, rows = {text: index for index, text in enumerate(texts)}, 0
    kin: list[tuple[float, dict[int, float]]] = []
    for other in by_distance(key, told.keys() - {key})[:_KIN]:
        known = {places[text]: ms for text, ms in sorted(told[other].items()) if text in places}
        rows += len(known)
        if rows > _MOST_ROWS:
            break
        kin.append((math.sqrt(_SHARED * decay(2 * min(distance(key, other), 100.0) / _NEAR)), known))
    return kin


def _square(values: Sequence[float]) -> float:
    return math.fsum(value * value for value in values)
