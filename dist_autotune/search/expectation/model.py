"""Expected times of the candidates of a key, from the times that other keys of the kernel have told.

The logarithm of a time is the level of its key, the effects of the config's fields and of pairs of them, and
a rest. Effects are shrunk means, fitted in turns (backfitting). The rest of a key varies as that of near keys
does, and alike for configs with near fields: a Gaussian process, whose covariance the other keys give, after
K. Swersky, J. Snoek and R. Adams, "Multi-Task Bayesian Optimization" (NIPS 2013). Each time observed at the
key narrows it. Every step is arithmetic or a root: the same on all ranks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from .arithmetic import decay, log
from .keys import distance

Told: TypeAlias = Mapping[str, Mapping[str, float]]  # ms of a kernel: by key, by the config's text
Value: TypeAlias = "float | str"

# Chosen on tables of real kernels, keys held back: tests/unit/search/test_expectation_tables.py.
_NEAR = 2.0  # doublings of sizes that make a key count less, by e
_FAR = 0.001  # how much the farthest counts at least
_SHRINK_FIELD, _SHRINK_PAIR = 0.03, 0.1  # told times, of weight 1, that each effect is pulled to 0 by
_SHRINK_REST = 0.3
_FITS, _SWEEPS = 3, 20  # levels and effects in turns; the effects among themselves
_PRIOR_KEYS = 1.0  # that the fields' covariance weighs as much as
_LEAST_REST = 0.05  # standard deviation of a rest, at least
_NOISE = 0.02  # of one observed time
_LEVEL_VARIANCE = 16.0  # of a key's level, in squared logarithms: nothing is known of it

_FIELD = re.compile(
    r"""(\w+)"?: ((?:'[^']*'|\([^)]*\)|\[[^\]]*\]|[^,}])*)"""
)  # of a config's text, or of JSON


class Expectation:
    """The expected log ms of each candidate of one key, up to what is common to all of them.

    means, variances: by candidate, given what `observe` has told. An observation takes time in the number of
    candidates times that of told keys and observations. Keys that `distance` cannot compare tell nothing.

    own: times of the key itself, by place: the effects of fields are fitted to them too.
    """

    def __init__(self, key: str, texts: Sequence[str], told: Told, own: Mapping[int, float] = {}) -> None:
        places = {text: index for index, text in enumerate(texts)}
        pairs: _Weighted = []
        for other in sorted(told):
            far = distance(key, other)
            logs = {places[text]: log(ms) for text, ms in sorted(told[other].items()) if text in places}
            if other != key and far < math.inf and logs:
                pairs.append((_weight(far), logs))
        self.keys = len(pairs)  # that have told something of these candidates
        self.told = {index for _, logs in pairs for index in logs}  # candidates that some key has told of
        if own:
            pairs.append((1.0, {index: log(ms) for index, ms in own.items()}))
        self._fields = fields_of(texts)
        self._fit(pairs)
        self._factors: list[list[float]] = []  # of the observations, as in a Cholesky decomposition
        for index, ms in own.items():
            self.observe(index, ms)

    def _fit(self, told: _Weighted) -> None:
        """Set the means, and what `_covariance` takes: the rests of the told keys from them."""
        smooth, rests = _smoothed(told, self._fields)
        masses = _sums([(weight, dict.fromkeys(rest, 1.0)) for weight, rest in rests], len(smooth))
        most = max((weight for weight, _ in rests), default=1.0)
        sums = _sums(rests, len(smooth))
        shifts = [total / (mass + _SHRINK_REST * most) for total, mass in zip(sums, masses, strict=True)]
        self.means = [a + b for a, b in zip(smooth, shifts, strict=True)]
        varied = [(w, {index: part - shifts[index] for index, part in rest.items()}) for w, rest in rests]
        squares = math.fsum(weight * part * part for weight, rest in varied for part in rest.values())
        self._rest = max(squares / (math.fsum(masses) or 1.0), _LEAST_REST**2)
        total = math.fsum(weight for weight, _ in varied) or 1.0
        effective = total * total / (math.fsum(weight * weight for weight, _ in varied) or 1.0)
        self._prior = _PRIOR_KEYS / (_PRIOR_KEYS + effective)
        self._patterns: list[dict[int, float]] = []
        for weight, rest in varied:
            scale = math.sqrt((1 - self._prior) * weight / total)
            self._patterns.append({index: scale * part for index, part in rest.items()})
        self._own = [_NOISE**2 + (0.0 if mass else 0.5 * self._rest) for mass in masses]
        self.variances = [self._covariance(index, index) for index in range(len(smooth))]

    def _covariance(self, one: int, other: int) -> float:
        """Return the covariance of two candidates before anything is observed."""
        total = _LEVEL_VARIANCE + (self._own[one] if one == other else 0.0)
        total += self._prior * self._rest * _likeness(self._fields[one], self._fields[other])
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


_Weighted: TypeAlias = list[tuple[float, dict[int, float]]]  # of each told key: its weight, and by candidate


def _smoothed(told: _Weighted, fields: Sequence[Sequence[Value]]) -> tuple[list[float], _Weighted]:
    """Return the effects of the fields by candidate, and what they and the levels leave of told times."""
    smooth, rests = [0.0] * len(fields), told
    if not told:
        return smooth, rests
    effects = _Effects(fields)
    for _ in range(_FITS):
        levels = [math.fsum(ms - smooth[index] for index, ms in logs.items()) / len(logs) for _, logs in told]
        parts = [
            (weight, {index: ms - level for index, ms in logs.items()})
            for level, (weight, logs) in zip(levels, told, strict=True)
        ]
        masses = _sums([(weight, dict.fromkeys(part, 1.0)) for weight, part in parts], len(fields))
        means = [s / m if m else 0.0 for s, m in zip(_sums(parts, len(fields)), masses, strict=True)]
        smooth = effects.fit(means, masses)
        rests = [(w, {index: ms - smooth[index] for index, ms in part.items()}) for w, part in parts]
    return smooth, rests


def _sums(weighted: _Weighted, count: int) -> list[float]:
    sums = [0.0] * count
    for weight, parts in weighted:
        for index, part in parts.items():
            sums[index] += weight * part
    return sums


class _Effects:
    """The effects of the fields' values, and of pairs of them, on the logarithm of a time."""

    def __init__(self, fields: Sequence[Sequence[Value]]) -> None:
        names = range(len(fields[0]) if fields else 0)
        groups: list[tuple[float, tuple[int, ...]]] = [(_SHRINK_FIELD, (name,)) for name in names]
        groups += [(_SHRINK_PAIR, pair) for pair in itertools.combinations(names, 2)]
        self._groups: list[tuple[float, list[list[int]]]] = []  # the candidates of each value
        for shrink, group in groups:
            members: dict[tuple[Value, ...], list[int]] = {}
            for index, values in enumerate(fields):
                members.setdefault(tuple(values[name] for name in group), []).append(index)
            self._groups.append((shrink, list(members.values())))
        self._values = [[0.0] * len(members) for _, members in self._groups]

    def fit(self, means: list[float], masses: list[float]) -> list[float]:
        """Return the sum of the effects by candidate, fitted to `means`, each of so much mass."""
        sums = [0.0] * len(means)
        for (_, members), values in zip(self._groups, self._values, strict=True):
            for own, value in zip(members, values, strict=True):
                for index in own:
                    sums[index] += value
        for _ in range(_SWEEPS):
            for (shrink, members), values in zip(self._groups, self._values, strict=True):
                for place, own in enumerate(members):
                    mass = rest = 0.0
                    for index in own:
                        mass += masses[index]
                        rest += masses[index] * (means[index] - sums[index])
                    step = (rest + mass * values[place]) / (mass + shrink) - values[place]
                    values[place] += step
                    for index in own:
                        sums[index] += step
        return sums


def _weight(doublings: float) -> float:
    """Return how much a key counts that is so far away."""
    return max(decay(min(doublings, 100.0) / _NEAR), _FAR)


def fields_of(texts: Sequence[str]) -> list[list[Value]]:
    """Return the values of the fields in which candidates differ; integers as doublings."""
    found = [dict(_FIELD.findall(text)) or {"": text} for text in texts]
    names = sorted({name for fields in found for name in fields})
    names = [name for name in names if len({fields.get(name) for fields in found}) > 1]
    return [[_value(fields.get(name, "")) for name in names] for fields in found]


def _value(text: str) -> Value:
    if not re.fullmatch(r"-?\d{1,18}", text):
        return text
    return math.copysign(log(1 + abs(int(text))) / log(2), int(text))


def _likeness(one: Sequence[Value], other: Sequence[Value]) -> float:
    """Return 1 for equal fields, half of it for each integer that doubles and each text that differs."""
    product = 1.0
    for a, b in zip(one, other, strict=True):
        if a != b:
            product /= 1 + (abs(a - b) if isinstance(a, float) and isinstance(b, float) else 1.0)
    return product
