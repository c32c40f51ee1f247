"""The search for the plan whose whole run is fastest; with `search="racing"`. No torch, no I/O, no clock.

1. *Explore.* Each option of each choice is launched until the kernels that it brings are tuned by their own
   launches, so that no option is judged with an untuned kernel. What each option launches is kept.
2. *Shortlist.* Of each kernel the few candidates that could matter: with `objective="thunk"` all within a
   factor of the fastest by launches, else those so near to it that the whole run may decide.
3. *Race* of all plans that these make, if they are few (`MOST_PLANS`): options and candidates that pay only
   together are found, as each plan is a candidate of its own. Many plans are screened first (`screening`).
4. *Widen.* The options that came near to the best are raced once more, each with more candidates of their
   kernels: what is fastest beside one option need not be beside another.

The method is on a page of its own: docs/search.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from . import screening
from .context_search import Context
from .messages import RunReport
from .plan_space import MOST_PLANS, PlanSpace
from .plan_trial import Plan, PlanTrial
from .rules import BY_LAUNCH, BY_RUN, Rules
from .strategies import Warmup, racing_runs, rounds

EXPLORED_RUNS = 2  # of an option, behind the tuning of its kernels: first uses cost the host
MORE_RUNS = 40  # of the best plan and that of the incumbents, where they are near
NEAR = 1.08  # of the best plan: options that are raced again
NEW_KEYS_RUNS = 16  # of an option in which it may bring kernels; new keys in every run must end


@dataclass(frozen=True)
class Explore:
    """Ask for runs of a plan that are no samples; answered with the names of the contexts launched."""

    plan: Plan


Asked: TypeAlias = "Explore | Plan"
Search: TypeAlias = Generator[Asked, "float | frozenset[str]", Plan]


def runs_at_most(choices: Iterable[int], kernels: int) -> int:
    """Return how many runs the search takes at most, for so many options of each choice, and kernels."""
    explored = sum(options * (EXPLORED_RUNS + 1) for options in choices)
    screened = screening.RUNS + math.ceil(racing_runs(screening.MOST_FINALISTS)) if kernels > 1 else 0
    raced = math.ceil(racing_runs(MOST_PLANS))
    return explored + max(raced * (2 if explored else 1), screened) + MORE_RUNS


class WholeRun(PlanTrial):
    """The search over all contexts that are judged by the whole run, and the kernels launched with them."""

    def __init__(self, contexts: Mapping[str, Context], rules: Rules) -> None:
        super().__init__(rules.rank_reduce)
        self._contexts, self._rules = contexts, rules
        self._search = self._searched()
        self._asked: Asked = {}
        self._ms: dict[str, tuple[Plan, float]] = {}  # by label: the agreed time of what was raced
        self._explored_runs = 0
        self.option_runs = 0  # since the option that is explored was first launched
        self._is_over = False
        self._launched: frozenset[str] = frozenset()  # in the last run
        self._was_held = False  # the last run had a kernel on trial
        self._seen: frozenset[str] | None = None  # launched under some option; None: there are no options
        self._members = {c.name for c in contexts.values() if not c.settled}  # settled by this search
        self._resume(None)

    # -- what the next run is ------------------------------------------------------------------------------

    @property
    def _plan(self) -> Plan:
        return self._asked.plan if isinstance(self._asked, Explore) else self._asked

    @property
    def is_exploring(self) -> bool:
        """Return whether the next run is of an option whose kernels may be new."""
        return isinstance(self._asked, Explore) and not self._is_over

    @property
    def admits(self) -> bool:
        """Return whether a kernel that is new now is tuned: the option explored may have brought it."""
        return self.is_exploring and self.option_runs <= NEW_KEYS_RUNS

    @property
    def holds(self) -> bool:
        """Return whether kernels are tuned by their launches first: nothing is judged meanwhile."""
        return any(c.judge == BY_LAUNCH and not c.settled for c in self._contexts.values())

    @property
    def label(self) -> str:
        text = ";".join(f"{name}={index}" for name, index in sorted(self._plan.items()))
        return f"plan {hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def is_warmup(self) -> bool:
        return self.is_exploring

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def compared(self) -> Iterable[Context]:
        return [self._contexts[name] for name in self._plan if name in self._contexts]

    def explains_absence(self, context: Context) -> bool:
        """Return whether a context may be launched again though it was not: under other options."""
        return context.judge == BY_RUN and any(
            c.is_choice and self._is_open(c) for c in self._contexts.values()
        )

    # -- one run -------------------------------------------------------------------------------------------

    def take(self, merged: RunReport, *, patience: int) -> None:
        """Take in one run of all ranks, see `PlanTrial.take`. A run with a kernel on trial judges nothing."""
        self.has_counted = False
        self._launched = frozenset(name for name, part in merged.parts.items() if part.ran is not None)
        if self.is_exploring:
            self.option_runs += 1
        was_held, self._was_held = self._was_held, self.holds
        if self._was_held or was_held or not self._ran_as_planned(merged):
            self._turn()
            return
        super().take(merged, patience=patience)

    def advance(self, ms: float) -> None:
        if self.is_exploring:
            self._explored_runs += 1
            if self._explored_runs >= EXPLORED_RUNS:
                self._resume(self._launched)
            return
        if self._is_banned(self._plan):  # in this run: another candidate stood in
            ms = math.inf
        self._ms[self.label] = self._plan, ms if math.isfinite(ms) else math.inf
        self._resume(ms)

    def leave(self) -> None:
        """Stop before it is over: each context takes what is known so far, for now."""
        self._search.close()
        self._settle(self._best_so_far(), "partial")

    def _ran_as_planned(self, merged: RunReport) -> bool:
        """Return whether all ranks that launched a context of the plan launched its candidate."""
        if self.waiting:
            return True  # of an earlier run
        for name, index in self._plan.items():
            context, part = self._contexts.get(name), merged.parts.get(name)
            if context is not None and part is not None and part.ran not in (None, context.digests[index]):
                return index in context.banned
        return True

    def _resume(self, answer: float | frozenset[str] | None) -> None:
        """Send the answer to the search; take what it asks for next, or its plan."""
        self._explored_runs = self.option_runs = 0
        try:
            while True:
                self._asked = next(self._search) if answer is None else self._search.send(answer)
                if not self._is_banned(self._plan):
                    break
                answer = frozenset() if isinstance(self._asked, Explore) else math.inf
        except StopIteration as stop:
            self._is_over = True
            plan = self._best_so_far() if self._is_banned(stop.value) else stop.value
            self._settle(plan, "tuned")
        self._turn()

    def _is_banned(self, plan: Plan) -> bool:
        return any(n not in self._contexts or i in self._contexts[n].banned for n, i in plan.items())

    def _turn(self) -> None:
        """Let each context launch what the plan says in the next run."""
        plan = {} if self._is_over or self.waiting else self._plan
        for context in self._contexts.values():
            is_tuned_now = context.judge == BY_LAUNCH and not context.settled
            context.override = None if is_tuned_now else plan.get(context.name)

    def _timed(self) -> list[tuple[float, Plan]]:
        """Return the plans that have a time and that nothing is banned of, the fastest first."""
        timed = [
            (ms, plan) for plan, ms in self._ms.values() if math.isfinite(ms) and not self._is_banned(plan)
        ]
        return sorted(timed, key=lambda raced: raced[0])

    def _best_so_far(self) -> Plan:
        return next((plan for _, plan in self._timed()), {})

    def _settle(self, plan: Plan, status: str) -> None:
        for context in self._contexts.values():
            context.override = None
            if (context.judge == BY_LAUNCH and not context.settled) or context.provisional:
                continue
            is_member = context.name in self._members and not context.settled
            if context.name in plan:
                context.settle(status, plan[context.name])
                context.is_decided = status == "tuned"
            elif is_member:
                is_gone = self._seen is not None and context.name not in self._seen
                context.settle("starved" if is_gone and status == "tuned" else status, self._best_of(context))
            if is_member:
                self._keep_times(context)

    def _best_of(self, context: Context) -> int:
        """Return the candidate of the best plan that launches a context; the incumbent if there is none."""
        known = (plan[context.name] for _, plan in self._timed() if context.name in plan)
        return next(known, context.incumbent)

    def _keep_times(self, context: Context) -> None:
        """Keep of each candidate the time of the best plan with it."""
        for ms, plan in self._timed():
            if context.name in plan:
                context.times.ms.setdefault(plan[context.name], float(ms))

    # -- the search ----------------------------------------------------------------------------------------

    def _searched(self) -> Search:
        """Explore, then race plans; return the best one."""
        launched: dict[tuple[str, int], frozenset[str]] = {}
        met_under: dict[str, Plan] = {}  # what a choice needs to be asked for at all
        while (found := self._unexplored(launched, met_under)) is not None:
            name, index = found
            plan = {**met_under.setdefault(name, {}), name: index}
            before = set(self._choices())
            answer = yield Explore(plan)
            assert isinstance(answer, frozenset)
            launched[name, index] = answer
            self._seen = (self._seen or frozenset()) | answer
            for new in set(self._choices()) - before:
                met_under[new] = plan
        self._members |= {c.name for c in self._contexts.values() if not c.settled}
        space = PlanSpace(self._contexts, self._rules.objective, self._choices(), launched)
        plans = space.plans(few=bool(launched))
        if plans is None:  # screened with all that there is
            finalists = yield from self._screened(space)
            return (yield from self._raced(finalists))
        best = yield from self._raced(plans)
        if not launched:
            return best
        raced = [plan for plan, _ in self._ms.values()]
        wider = [plan for plan in space.wider(self._near(space))[:MOST_PLANS] if plan != best]
        if all(plan in raced for plan in wider):
            return best
        return (yield from self._raced([best, *wider]))

    def _raced(self, plans: list[Plan]) -> Generator[Plan, float | frozenset[str], Plan]:
        """Race the plans, of which the first wins ties; return the best."""
        flow = rounds(list(range(len(plans))), 0, racing_runs(len(plans)), MORE_RUNS)
        asked = next(flow) if len(plans) > 1 else None
        while asked is not None:
            index = asked.index if isinstance(asked, Warmup) else asked
            ms = yield plans[index]
            assert isinstance(ms, float)
            try:
                asked = flow.send(ms)
            except StopIteration as stop:
                return plans[int(stop.value)]
        return plans[0]

    def _near(self, space: PlanSpace) -> list[tuple[float, Plan]]:
        """Return the options that came near to the best plan, each with the time of its best plan."""
        near: list[tuple[float, Plan]] = []
        for ms, plan in self._timed():
            options = space.options_of(plan)
            if options not in [known for _, known in near] and ms <= NEAR * (near[0][0] if near else ms):
                near.append((ms, options))
        return near

    def _screened(self, space: PlanSpace) -> Generator[Plan, float | frozenset[str], list[Plan]]:
        """Find the plans that are worth a race, of too many to race all."""
        screen = screening.screened(space.levels())
        plan = next(screen)
        while True:
            ms = yield plan
            assert isinstance(ms, float)
            try:
                plan = screen.send(ms)
            except StopIteration as stop:
                finalists: list[Plan] = stop.value
                return finalists

    def _choices(self) -> list[str]:
        """Return the choices that this search decides on, in the order in which they were met."""
        return [c.name for c in self._contexts.values() if c.is_choice and self._is_open(c)]

    def _is_open(self, context: Context) -> bool:
        return context.judge == BY_RUN and not context.settled and len(context.digests) > 1

    def _unexplored(
        self, launched: Mapping[tuple[str, int], frozenset[str]], met_under: dict[str, Plan]
    ) -> tuple[str, int] | None:
        for name in self._choices():
            context = self._contexts[name]
            for index in range(len(context.digests)):
                if (name, index) not in launched and index not in context.banned:
                    return name, index
        return None
