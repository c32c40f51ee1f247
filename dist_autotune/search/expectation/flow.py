"""The search that tries a few candidates, chosen by their expected times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..strategies import PAIR_FACTOR, Flow, Pause, Warmup, Winner, faster_of_two, racing_runs, rounds, within
from .fields import UNKNOWN, Fills, TimesByKey
from .order import AT_LEAST, Meanwhile, TrialOrder

MORE_RUNS = 24  # of the fastest and the first, where the noise may explain what lies between them


def order_of(
    key: str,
    texts: Sequence[str],
    told: TimesByKey,
    meanwhile: Callable[[], Meanwhile] = Meanwhile,
    fills: Fills = UNKNOWN,
) -> TrialOrder | None:
    """Return the order of trials of a key's candidates, the first one first; None: all are to be tried.

    told: by other keys before the session. meanwhile: returns what the session knows by now. fills: how much
    of the SMs' time launches at this key fill.
    """
    return TrialOrder(key, texts, told, meanwhile, fills) if len(texts) > AT_LEAST else None


def expected(candidates: Sequence[int], *, n_warmup: int, n_repeat: int, order: TrialOrder) -> Flow:
    """Try candidates in their order, until the untried ones cannot pay; race those near the best.

    One warm-up run and two samples each, then rounds as in `racing`, with the same budget of runs for those
    that were tried. Before more than the first ones are tried, a `Pause`. It uses no `n_warmup`, `n_repeat`.
    """
    agreed_ms: dict[int, float] = {}
    made = 0
    while True:
        if (index := order.next()) is None:
            if not order.widen():
                break
            yield Pause()
            continue
        ms = yield Warmup(index)
        made += 1
        if ms != math.inf:
            one = yield index
            ms = faster_of_two(one, (yield index))
            made += 2
        agreed_ms[index] = ms
        order.tell(index, ms)
    if order.leaves_first:
        return Winner(candidates[0], {candidates[0]})
    alive = within(agreed_ms, order.tried or list(candidates[:1]), PAIR_FACTOR)
    runs_left = racing_runs(len(order.tried)) - made
    return (yield from rounds(alive, candidates[0], runs_left, MORE_RUNS))
