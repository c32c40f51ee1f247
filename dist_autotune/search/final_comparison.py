"""The final comparison of `objective="thunk"`: the tuned plan against the default one and that by launches.

No torch, no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from .context_search import Context
from .plan_trial import PlanTrial

ROUNDS = 6  # of all sides; the first one warms up
DUEL_RUNS = 2 * ROUNDS  # where two plans are compared
MOST_RUNS = 3 * ROUNDS
DEFAULT, BY_LAUNCHES, TUNED = "default", "by launches", "tuned"


def contested(contexts: Iterable[Context], defaults: dict[str, int]) -> list[Context]:
    """Return the contexts in which the tuned plan differs from the default one, or from that by launches."""
    return [
        context
        for context in contexts
        if any(
            index not in (None, context.winner) and index not in context.banned
            for index in (defaults.get(context.name), context.launch_winner)
        )
    ]


class Duel(PlanTrial):
    """The plans in rounds, each in an order of its own, so that no period of the caller's favours one."""

    def __init__(self, contexts: Iterable[Context], defaults: dict[str, int], rank_reduce: str) -> None:
        super().__init__(rank_reduce)
        self.contexts = contested(contexts, defaults)
        self.defaults = dict(defaults)  # what was left to another session outlives the plan before it
        self.run = 0
        tuned = {context.name: context.incumbent for context in self.contexts}
        plans = {
            TUNED: tuned,
            DEFAULT: {name: defaults.get(name, index) for name, index in tuned.items()},
            BY_LAUNCHES: {
                c.name: tuned[c.name] if (w := c.launch_winner) is None else w for c in self.contexts
            },
        }
        self.plans: dict[str, dict[str, int]] = {}  # those that differ; `tuned` first
        for side, plan in plans.items():
            if plan not in self.plans.values():
                self.plans[side] = plan
        self.ms = dict.fromkeys(self.plans, math.nan)
        self._turn()

    @property
    def side(self) -> str:
        """Return whose turn the next run is."""
        sides = list(self.plans)
        number, turn = divmod(self.run, len(sides))
        if number:
            random.Random(f"round {number}").shuffle(sides)
        return sides[turn]

    @property
    def label(self) -> str:
        return self.side

    @property
    def is_warmup(self) -> bool:
        return self.run < len(self.plans)

    @property
    def is_over(self) -> bool:
        return self.run >= ROUNDS * len(self.plans) or len(self.plans) < 2

    @property
    def compared(self) -> Iterable[Context]:
        return self.contexts

    def takes_up(self, other: Duel) -> None:
        """Go on where another comparison was left, if it is of the same plans."""
        if self.plans == other.plans:
            self.run, self.ms = other.run, other.ms
            self._turn()

    def leave(self) -> None:
        """Stop before it is over: each context takes what the comparison so far speaks for, for now."""
        winner = TUNED if any(map(math.isnan, self.ms.values())) else self.winner
        for context in self.contexts:
            context.override = None
            context.settle("partial", self.plans[winner][context.name])

    def advance(self, ms: float) -> None:
        if not self.is_warmup:
            self.ms[self.side] = ms
        self.run += 1
        self._turn()

    @property
    def winner(self) -> str:
        """Return the side that won: the tuned plan has to be faster than the others, and to have a time."""
        if len(self.plans) < 2:
            return TUNED
        timed = {side: ms for side, ms in self.ms.items() if math.isfinite(ms)}
        others = [side for side in (DEFAULT, BY_LAUNCHES) if side in timed]
        best = min(others, key=timed.__getitem__, default=next(iter(s for s in self.plans if s != TUNED)))
        is_won = TUNED in timed and best in timed and timed[TUNED] < timed[best]
        return TUNED if is_won else best

    def _turn(self) -> None:
        for context in self.contexts:
            is_other = not (self.is_over or self.waiting) and self.side != TUNED
            context.override = self.plans[self.side][context.name] if is_other else None
