"""Search strategies: pure generators that decide which candidate to try next.

A flow is `strategy(candidates, *, n_warmup, n_repeat)` over a sequence of candidate indices. It
yields an index (the next run launches that candidate and measures it) or `Warmup(index)` (the next
run launches it and measures nothing), and is sent that candidate's agreed time so far in
milliseconds: `inf` when it was banned or cannot win, `nan` while there is no sample of it. It
returns the winner's index. A flow knows neither torch nor ranks, and since it is the same on all
ranks it needs no message of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class Warmup:
    """Ask for a run of candidate `index` that is no sample."""

    index: int


Flow: TypeAlias = Generator["int | Warmup", float, int]


class Strategy(Protocol):
    """What `search=` takes: a function that returns a flow."""

    def __call__(self, candidates: Sequence[int], *, n_warmup: int, n_repeat: int) -> Flow: ...


def exhaustive(candidates: Sequence[int], *, n_warmup: int, n_repeat: int) -> Flow:
    """Try every candidate in order; return the fastest, the earliest one of equals.

    Each gets `n_warmup` unmeasured and `n_repeat` measured runs; a banned one is left at once.
    """
    agreed_ms: dict[int, float] = {}
    for index in candidates:
        agreed_ms[index] = yield from _measure(index, n_warmup, n_repeat)
    return min(candidates, key=agreed_ms.__getitem__)


def _measure(index: int, n_warmup: int, n_repeat: int) -> Generator[int | Warmup, float, float]:
    for _ in range(n_warmup):
        if (yield Warmup(index)) == math.inf:
            return math.inf
    ms = math.inf
    for _ in range(n_repeat):
        ms = yield index
        if ms == math.inf:
            break
    return math.inf if math.isnan(ms) else ms


STRATEGIES: dict[str, Callable[..., Flow]] = {"exhaustive": exhaustive}
