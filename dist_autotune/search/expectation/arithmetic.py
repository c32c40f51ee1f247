"""Functions of reals by additions, products, divisions and roots: equal to the last bit on every host.

Ranks decide alike only where they compute alike; a C library's logarithm may differ from another's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

_LN2 = 0.6931471805599453
_SERIES = tuple(1 / odd for odd in range(49, 0, -2))  # of atanh; the highest power adds less than 2^-60
_TAIL = (5.383e-06, 4.88906e-05, 3.80036e-05, 0.0032776263, 0.0211410061, 0.049867347, 1.0)


def log(value: float) -> float:
    """Return the natural logarithm of a positive number, within 1e-14 of it."""
    mantissa, exponent = math.frexp(value)
    return exponent * _LN2 + _log_near_1(mantissa)


def signed_log2(integer: int) -> float:
    """Return log2(1 + |n|) of an integer of any size, with its sign; exact where that is whole."""
    size = 1 + abs(integer)
    exponent = size.bit_length() - 1
    found = exponent + _log_near_1(size / (1 << exponent)) / _LN2
    return -found if integer < 0 else found


def _log_near_1(value: float) -> float:
    """Return the natural logarithm of a number from 1/2 to 2, by the series of 2 atanh((v - 1) / (v + 1))."""
    ratio = (value - 1) / (value + 1)
    square, total = ratio * ratio, 0.0
    for factor in _SERIES:
        total = total * square + factor
    return 2 * ratio * total


def decay(value: float) -> float:
    """Return exp(-value) of a value from 0, as the limit of 1 / (1 + value / n)^n: 0.5 % off at 3.2."""
    total = 1 + value / 1024
    for _ in range(10):
        total *= total
    return 1 / total


def normal_below(z: float) -> float:
    """Return the chance that a standard normal variable is below z, within 1.5e-7.

    M. Abramowitz and I. Stegun, "Handbook of Mathematical Functions" (1964), 26.2.19.
    """
    total = 0.0
    for factor in _TAIL:
        total = total * abs(z) + factor
    for _ in range(4):
        total *= total  # to the power of 16
    return 0.5 / total if z < 0 else 1 - 0.5 / total


def cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return L of a positive definite matrix = L L^T, row by row up to the diagonal."""
    lower: list[list[float]] = []
    for place, row in enumerate(matrix):
        append_row(lower, row[:place], row[place])
    return lower


def append_row(lower: list[list[float]], row: Sequence[float], diagonal: float) -> None:
    """Make L that of a matrix with one more row."""
    new = forward(lower, row)
    rest = diagonal - sum(map(operator.mul, new, new))
    lower.append([*new, math.sqrt(max(rest, 1e-12 * diagonal))])


def forward(lower: Sequence[list[float]], right: Sequence[float], first: Sequence[float] = ()) -> list[float]:
    """Return x of L x = right; where its first elements are given, right begins after them."""
    solved = [*first]
    for row, value in zip(lower[len(solved) :], right, strict=True):
        solved.append((value - sum(map(operator.mul, solved, row))) / row[-1])
    return solved
