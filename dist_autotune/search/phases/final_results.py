"""Which results of a session are final, and which are new since they were last asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..context import Context, RunVerdict
from ..rules import BY_RUN, Rules
from .final_comparison import FinalComparison
from .verify_bits import VerifyBits


class FinalResults:
    """Follows from the contexts and from the phases that may still change their winners.

    unsettled: returns the contexts under search.
    """

    def __init__(
        self,
        unsettled: Callable[[], Iterable[Context]],
        rules: Rules,
        comparison: FinalComparison,
        verify_bits: VerifyBits | None,
    ) -> None:
        self._unsettled, self._rules = unsettled, rules
        self._comparison, self._verify_bits = comparison, verify_bits
        self._reported: dict[str, str] = {}  # results that `newly_final` has returned

    def is_undecided(self, context: Context) -> bool:
        """Return whether a settled context is still compared."""
        unverified = [] if self._verify_bits is None else self._verify_bits.unverified
        return context in self._comparison.undecided or context in unverified

    def is_final(self, context: Context) -> bool:
        """Return whether the context's result is final: no whole run is still to judge it."""
        if not context.settled or context in self._comparison.undecided:
            return False
        if self._verify_bits is not None and not self._verify_bits.is_final(context):
            return False
        is_open = self._rules.races and context.began is not None and context.by_run is not RunVerdict.DECIDED
        return not (is_open and any(other.judge == BY_RUN for other in self._unsettled()))

    def stays(self, context: Context) -> bool:
        """Return whether a context outlives a session that is dropped."""
        return context.settled and not (context.is_spent or self.is_undecided(context))

    def newly_final(self, contexts: Iterable[Context]) -> list[Context]:
        """Return the `contexts` whose result has become final since the last call."""
        new = []
        for context in contexts:
            result = f"{context.status} {context.winner}"
            if self.is_final(context) and self._reported.get(context.name) != result:
                self._reported[context.name] = result
                new.append(context)
        return new

    def forget(self, name: str) -> None:
        self._reported.pop(name, None)
