"""Configs as fields, read from their texts: how alike two of them are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .keys import signed_log2

TimesByKey: TypeAlias = Mapping[str, Mapping[str, float]]  # ms of a kernel: by key, by the config's text
Fills: TypeAlias = Mapping[str, float]  # see `LaunchMs.fill`: by the config's text
UNKNOWN: Fills = {}

_ADDITIVE = 0.5  # of the likeness: what the fields add up; the rest is of all fields together


class LaunchMs(float):
    """The time of a launch whose programs fill `fill` of the SMs' time; see `footprint.fill`."""

    fill: float

    def __new__(cls, ms: float, fill: float) -> LaunchMs:
        launch_ms = super().__new__(cls, ms)
        launch_ms.fill = fill
        return launch_ms


def filled(ms: float) -> float:
    """Return the ms of a launch as if its programs filled the SMs' time; of the unfilled part half counts.

    If all or none of it counts, starts on the tables of real kernels lose more.
    """
    return ms * math.sqrt(ms.fill) if isinstance(ms, LaunchMs) else ms


def by_place(times: Mapping[str, float], texts: Sequence[str], *, fills: bool) -> dict[int, float]:
    """Return a key's times of these candidates; fills: as if each filled the SMs' time."""
    places = {text: index for index, text in enumerate(texts)}
    known = {places[text]: ms for text, ms in sorted(times.items()) if text in places}
    return {index: filled(ms) for index, ms in known.items()} if fills else known


# Of a config's text, or of JSON.
_FIELD = re.compile(r"""(\w+)"?: ((?:'[^']*'|\([^)]*\)|\[[^\]]*\]|[^,}])*)""")


def texts_by_field(text: str) -> dict[str, str]:
    """Return the fields of a config's text; one without any is a field."""
    return dict(_FIELD.findall(text)) or {"": text}


class Likeness:
    """How alike configs are by their fields: 1 for equal ones.

    Each field in which some differ counts half for an integer that doubles and a text that differs.
    """

    def __init__(self, found: Sequence[Mapping[str, str]]) -> None:
        self.count, self._columns = len(found), []
        for name in sorted({name for fields in found for name in fields}):
            texts = [fields.get(name, "") for fields in found]
            if len(different := sorted({*texts})) > 1:
                places = {text: place for place, text in enumerate(different)}
                self._columns.append((np.array([places[text] for text in texts]), _of_field(different)))

    def rows(self, places: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return how alike the configs at these places are to each, in a row each."""
        if not self._columns:
            return np.ones((len(places), self.count))
        fields = np.array([table[codes[places]][:, codes] for codes, table in self._columns])
        return np.asarray(_ADDITIVE * fields.mean(0) + (1 - _ADDITIVE) * fields.prod(0))


def _of_field(texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return how alike the different values of a field are, in a row each; there may be thousands."""
    values = np.array([*map(_value, texts)])
    alike = np.asarray(1 / (1 + np.abs(values[:, None] - values)))
    alike[np.isnan(alike)] = 0.5
    np.fill_diagonal(alike, 1.0)
    return alike


def _value(text: str) -> float:
    """Return an integer in doublings, nan for other text."""
    return signed_log2(int(text)) if re.fullmatch(r"-?\d{1,18}", text) else math.nan
