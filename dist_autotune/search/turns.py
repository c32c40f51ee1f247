"""Contexts judged by the whole run one after another, where the strategy is not racing."""

from __future__ import annotations

from collections.abc import Mapping

from .context_search import Context
from .messages import RunReport


class Turns:
    """One context after another: kernels, then choices of the host, each in the order of first launch.

    A context that was not launched in the run of the best plan so far gets no turn: none of its candidates
    would make a difference there. It waits for a run that launches it, of a later winner or because the
    function does so now and then, as long as a context that is under way would, and is starved then.
    """

    def __init__(self) -> None:
        self.name: str | None = None  # of the context whose turn it is
        self._launched: dict[int, frozenset[str]] = {}  # its candidate -> contexts of the last run with it
        self._last: frozenset[str] | None = None  # contexts of the last run; None: there was none

    def record_launches(self, merged: RunReport, context: Context | None) -> None:
        """Keep what a run launched. context: whose turn it was, unless the report is of an earlier run."""
        self._last = merged.launched
        if context is not None and (ran := merged.ran(context.name)) in context.digests:
            self._launched[context.digests.index(str(ran))] = self._last

    def pass_on(self, contexts: Mapping[str, Context]) -> None:
        """Let the next context begin if the last one is settled, and no kernel is judged by its launches."""
        turn = contexts.get(self.name or "")
        if turn is not None and not turn.settled:
            return
        of_plan = self._last  # what the best plan so far launches; None: not known
        if turn is not None and turn.status == "tuned":
            of_plan = self._launched.get(turn.incumbent)
        self.name, self._launched = None, {}
        if any(context.is_tuned_by_launches for context in contexts.values()):
            return
        waiting = [context for context in contexts.values() if not context.settled]
        able = [context for context in waiting if of_plan is None or context.name in of_plan]
        following = min(able, key=lambda context: context.is_choice, default=None)
        if following is not None:
            self.name = following.name
            following.start()
