"""Who is judged by whole runs next, where strategies other than racing take one context after another."""

from __future__ import annotations

from collections.abc import Mapping

from .context import Context
from .messages import RunReport


class Turns:
    """One context after another: kernels, then choices of the host, each in the order of first launch.

    A context that the best plan so far does not launch waits for one that does, or starves.
    """

    def __init__(self) -> None:
        self.context: Context | None = None  # whose turn it is
        self._launched: dict[int, frozenset[str]] = {}  # its candidate -> contexts of the last run with it
        self._last: frozenset[str] | None = None  # contexts of the last run; None: there was none

    def record_launches(self, merged: RunReport) -> None:
        """Keep what a run launched."""
        self._last, context = merged.launched, self.context
        if context is not None and not context.waiting:  # else the report is of an earlier run
            index = context.index_of(merged.ran(context.name))
            if index is not None:
                self._launched[index] = self._last

    def pass_on(self, contexts: Mapping[str, Context]) -> None:
        """Let the next context begin if the last one is settled, and no kernel is judged by its launches."""
        turn = self.context
        if turn is not None and not turn.settled:
            return
        of_plan = self._last  # contexts that the best plan launches; None: unknown
        if turn is not None and turn.status == "tuned":
            of_plan = self._launched.get(turn.incumbent)
        self.context, self._launched = None, {}
        if any(context.is_tuned_by_launches for context in contexts.values()):
            return
        waiting = [context for context in contexts.values() if not context.settled]
        able = [context for context in waiting if of_plan is None or context.name in of_plan]
        self.context = min(able, key=lambda context: context.is_choice, default=None)
        if self.context is not None:
            self.context.start()
