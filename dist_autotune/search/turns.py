"""Whose turn it is to be judged by the time of the whole run. No torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .context_search import Context
from .messages import Payload
from .rules import BY_LAUNCH


class Turns:
    """One context after another: kernels, then choices of the host, each in the order of first launch.

    A context that was not launched in the run of the best plan so far gets no turn: none of its candidates
    would make a difference there. It waits for a run that launches it, of a later winner or because the
    function does so now and then, as long as a context that is under way would, and is starved then.
    """

    def __init__(self) -> None:
        self.name: str | None = None  # of the context whose turn it is
        self._launched: dict[
            int, frozenset[str]
        ] = {}  # its candidate -> the contexts of the last run with it
        self._last: frozenset[str] | None = None  # the contexts of the last run; None: there was none

    def ran(self, merged: Payload, context: Context | None) -> None:
        """Keep what was launched in a run.

        `context`: whose turn it was, unless what it told is of an earlier run.
        """
        self._last = frozenset(name for name, part in merged.parts.items() if part.ran is not None)
        if context is not None and context.name in self._last:
            ran = merged.parts[context.name].ran
            if ran in context.digests:
                self._launched[context.digests.index(ran)] = self._last

    def pass_on(self, contexts: Mapping[str, Context]) -> None:
        """Let the next context begin if the last one is settled, and no kernel is judged by its launches."""
        turn = contexts.get(self.name or "")
        if turn is not None and not turn.settled:
            return
        of_plan = self._last
        if turn is not None and turn.status == "tuned":
            of_plan = self._launched.get(turn.incumbent)
        self.name, self._launched = None, {}
        waiting = [context for context in contexts.values() if not context.settled]
        if any(context.judge == BY_LAUNCH for context in waiting):
            return
        following = _first(waiting, of_plan)
        if following is not None:
            self.name = following.name
            following.start()


def _first(waiting: Iterable[Context], of_plan: frozenset[str] | None) -> Context | None:
    """Return the first of those that the best plan launches (None: not known), kernels before choices."""
    able = [context for context in waiting if of_plan is None or context.name in of_plan]
    return min(able, key=lambda context: context.is_choice, default=None)
