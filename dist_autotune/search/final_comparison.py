"""The final comparison of `objective="thunk"`: the tuned plan against the default one and that by launches.

No torch, no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from .context_search import Context
from .messages import RunReport
from .plan_trial import PlanTrial
from .rules import Rules

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


class FinalComparison(PlanTrial):
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

    def takes_up(self, other: FinalComparison) -> None:
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


class PlanComparison:
    """The tuned plan against the default one, over the sessions that it takes.

    `searched`, where a method takes it: the contexts that were searched since the last comparison began.
    """

    def __init__(self, rules: Rules) -> None:
        self.duel: FinalComparison | None = None  # under way
        self.defaults: dict[str, int] = {}  # the plan before this search, of what is not decided yet
        self._rules = rules
        self._left: FinalComparison | None = None  # an earlier session's, unfinished

    def enter(self, context: Context) -> bool:
        """Keep what is launched before a search; return whether that was made already, by what was left."""
        self.defaults.setdefault(context.name, context.incumbent)
        if self._left is None or context.name not in self._left.plans[TUNED]:
            return False
        winner = self._left.plans[TUNED][context.name]
        context.settle("tuned", None if winner in context.banned else winner)
        return True

    def undecided(self, searched: Iterable[Context]) -> list[Context]:
        """Return the contexts whose winners have yet to beat the default plan."""
        if self.duel is not None:
            return self.duel.contexts
        if self._rules.objective != "thunk":
            return []
        return contested([context for context in searched if context.status == "tuned"], self.defaults)

    def begin(self, searched: Iterable[Context]) -> bool:
        """Compare the plans, where they differ; return whether there was anything to decide."""
        if self._rules.objective != "thunk" or not self.defaults:
            return False
        duel = FinalComparison(self.undecided(searched), self.defaults, self._rules.rank_reduce)
        if self._left is not None:
            duel.takes_up(self._left)
        self._left, self.defaults = None, {}
        self.duel = None if duel.is_over else duel
        return True

    def take(self, merged: RunReport, *, patience: int) -> str:
        """Take in one run of all ranks; return a remark for the log, if the tuned plan is not kept.

        The arguments are those of `FinalComparison.take`.
        """
        duel = self.duel
        if duel is None:
            return ""
        duel.take(merged, patience=patience)
        if not duel.is_over:
            return ""
        self.duel = None
        winner = duel.winner
        if winner == TUNED:
            return ""
        for context in duel.contexts:
            if duel.plans[winner][context.name] not in context.banned:
                context.settle("tuned", duel.plans[winner][context.name])
        kept = "the default plan" if winner == DEFAULT else "the plan by launch times"
        return f"{kept} is kept: it took {duel.ms[winner]} ms, the tuned one {duel.ms[TUNED]} ms"

    def leave(self, searched: Iterable[Context]) -> None:
        """Leave what is not decided to the next session."""
        left = self.duel or FinalComparison(self.undecided(searched), self.defaults, self._rules.rank_reduce)
        if not left.is_over:
            self._left = left
            self.defaults.update(left.defaults)
            left.leave()
        self.duel = None

    def drop(self) -> None:
        """Forget the comparison, under way or left: the session was dropped on all ranks."""
        self.duel, self._left = None, None
