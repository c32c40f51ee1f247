"""All contexts of one tuned function, the same on every rank: which search begins when, which results stand.

No torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .context_search import Context
from .final_comparison import PlanComparison
from .messages import Announcement, RunReport
from .rules import BY_LAUNCH, BY_RUN, Rules
from .whole_run import WholeRun


class Contexts(dict[str, Context]):
    """By name, in the order in which they were admitted."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.comparison = PlanComparison(rules)  # of the plan that results with the default one
        self._rules = rules
        self.whole_run: WholeRun | None = None  # the search by the time of the whole run, under way
        self._turns = Turns()  # of what is judged by the whole run, one after another
        self._searches: dict[str, int] = {}  # of this session, and the run they began in, from 0
        self._told: dict[str, tuple[str, int | None]] = {}  # results that `newly_final` has returned

    # -- the state -----------------------------------------------------------------------------------------

    @property
    def unsettled(self) -> Iterator[Context]:
        return (context for context in self.values() if not context.settled)

    @property
    def searches(self) -> list[tuple[Context, int]]:
        """Return the searches of this session, and the run that each began in. Any thread may ask."""
        began = tuple(self._searches.items())
        return [(context, run) for name, run in began if (context := self.get(name)) is not None]

    @property
    def on_turn(self) -> Context | None:
        """Return the context whose turn it is to be judged by the whole run."""
        return self.get(self._turns.name or "")

    @property
    def _searched(self) -> Iterator[Context]:
        return (context for context, _ in self.searches)

    @property
    def _undecided(self) -> list[Context]:
        """Return the contexts whose winners have yet to beat the default plan."""
        return self.comparison.undecided(self._searched)

    def is_final(self, context: Context) -> bool:
        """Return whether the context's result stands: no whole run is still to judge it."""
        if not context.settled or context in self._undecided:
            return False
        is_searched = self._rules.races and context.name in self._searches and not context.is_decided
        return not (is_searched and any(other.judge == BY_RUN for other in self.unsettled))

    def newly_final(self) -> list[Context]:
        """Return the contexts whose result stands and is new since this was last asked."""
        new = []
        for context in self.values():
            state = (context.status, context.winner)
            if self.is_final(context) and self._told.get(context.name) != state:
                self._told[context.name] = state
                new.append(context)
        return new

    def winner_digest(self, name: str) -> str:
        return self[name].digests[self[name].incumbent]

    def digest_text(self) -> str:
        """Return the settled state as text: equal on ranks that have lived through the same."""
        return ";".join(
            f"{name}={context.status}:{self.winner_digest(name)}"
            for name, context in sorted(self.items())
            if context.settled
        )

    # -- searches ------------------------------------------------------------------------------------------

    def open(self, *, begins: bool) -> None:
        """Begin a session. `begins`: searches that earlier ones left unfinished are taken up."""
        self.comparison.duel, self.whole_run, self._turns, self._searches = None, None, Turns(), {}
        for context in self.values():
            context.last_run = 0
            if not context.provisional:
                self.comparison.defaults.pop(context.name, None)
            elif begins:
                self.begin(context, 0)

    def admit(
        self, name: str, announcement: Announcement, bans: dict[str, tuple[int, str]], run: int
    ) -> Context:
        """Return a new context. Raises NoValidConfig when nothing works on every rank."""
        context = self[name] = Context(name, announcement, self._rules, run)
        context.take_bans(bans)
        self.comparison.defaults[name] = context.incumbent
        return context

    def begin(self, context: Context, run: int) -> None:
        """Start a search in a run, from 0; one that is judged by the whole run waits for its turn."""
        self._searches[context.name] = run
        if self.comparison.enter(context):
            return
        context.status = ""
        if context.judge == BY_LAUNCH:
            context.start()

    def ran(self, merged: RunReport) -> None:
        """Keep what was launched in a run: only what the best plan launches gets a turn."""
        turn = self.on_turn
        self._turns.ran(merged, None if turn is None or turn.waiting else turn)

    def take_turns(self, *, closing: bool) -> None:
        """Let the next context be judged by the whole run, when all kernels are done; last comes the duel.

        What is new while plans are compared waits until that is over: a whole run is timed for one thing.
        """
        if self.comparison.duel is not None:
            return
        if self._rules.races:
            self._search_plans(closing=closing)
        else:
            self._turns.pass_on(self)
        if any(self.unsettled):
            return
        if not closing and self.comparison.begin(self._searched):
            self._searches = {}

    def _search_plans(self, *, closing: bool) -> None:
        """Let a search by the whole run begin, when all kernels are tuned by their launches, or end."""
        if self.whole_run is not None and self.whole_run.is_over:
            self.whole_run = None
        while self.whole_run is None and not closing:
            waiting = list(self.unsettled)
            if not waiting or any(context.is_tuned_by_launches for context in waiting):
                return
            search = WholeRun(self, self._rules)
            self.whole_run = None if search.is_over else search

    def starve(self, run: int, patience: int) -> None:
        """Settle what no rank has launched for so many runs, unless it is for a plan that leaves it out."""
        for context in self.unsettled:
            if self.whole_run is not None and self.whole_run.explains_absence(context):
                continue
            if run - context.last_run >= patience:
                context.is_unasked = self._is_unasked(context)
                context.settle("starved")

    def _is_unasked(self, context: Context) -> bool:
        """Return whether it is a winner's doing that the context is not launched: it has had no turn yet."""
        others = (other for other in self.values() if other is not context)
        defaults = self.comparison.defaults
        has_changed = any(o.incumbent != defaults.get(o.name, o.incumbent) for o in others)
        return context.judge == BY_RUN and context.name != self._turns.name and has_changed

    def leave(self) -> None:
        """Settle what is under way, for now: the next run is the session's last."""
        if self.whole_run is not None:
            self.whole_run.leave()
            self.whole_run = None
        for context in list(self.unsettled):
            context.settle("partial")
        self.comparison.leave(self._searched)

    def drop_unsettled(self) -> set[str]:
        """Forget searches under way, and what nothing works for: the session was dropped on all ranks.

        Returns the names of what is forgotten.
        """
        spent = [context for context in self.values() if context.is_spent]
        dropped = {context.name for context in (*self.unsettled, *self._undecided, *spent)}
        for name in dropped:
            self.forget(name)
        self.comparison.drop()
        self.whole_run, self._turns = None, Turns()
        return dropped

    def forget(self, name: str) -> None:
        """Drop a context; when it is launched again it is a new one."""
        del self[name]
        self._searches.pop(name, None)
        self.comparison.defaults.pop(name, None)


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

    def ran(self, merged: RunReport, context: Context | None) -> None:
        """Keep what was launched in a run.

        `context`: whose turn it was, unless what it told is of an earlier run.
        """
        self._last = merged.launched
        if context is not None and (ran := merged.ran(context.name)) in context.digests:
            self._launched[context.digests.index(str(ran))] = self._last

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
        if any(context.is_tuned_by_launches for context in waiting):
            return
        following = _first(waiting, of_plan)
        if following is not None:
            self.name = following.name
            following.start()


def _first(waiting: Iterable[Context], of_plan: frozenset[str] | None) -> Context | None:
    """Return the first of those that the best plan launches (None: not known), kernels before choices."""
    able = [context for context in waiting if of_plan is None or context.name in of_plan]
    return min(able, key=lambda context: context.is_choice, default=None)
