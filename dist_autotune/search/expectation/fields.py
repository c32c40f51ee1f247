"""Configs as fields, read from their texts: how alike two of them are."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from .arithmetic import signed_log2

TimesByKey: TypeAlias = Mapping[str, Mapping[str, float]]  # ms of a kernel: by key, by the config's text
Fills: TypeAlias = Mapping[str, float]  # see `LaunchMs.fill`: by the config's text
UNKNOWN: Fills = {}
Value: TypeAlias = "float | str"

_ADDITIVE = 0.5  # of the likeness: what the fields add up; the rest is of all fields together


class LaunchMs(float):
    """The time of a launch whose programs fill `fill` of the SMs' time; see `footprint.fill`."""

    fill: float

    def __new__(cls, ms: float, fill: float) -> LaunchMs:
        launch_ms = super().__new__(cls, ms)
        launch_ms.fill = fill
        return launch_ms


def filled(ms: float) -> float:
    """Return about what a launch would take if its programs filled the SMs' time: half of the rest counts.

    With all of it, starts on the tables of real kernels lose more, and so they do with none.
    """
    return ms * math.sqrt(ms.fill) if isinstance(ms, LaunchMs) else ms


def by_place(times: Mapping[str, float], texts: Sequence[str], *, fills: bool) -> dict[int, float]:
    """Return a key's times of these candidates; fills: as if each filled the SMs' time."""
    places = {text: index for index, text in enumerate(texts)}
    known = {places[text]: ms for text, ms in sorted(times.items()) if text in places}
    return {index: filled(ms) for index, ms in known.items()} if fills else known


_FIELD = re.compile(
    r"""(\w+)"?: ((?:'[^']*'|\([^)]*\)|\[[^\]]*\]|[^,}])*)"""
)  # of a config's text, or of JSON


def fields_of(texts: Sequence[str]) -> list[list[Value]]:
    """Return the values of the fields in which candidates differ; integers as doublings."""
    return values_of([texts_by_field(text) for text in texts])


def texts_by_field(text: str) -> dict[str, str]:
    return dict(_FIELD.findall(text)) or {"": text}


def values_of(found: Sequence[Mapping[str, str]]) -> list[list[Value]]:
    """Return the values of the fields in which these differ; a field that one lacks is empty."""
    names = sorted({name for fields in found for name in fields})
    names = [name for name in names if len({fields.get(name) for fields in found}) > 1]
    return [[_value(fields.get(name, "")) for name in names] for fields in found]


def likenesses(fields: Sequence[Sequence[Value]], index: int) -> list[float]:
    """Return how alike a candidate's fields are to those of each: 1 for equal ones, itself included.

    Each field counts half for an integer that doubles and a text that differs.
    """
    own = fields[index]
    if not own:
        return [1.0] * len(fields)
    totals, products = [0.0] * len(fields), [1.0] * len(fields)
    for value, column in zip(own, zip(*fields, strict=True), strict=True):
        of_value = {each: _of_field(value, each) for each in set(column)}
        found = [of_value[each] for each in column]
        totals = [*map(operator.add, totals, found)]
        products = [*map(operator.mul, products, found)]
    return [
        _ADDITIVE * total / len(own) + (1 - _ADDITIVE) * product
        for total, product in zip(totals, products, strict=True)
    ]


def _of_field(a: Value, b: Value) -> float:
    if a == b:
        return 1.0
    return 1 / (1 + abs(a - b)) if isinstance(a, float) and isinstance(b, float) else 0.5


def _value(text: str) -> Value:
    if not re.fullmatch(r"-?\d{1,18}", text):
        return text
    return signed_log2(int(text))
