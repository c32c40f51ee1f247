"""Expected times of the candidates of a key from a few times: alike configs at near keys take alike times.

A Gaussian process over the logarithms of times (C. Rasmussen and C. Williams, "Gaussian Processes for Machine
Learning", 2006, 2.2). Each key has a level of its own; what is beyond it, two times share the more, the more
alike their configs are and the nearer their keys. Every step is arithmetic or a root: the same on all ranks.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence

from .arithmetic import append_row, decay, forward, log
from .fields import TimesByKey, Value, by_place, likenesses
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

    fields: of its candidates. deviation: of the rest, expected. noise: of a time, over the variance of the
    rest. fills: how much of the SMs' time its launches fill, by candidate.
    """

    def __init__(
        self,
        fields: Sequence[Sequence[Value]],
        *,
        deviation: float = 0.35,
        noise: float = 1e-3,
        fills: Sequence[float] = (),
    ) -> None:
        self._scales = [math.sqrt(fill) for fill in fills or [1.0] * len(fields)]
        self._fields, self._deviation, self._noise = fields, deviation, noise
        self._rows: dict[int, list[float]] = {}  # of what candidates share
        self._own, self._lower = list[int](), list[list[float]]()  # as last fitted
        self._columns: list[list[float]] = [[] for _ in fields]
        self.fit({})

    def fit(self, own: Mapping[int, float], kin: Sequence[tuple[float, Mapping[int, float]]] = ()) -> None:
        """Expect from these times alone; the factor is kept of the first places that are as last time.

        own: times of the key itself, by place. kin: how much of the rest other keys share, and their times.
        """
        groups = [(1.0, {index: ms * self._scales[index] for index, ms in own.items()}), *kin]
        self.means, self.variances = [0.0] * len(self._columns), [1 + _LEVEL] * len(self._columns)
        rows = [(group, index) for group, (_, known) in enumerate(groups) for index in known]
        if not rows:
            return
        kept = len([*itertools.takewhile(bool, map(operator.eq, self._own, own))])
        rests, levels = [], []
        for _, known in groups:
            logs = [log(ms) for ms in known.values()]
            levels.append(math.fsum(logs) / max(len(logs), 1))
            rests += [each - levels[-1] for each in logs]
        alike = {i: self._alike(i) for _, i in rows[kept:]}
        near = [near for near, _ in groups]

        def shared(row: tuple[int, int], group: int, index: int) -> float:
            part = alike[row[1]][index]
            return part + _LEVEL if row[0] == group else part * near[row[0]] * near[group]

        self._own = [*own]
        del self._lower[kept:]
        for place, row in enumerate(rows[kept:], kept):
            between = [shared(row, *other) for other in rows[:place]]
            append_row(self._lower, between, shared(row, *row) + self._noise)
        weights = forward(self._lower, rests)
        variance = (_WEIGHT * self._deviation**2 + _square(weights)) / (_WEIGHT + len(rows))
        for candidate, column in enumerate(self._columns):
            new = [shared(row, 0, candidate) for row in rows[kept:]]
            column[:] = forward(self._lower, new, column[:kept])
            mean = levels[0] + math.fsum(map(operator.mul, column, weights))
            self.means[candidate] = mean - log(self._scales[candidate])
            self.variances[candidate] = _DOUBT * variance * max(1 + _LEVEL - _square(column), self._noise)

    def _alike(self, index: int) -> list[float]:
        """Return what a candidate shares with each, itself included, at one key."""
        if index not in self._rows:
            self._rows[index] = [(1 - _APART) * each for each in likenesses(self._fields, index)]
            self._rows[index][index] = 1.0
        return self._rows[index]


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
        kin.append((math.sqrt(_SHARED * decay(2 * min(distance(key, other), 100.0) / _NEAR)), known))
    return kin


def _square(values: Sequence[float]) -> float:
    return math.fsum(value * value for value in values)
