"""The distance of two keys of a kernel: an untuned key begins with the winner of the nearest.

Keys are given as canonical text. Only integers are compared by size, flags among them (0 and 1); keys that
differ in anything else, a dtype for one, are not comparable. No torch, no Triton.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable

_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\w.+#-]+""")
_INTEGER = re.compile(r"-?\d{1,999}")  # Python refuses to read thousands of digits


def by_distance(key: str, others: Iterable[str]) -> list[str]:
    """Return the `others` that can be compared with `key`, the nearest first; ties: the smaller key."""
    found = ((distance(key, other), _split(other)[1], other) for other in set(others))
    return [other for far, _, other in sorted(found) if far < math.inf]


def distance(one: str, other: str) -> float:
    """Return the sum over the integers of |log2(1 + a) - log2(1 + b)|: 1 for a size that doubles.

    A negative integer counts as far below zero as its opposite lies above. inf: not comparable.
    """
    return math.inf if _split(one)[0] != _split(other)[0] else sum(map(abs, doublings(one, other)))


def doublings(one: str, other: str) -> list[float]:
    """Return by how many doublings each integer of `other` is above that of `one`, which can be compared."""
    pairs = zip(_split(one)[1], _split(other)[1], strict=True)
    return [signed_log2(integer) - signed_log2(own) for own, integer in pairs]


def signed_log2(integer: int) -> float:
    """Return log2(1 + |n|) of an integer of any size, with its sign."""
    size = math.log2(1 + abs(integer))
    return -size if integer < 0 else size


def named(text: str, key: str) -> str:
    """Return `text`, which names the values of some key, with the integers of another one, `key`."""
    integers = iter(_split(key)[1])
    return _TOKEN.sub(lambda token: str(next(integers)) if _INTEGER.fullmatch(token[0]) else token[0], text)


@functools.lru_cache(maxsize=4096)
def _split(key: str) -> tuple[str, tuple[int, ...]]:
    """Return the key with a `#` in place of each integer outside of strings, and the integers."""
    integers: list[int] = []

    def take(token: re.Match[str]) -> str:
        if not _INTEGER.fullmatch(token[0]):
            return token[0]
        integers.append(int(token[0]))
        return "#"

    return _TOKEN.sub(take, key), tuple(integers)
