"""The search for the plan whose whole run is fastest, where the strategy is racing; see docs/search.md."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from . import screening
from .context import Context
from .messages import RunReport
from .plan_trial import Plan, PlanTrial
from .rules import BY_RUN, Rules
from .strategies import racing_runs, rounds

EXPLORED_RUNS = 2  # of an option, behind the tuning of its kernels: first uses cost the host
MORE_RUNS = 40  # of the best plan and that of the incumbents, where they are near
NEAR = 1.08  # of the best plan: options that are raced again
NEW_KEYS_RUNS = 16  # of an option in which it may bring kernels; new keys in every run must end
MOST_PLANS = 64  # of a race
MOST_CANDIDATES = {"kernel": 4, "thunk": 16}  # of a kernel, by objective
WITHIN = {"kernel": 1.05, "thunk": 1.5}  # of a kernel's fastest by launches
FIRST_CANDIDATES = 2  # of a kernel, while options are chosen
MOST_WIDER = 12  # of a kernel, when they have been ...
WIDER = 1.15  # ... within so much of its fastest by launches, beside the first options


Search: TypeAlias = Generator[Plan, float, Plan]
Launched: TypeAlias = Mapping[tuple[str, int], frozenset[str]]  # (choice, option) -> contexts seen with it


def runs_at_most(choices: Iterable[int], kernels: int) -> int:
    """Return how many runs the search takes at most, for so many options of each choice, and kernels."""
    explored = sum(options * (EXPLORED_RUNS + 1) for options in choices)
    screened = screening.RUNS + math.ceil(racing_runs(screening.MOST_FINALISTS)) if kernels > 1 else 0
    raced = math.ceil(racing_runs(MOST_PLANS))
    return explored + max(raced * (2 if explored else 1), screened) + MORE_RUNS


class WholeRun(PlanTrial):
    """The search over all that the whole run judges, and the kernels launched with it."""

    def __init__(self, contexts: Mapping[str, Context], rules: Rules) -> None:
        super().__init__(contexts, rules.rank_reduce)
        self._objective = rules.objective
        self._search = self._searched()
        self._ms: dict[str, tuple[Plan, float]] = {}  # by label: the raced plans and their agreed times
        self._explored_runs = 0
        self._option_runs = 0  # since the option that is explored was first launched
        self._launched: frozenset[str] = frozenset()  # in the last run
        self._was_held = False  # the last run had a kernel on trial
        self._seen: frozenset[str] | None = None  # launched under some option; None: there are no options
        self._members = {c.name for c in contexts.values() if not c.settled}  # settled by this search
        self._resume(None)

    @property
    def admits(self) -> bool:
        """Return whether a new kernel is tuned: the option that is explored may have brought it."""
        return self.is_warmup and self._option_runs <= NEW_KEYS_RUNS

    @property
    def holds(self) -> bool:
        return any(context.is_tuned_by_launches for context in self._contexts.values())

    def explains_absence(self, context: Context) -> bool:
        """Return whether a context may be launched again though it was not: under other options."""
        return context.judge == BY_RUN and bool(self._choices())

    def apply_run(self, merged: RunReport, *, patience: int) -> None:
        """Record one run of all ranks. One with a kernel on trial judges nothing."""
        self.has_counted = False
        self._launched = merged.launched
        self._option_runs += 1
        was_held, self._was_held = self._was_held, self.holds
        if self._was_held or was_held or not self._ran_as_planned(merged):
            self._apply_plan()
        else:
            super().apply_run(merged, patience=patience)

    def _ran_as_planned(self, merged: RunReport) -> bool:
        if self.waiting:
            return True  # the report is of an earlier run
        for name, index in self.plan.items():
            context = self._contexts[name]
            if merged.ran(name) not in (None, context.digests[index]):
                return index in context.banned
        return True

    def _record(self, ms: float) -> None:
        if self.is_warmup:
            self._explored_runs += 1
            if self._explored_runs >= EXPLORED_RUNS:
                self._resume(ms)
            return
        if self._is_banned(self.plan):  # in this run: another candidate stood in
            ms = math.inf
        self._ms[self.label] = self.plan, ms if math.isfinite(ms) else math.inf
        self._resume(ms)

    def _resume(self, ms: float | None) -> None:
        self._explored_runs = self._option_runs = 0
        try:
            while True:
                self.plan = next(self._search) if ms is None else self._search.send(ms)
                if not self._is_banned(self.plan):
                    break
                self._launched, ms = frozenset(), math.inf
        except StopIteration as stop:
            self.is_over = True
            self._settle(self._best_so_far() if self._is_banned(stop.value) else stop.value, "tuned")
        text = ";".join(f"{name}={index}" for name, index in sorted(self.plan.items()))
        self.label = f"plan {hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self._apply_plan()

    def leave(self) -> None:
        """Stop early: each context takes the best candidate so far, as partial."""
        self._search.close()
        self._settle(self._best_so_far(), "partial")

    def _is_banned(self, plan: Plan) -> bool:
        return any(index in self._contexts[name].banned for name, index in plan.items())

    def _timed(self) -> list[tuple[float, Plan]]:
        """Return the timed plans without a banned candidate, the fastest first."""
        raced = [(ms, plan) for plan, ms in self._ms.values()]
        timed = [(ms, plan) for ms, plan in raced if math.isfinite(ms) and not self._is_banned(plan)]
        return sorted(timed, key=lambda each: each[0])

    def _best_so_far(self) -> Plan:
        return next((plan for _, plan in self._timed()), {})

    def _settle(self, plan: Plan, status: str) -> None:
        raced = self._timed()
        for context in self._contexts.values():
            context.override = None
            if context.is_tuned_by_launches or context.provisional:
                continue
            is_member = context.name in self._members and not context.settled
            timed = [(ms, plan[context.name]) for ms, plan in raced if context.name in plan]
            if context.name in plan:
                context.settle(status, plan[context.name])
                context.is_decided = status == "tuned"
            elif is_member:
                is_gone = self._seen is not None and context.name not in self._seen
                winner = timed[0][1] if timed else context.incumbent
                context.settle("starved" if is_gone and status == "tuned" else status, winner)
            if is_member:
                for ms, index in timed:  # of each candidate, that of the best plan with it
                    context.times.ms.setdefault(index, float(ms))

    def _searched(self) -> Search:
        """Explore the options, race plans, race wider ones beside the best options; return the best plan."""
        launched: dict[tuple[str, int], frozenset[str]] = {}  # under each option of each choice
        met_under: dict[str, Plan] = {}  # the options under which a choice is asked for
        self.is_warmup = True
        while (found := self._unexplored(launched)) is not None:
            name, index = found
            plan = {**met_under.setdefault(name, {}), name: index}
            before = set(self._choices())
            yield plan
            launched[name, index] = self._launched
            self._seen = (self._seen or frozenset()) | self._launched
            met_under.update(dict.fromkeys(set(self._choices()) - before, plan))
        self.is_warmup = False
        self._members |= {c.name for c in self._contexts.values() if not c.settled}
        space = PlanSpace(self._contexts, self._objective, self._choices(), launched)
        plans = space.plans(few=bool(launched))
        if plans is None:  # screened with all that there is
            return (yield from self._raced((yield from screening.screened(space.levels()))))
        best = yield from self._raced(plans)
        if not launched:
            return best
        raced = [plan for plan, _ in self._ms.values()]
        wider = [plan for plan in space.wider(self._timed())[:MOST_PLANS] if plan != best]
        if all(plan in raced for plan in wider):
            return best
        return (yield from self._raced([best, *wider]))

    @staticmethod
    def _raced(plans: Sequence[Plan]) -> Search:
        """Race the plans, of which the first wins ties; return the best."""
        if len(plans) < 2:
            return plans[0]
        flow = rounds(list(range(len(plans))), 0, racing_runs(len(plans)), MORE_RUNS)
        index = next(flow)
        while True:
            ms = yield plans[index]
            try:
                index = flow.send(ms)
            except StopIteration as stop:
                return plans[int(stop.value)]

    def _choices(self) -> list[str]:
        """Return the choices of this search, in the order of their first launch."""
        judged = (c for c in self._contexts.values() if c.judge == BY_RUN and not c.settled)
        return [context.name for context in judged if context.is_choice and len(context.digests) > 1]

    def _unexplored(self, launched: Launched) -> tuple[str, int] | None:
        choices = [self._contexts[name] for name in self._choices()]
        options = ((c.name, i) for c in choices for i in range(len(c.digests)) if i not in c.banned)
        return next((option for option in options if option not in launched), None)


class PlanSpace:
    """All plans that one search may race."""

    def __init__(
        self, contexts: Mapping[str, Context], objective: str, choices: list[str], launched: Launched
    ) -> None:
        self._objective = objective
        seen = frozenset().union(*launched.values()) if launched else frozenset(contexts)
        self._choices = [name for name in choices if name in seen]
        self._contexts, self._launched = contexts, launched
        kernels = (c for c in contexts.values() if not c.is_choice and c.launch_ms and not c.is_decided)
        self._kernels = [kernel for kernel in kernels if kernel.name in seen]

    def plans(self, *, few: bool) -> list[Plan] | None:
        """Return all plans, that of the incumbents first; `few`: with few candidates of each kernel.

        With fewer, down to what is worth a screening, where those were too many plans; None: even then.
        """
        most = FIRST_CANDIDATES if few else MOST_CANDIDATES[self._objective]
        least = 1 if self._objective == "kernel" else min(screening.MOST_LEVELS, most)
        for candidates in range(most, least - 1, -1):
            plans = list(itertools.islice(self._all(candidates), MOST_PLANS + 1))
            if len(plans) <= MOST_PLANS:
                return plans
        return None

    def wider(self, timed: Sequence[tuple[float, Plan]]) -> list[Plan]:
        """Return plans of the options near to the best, with more candidates, the most promising first.

        A plan promises the best time of its options, times what its candidates take by launches over the
        fastest. timed: the plans that were raced, the fastest first.
        """
        near: list[tuple[float, Plan]] = []
        for ms, plan in timed:
            options: Plan = {n: index for n, index in plan.items() if self._contexts[n].is_choice}
            if ms <= NEAR * timed[0][0] and options not in [known for _, known in near]:
                near.append((ms, options))
        promised: list[tuple[float, Plan]] = []
        for options_ms, options in near:
            kernels = self._launched_by(options)
            most = MOST_WIDER if len(kernels) < 2 else FIRST_CANDIDATES
            for plan in itertools.islice(self._with_kernels(options, most, WIDER), MOST_PLANS):
                ratio = (k.launch_ms.get(plan[k.name], math.inf) / min(k.launch_ms.values()) for k in kernels)
                promised.append((options_ms * math.prod(ratio), plan))
        promised.sort(key=lambda promise: promise[0])
        return [plan for _, plan in promised]

    def levels(self) -> dict[str, dict[int, float]]:
        """Return the candidates of each context that could matter, with ms by their launches."""
        levels = {name: dict.fromkeys(self._options(name), 0.0) for name in self._choices}
        for kernel in self._kernels if self._objective == "thunk" else ():
            shortlist = kernel.shortlist(screening.MOST_LEVELS, WITHIN[self._objective])
            levels[kernel.name] = {index: kernel.launch_ms.get(index, 0.0) for index in shortlist}
        return levels

    def _all(self, most: int) -> Iterator[Plan]:
        known: list[Plan] = []
        for indices in itertools.product(*(self._options(name) for name in self._choices)):
            combination = dict(zip(self._choices, indices, strict=True))
            options = {name: i for name, i in combination.items() if self._is_launched(name, combination)}
            if options not in known:
                known.append(options)
                yield from self._with_kernels(options, most, WITHIN[self._objective])

    def _with_kernels(self, options: Plan, most: int, within: float) -> Iterator[Plan]:
        """Yield the plans of these options with the best candidates of the kernels that they launch."""
        kernels = self._launched_by(options)
        for candidates in itertools.product(*(kernel.shortlist(most, within) for kernel in kernels)):
            yield {**options, **{k.name: i for k, i in zip(kernels, candidates, strict=True)}}

    def _launched_by(self, options: Plan) -> list[Context]:
        return [kernel for kernel in self._kernels if self._is_launched(kernel.name, options)]

    def _options(self, name: str) -> list[int]:
        context = self._contexts[name]
        options = [index for index in range(len(context.digests)) if index not in context.banned]
        return sorted(options, key=lambda index: (index != context.incumbent, index))

    def _is_launched(self, name: str, combination: Plan) -> bool:
        """Return whether a context is launched under these options, as all choices that matter to it say."""
        for choice, index in combination.items():
            seen = {i: name in launched for (c, i), launched in self._launched.items() if c == choice}
            if choice != name and len(set(seen.values())) > 1 and not seen.get(index, False):
                return False
        return True
