"""The final comparison of `objective="thunk"`: the tuned plan, the default one, that by launches."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping

from .context import Context
from .messages import RunReport
from .plan_trial import Plan, PlanTrial
from .rules import Rules

ROUNDS = 6  # of all sides; the first one warms up
DUEL_RUNS = 2 * ROUNDS  # where two plans are compared
MOST_RUNS = 3 * ROUNDS
DEFAULT, BY_LAUNCHES, TUNED = "default", "by launches", "tuned"


class FinalComparison(PlanTrial):
    """Compares plans in rounds, each in an order of its own, so that no period of the caller's favours one.

    contexts: those in which the plans differ. defaults: the candidates before the search.
    """

    def __init__(self, contexts: Iterable[Context], defaults: dict[str, int], rank_reduce: str) -> None:
        super().__init__({context.name: context for context in contexts}, rank_reduce)
        self.defaults = dict(defaults)  # what was left to another session outlives the plan before it
        tuned = {name: context.incumbent for name, context in self._contexts.items()}
        by_launches = {name: context.launch_winner for name, context in self._contexts.items()}
        plans = {
            TUNED: tuned,
            DEFAULT: {**tuned, **{name: defaults[name] for name in tuned.keys() & defaults.keys()}},
            BY_LAUNCHES: {name: tuned[name] if i is None else i for name, i in by_launches.items()},
        }
        self.plans: dict[str, Plan] = {}  # those that differ; `tuned` first
        for side, plan in plans.items():
            if plan not in self.plans.values():
                self.plans[side] = plan
        self.ms = dict.fromkeys(self.plans, math.nan)
        self._run = 0
        self._sides = [side for n in range(ROUNDS) for side in self._round(n)] if len(self.plans) > 1 else []
        self._ask()

    def _round(self, number: int) -> list[str]:
        sides = list(self.plans)
        if number:
            random.Random(f"round {number}").shuffle(sides)
        return sides

    def _ask(self) -> None:
        self.is_over, self.is_warmup = self._run >= len(self._sides), self._run < len(self.plans)
        self.label = "" if self.is_over else self._sides[self._run]
        self.plan = {} if self.is_over else self.plans[self.label]
        self._apply_plan()

    def resume_from(self, other: FinalComparison) -> None:
        """Go on where another comparison was left, if it is of the same plans."""
        if self.plans == other.plans:
            self._run, self.ms = other._run, other.ms
            self._ask()

    def _record(self, ms: float) -> None:
        if not self.is_warmup:
            self.ms[self.label] = ms
        self._run += 1
        self._ask()

    @property
    def contested(self) -> list[Context]:
        return list(self._contexts.values())

    @property
    def winner(self) -> str:
        """Return the plan that won: the tuned one has to be faster than the others, and to have a time."""
        others = [side for side in self.plans if side != TUNED]
        best = min(others, key=lambda side: (math.isnan(self.ms[side]), self.ms[side]))
        return TUNED if self.ms[TUNED] < self.ms[best] else best

    def leave(self) -> None:
        """Stop before it is over: each context keeps what the comparison so far speaks for, for now."""
        winner = TUNED if any(map(math.isnan, self.ms.values())) else self.winner
        for name, context in self._contexts.items():
            context.override = None
            context.settle("partial", self.plans[winner][name])

    def settle(self) -> str:
        """Let each context keep what the winner says; return a remark if that is not the tuned plan."""
        winner = self.winner
        if winner == TUNED:
            return ""
        for name, context in self._contexts.items():
            if self.plans[winner][name] not in context.banned:
                context.settle("tuned", self.plans[winner][name])
        kept = "the default plan" if winner == DEFAULT else "the plan by launch times"
        return f"{kept} is kept: it took {self.ms[winner]} ms, the tuned one {self.ms[TUNED]} ms"


class PlanComparison:
    """The final comparison of a function, over the sessions that it takes."""

    def __init__(self, contexts: Mapping[str, Context], rules: Rules) -> None:
        self.duel: FinalComparison | None = None  # under way
        self.defaults: dict[str, int] = {}  # the plan before this search, of what is not decided yet
        self._contexts, self._rules = contexts, rules
        self._left: FinalComparison | None = None  # by an earlier session, unfinished

    def enter(self, context: Context) -> bool:
        """Keep what is launched before a search; return whether an unfinished comparison has its result."""
        self.defaults.setdefault(context.name, context.incumbent)
        if self._left is None or context.name not in self._left.plans[TUNED]:
            return False
        winner = self._left.plans[TUNED][context.name]
        context.settle("tuned", None if winner in context.banned else winner)
        return True

    @property
    def undecided(self) -> list[Context]:
        """Return the contexts whose winners have yet to beat the default plan, or that by launches."""
        if self.duel is not None:
            return self.duel.contested
        if self._rules.objective != "thunk":
            return []
        tuned = (c for c in self._contexts.values() if c.began is not None and c.status == "tuned")
        return [c for c in tuned if not self._rivals(c) <= c.banned.keys()]

    def _rivals(self, context: Context) -> set[int | None]:
        return {self.defaults.get(context.name), context.launch_winner} - {None, context.winner}

    def begin(self) -> None:
        """Compare the plans of what was searched, where they differ."""
        if self._rules.objective != "thunk" or not self.defaults:
            return
        duel = self._compared()
        if self._left is not None:
            duel.resume_from(self._left)
        self._left, self.defaults = None, {}
        self.duel = None if duel.is_over else duel
        for context in self._contexts.values():
            context.began = None

    def _compared(self) -> FinalComparison:
        return FinalComparison(self.undecided, self.defaults, self._rules.rank_reduce)

    def apply_run(self, merged: RunReport, *, patience: int) -> str:
        """Record one run of all ranks; return a remark for the log, if the tuned plan is not kept."""
        if self.duel is None:
            return ""
        self.duel.apply_run(merged, patience=patience)
        if not self.duel.is_over:
            return ""
        remark, self.duel = self.duel.settle(), None
        return remark

    def leave(self) -> None:
        """Leave what is not decided to the next session."""
        left = self.duel or self._compared()
        if not left.is_over:
            self._left = left
            self.defaults.update(left.defaults)
            left.leave()
        self.duel = None

    def drop(self) -> None:
        """Drop the comparison, under way or left."""
        self.duel, self._left = None, None
