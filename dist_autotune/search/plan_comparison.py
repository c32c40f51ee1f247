"""Which results of `objective="thunk"` have yet to beat the default plan. No torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable

from .context_search import Context
from .final_comparison import DEFAULT, TUNED, Duel, contested
from .messages import Payload
from .rules import Rules


class PlanComparison:
    """The tuned plan against the default one, over the sessions that it takes.

    `searched`, where a method takes it: the contexts that were searched since the last comparison began.
    """

    def __init__(self, rules: Rules) -> None:
        self.duel: Duel | None = None  # under way
        self.defaults: dict[str, int] = {}  # the plan before this search, of what is not decided yet
        self._rules = rules
        self._left: Duel | None = None  # the one that a session without runs or time left to the next

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
        duel = Duel(self.undecided(searched), self.defaults, self._rules.rank_reduce)
        if self._left is not None:
            duel.takes_up(self._left)
        self._left, self.defaults = None, {}
        self.duel = None if duel.is_over else duel
        return True

    def take(self, merged: Payload, *, patience: int) -> str:
        """Take in one run of all ranks; return a remark for the log, if the tuned plan is not kept.

        The arguments are those of `Duel.take`.
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
        left = self.duel or Duel(self.undecided(searched), self.defaults, self._rules.rank_reduce)
        if not left.is_over:
            self._left = left
            self.defaults.update(left.defaults)
            left.leave()
        self.duel = None

    def drop(self) -> None:
        """Forget the comparison, under way or left: the session was dropped on all ranks."""
        self.duel, self._left = None, None
