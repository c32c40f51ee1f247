"""Candidate sets that are too large to be made whole."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

DRAWN = 2048  # candidates that a context has at most


class Combinations(Sequence[T]):
    """All combinations of values; each candidate is made where it is asked for.

        triton.autotune(Combinations(config, BLOCK=(64, 128, 256), num_warps=(4, 8)), key=["n"])
        tunable("split", Combinations(dict, parts=range(1, 65), order=("rows", "columns")))

    make: is called with one value of each name; equal calls return equal candidates.
    """

    def __init__(self, make: Callable[..., T], /, **values: Sequence[Any]) -> None:
        self._make = make
        self._values = {name: tuple(each) for name, each in values.items()}

    def __len__(self) -> int:
        return math.prod(map(len, self._values.values()))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        place, chosen = range(len(self))[index], {}
        for name, each in reversed(self._values.items()):
            place, own = divmod(place, len(each))
            chosen[name] = each[own]
        return self._make(**{name: chosen[name] for name in self._values})


def drawn(candidates: Iterable[T]) -> list[T]:
    """Return all of a list; of what makes them one by one, DRAWN at most, the first one among them.

    The others are drawn: the same ones on every rank and in every process.
    """
    generator, kept = random.Random(0), list[T]()
    if isinstance(candidates, Combinations) and len(candidates) > DRAWN:
        places = generator.sample(range(1, len(candidates)), DRAWN - 1)
        return [candidates[place] for place in (0, *sorted(places))]
    for count, candidate in enumerate(candidates):
        if count < DRAWN or isinstance(candidates, list | tuple):
            kept.append(candidate)
        elif 0 < (place := generator.randrange(count + 1)) < DRAWN:
            kept[place] = candidate
    return kept
