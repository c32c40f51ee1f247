"""The final comparison where whole runs judge kernels: the tuned plan, the default, that by launches."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...formatting import format_ms
from ..context import Context
from ..plans.search import AskedPlan, Search
from ..plans.space import Plan
from ..rules import Rules
from ..shared_context import Status
from .phase import RunPhase

ROUNDS = 6  # of all sides; the first one warms up
DUEL_RUNS = 2 * ROUNDS  # where two plans are compared
MOST_RUNS = 3 * ROUNDS
DEFAULT, BY_LAUNCHES, TUNED = "default", "by launches", "tuned"


@dataclass(frozen=True)
class Sides:
    """The compared plans; replaced where a comparison begins, is left or is dropped."""

    contexts: tuple[Context, ...] = ()  # in which plans differ
    plans: Mapping[str, Plan] = field(default_factory=dict)  # those that differ; `tuned` first
    defaults: Mapping[str, int] = field(default_factory=dict)  # the plan before the search
    is_left: bool = False  # a session has not finished it: the next one goes on


def in_rounds(plans: Mapping[str, Plan], rounds: int, *, keeps_each: bool = False) -> Search:
    """Ask for all plans once a round, in drawn orders, which no period of the caller's fits.

    Runs of a plan are samples of one time, the first one a warm-up; keeps_each: each has its own.
    """
    for number in range(rounds):
        sides = list(plans)
        if number:
            random.Random(f"round {number}").shuffle(sides)
        for side in sides:
            label = f"{side} {number}" if keeps_each else side
            yield AskedPlan(plans[side], label, is_warmup=not (number or keeps_each))
    return {}


class FinalComparison(RunPhase):
    """Compares plans in rounds; outlives its session."""

    def __init__(self, contexts: Mapping[str, Context], rules: Rules) -> None:
        super().__init__(contexts, rules)
        self.is_over = True
        self.defaults: dict[str, int] = {}  # the plan before this search, of undecided contexts
        self._sides = Sides()

    def take_up(self, context: Context) -> bool:
        """Record a context's default candidate; return whether an unfinished comparison has its result."""
        self.defaults.setdefault(context.name, context.incumbent)
        if not self._sides.is_left or context.name not in self._sides.plans[TUNED]:
            return False
        winner = self._sides.plans[TUNED][context.name]
        context.settle(Status.TUNED, None if winner in context.banned else winner)
        return True

    @property
    def is_under_way_or_left(self) -> bool:
        return not self.is_over or self._sides.is_left

    @property
    def undecided(self) -> list[Context]:
        """Return the contexts whose winners have yet to beat the default plan or the plan by launch times."""
        if not self.is_over:
            return list(self._sides.contexts)
        if self._rules.objective == "kernel":
            return []
        tuned = [c for c in self._contexts.values() if c.began is not None and c.status is Status.TUNED]
        rivals = {c.name: {self.defaults.get(c.name), c.launch_winner} - {None, c.winner} for c in tuned}
        return [c for c in tuned if not rivals[c.name] <= c.banned.keys()]

    def begin(self) -> None:
        """Compare the plans of the searched contexts, if they differ."""
        if self._rules.objective == "kernel" or not self.defaults:
            return
        self._set_plans()
        self.defaults = {}
        for context in self._contexts.values():
            context.began = None

    def _set_plans(self) -> None:
        """Set the plans; go on where a comparison of the same plans was left."""
        undecided = self.undecided
        tuned = {context.name: context.incumbent for context in undecided}
        winners = {context.name: context.launch_winner for context in undecided}
        default = {name: self.defaults.get(name, index) for name, index in tuned.items()}
        by_launches = {name: tuned[name] if index is None else index for name, index in winners.items()}
        plans: dict[str, Plan] = {TUNED: tuned}
        for side, plan in ((DEFAULT, default), (BY_LAUNCHES, by_launches)):
            if plan not in plans.values():
                plans[side] = plan
        goes_on = self._sides.is_left and plans == self._sides.plans
        self._sides, self.remark = Sides(tuple(undecided), plans, dict(self.defaults)), ""
        self.waiting, self._was_launched, self._idle_runs = False, True, 0
        self.is_over = len(plans) < 2
        if not goes_on:
            self._ms = {}
            if not self.is_over:
                self._begin(in_rounds(plans, ROUNDS))

    def _finish(self, plan: Plan) -> None:
        for compared, ms in self._ms.values():  # of each candidate, that of the best plan with it
            for name, index in compared.items():
                context = self._contexts[name]
                if index not in context.banned and ms < context.times.ms.get(index, math.inf):
                    context.times.ms[index] = float(ms)
        winner = self._winner
        for name, index in self._sides.plans[winner].items():
            context = self._contexts[name]
            if index not in context.banned:
                context.settle(Status.TUNED, index)
                if winner in self._ms:
                    context.times.ms[index] = float(self._time(winner))
        if winner == TUNED:
            return
        kept = "the default plan" if winner == DEFAULT else "the plan by launch times"
        took = [format_ms(self._time(side)) for side in (winner, TUNED)]
        self.remark = f"{kept} is kept: it took {took[0]} ms, the tuned one {took[1]} ms"

    @property
    def _winner(self) -> str:
        """Return the plan that won: the tuned one has to be faster than the others, and to have a time."""
        best = min((side for side in self._sides.plans if side != TUNED), key=self._time)
        return TUNED if self._time(TUNED) < self._time(best) else best

    def _time(self, side: str) -> float:
        return self._ms[side][1] if side in self._ms else math.inf

    def leave(self) -> None:
        """Leave the comparison to the next session; contexts take the leading plan as provisional."""
        if not self.undecided:
            return
        if self.is_over:
            self._set_plans()
        sides = self._sides
        self.defaults.update(sides.defaults)
        winner = TUNED if len(self._ms) < len(sides.plans) else self._winner
        for name, index in sides.plans[winner].items():
            self._contexts[name].settle(Status.PARTIAL, index)
        self.is_over, self._sides = True, replace(sides, is_left=True)

    def drop(self) -> None:
        """Drop the comparison, under way or left."""
        self.is_over, self._sides = True, replace(self._sides, is_left=False)
