"""The phase in which the whole run judges: options and, with `objective="thunk"`, kernels, as plans."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

from ..context import Context, RunVerdict
from ..plans import predicted
from ..plans import search as plan_search
from ..plans.search import AskedPlan, Search
from ..plans.space import SHARE_STEP, Plan, PlanSpace, levels_of
from ..reports import AgreedRun
from ..rules import BY_RUN, Rules
from ..shared_context import Status
from .phase import RunPhase, TakeTurns

FAMILY, OWN_SAY = 3, 1.15  # contexts of a kernel that steady each other; how far one may differ from them
EXPLORED_RUNS = 2  # of an option, after the tuning of its kernels: first uses cost the host
HOST_SHARE = 0.95  # of the device's time of a run: a host that takes longer bounds it


def runs_at_most(choices: Mapping[str, int], kernels: int) -> int:
    """Return how many runs the phase takes at most, for so many options of each choice, and kernels."""
    explored = sum(options * (EXPLORED_RUNS + 1) for options in choices.values())
    searched = plan_search.runs_at_most(kernels, [*choices.values()])
    return explored + (max(searched, predicted.MOST_RUNS) if kernels and choices else searched)


class RaceRuns(RunPhase):
    """The search over all that the whole run judges, and the kernels launched with it.

    number: of the search in its session.
    """

    def __init__(self, contexts: Mapping[str, Context], rules: Rules, number: int) -> None:
        super().__init__(contexts, rules, f"{number}: ")
        self._objective = rules.objective
        self._host_ms = 0.0  # of the slowest rank, in the last run
        self._seen: frozenset[str] | None = None  # launched under some option; None: there are no options
        self._members = {c.name for c in contexts.values() if not c.settled}  # settled by this search
        self._left: dict[str, tuple[Status, int | None, dict[int, float]]] = {}  # status, winner, ms then
        self._untried = ""  # what was not tried, and why
        self._begin(self._searched())

    def explains_absence(self, context: Context) -> bool:
        return super().explains_absence(context) and bool(self._choices())

    def record(self, report: AgreedRun, *, patience: int) -> None:
        self._host_ms = report.host.enqueue_ms
        super().record(report, patience=patience)

    def _finish(self, plan: Plan) -> None:
        self._settle(self._best_so_far() if self._is_banned(plan) else plan, Status.TUNED)

    def leave(self) -> None:
        """Stop early: each context takes the best candidate so far, as partial. `resume` goes on."""
        judged = (c for c in self._contexts.values() if not (c.is_tuned_by_launches or c.provisional))
        self._left = {c.name: (c.status, c.winner, {**c.times.ms}) for c in judged}
        self._settle(self._best_so_far(), Status.PARTIAL)

    def resume(self) -> None:
        """Go on in another session: contexts that `leave` has settled are as they were."""
        for name, (status, winner, ms) in self._left.items():
            context = self._contexts[name]
            if context.provisional:
                context.status, context.winner, context.began = status, winner, 0
                context.times.ms = {i: each for i, each in ms.items() if i not in context.banned}

    def _timed(self) -> list[tuple[float, Plan]]:
        """Return the timed plans without a banned candidate, the fastest first."""
        timed = [(ms, plan) for plan, ms in self._ms.values() if not self._is_banned(plan)]
        return sorted(timed, key=lambda each: each[0])

    def _best_so_far(self) -> Plan:
        return next((plan for _, plan in self._timed()), {})

    def _settle(self, plan: Plan, status: Status) -> None:
        raced = self._timed()
        kept = [(ms, each) for each, ms in self._ms.values() if each == plan][-1:]
        self.remark = "; ".join(filter(None, (self._untried, self._host_note(raced))))
        for context in self._contexts.values():
            if context.is_tuned_by_launches or context.provisional:
                continue
            is_member = context.name in self._members and not (context.settled or context.is_tuned_separately)
            timed = [(ms, p[context.name]) for ms, p in [*kept, *raced] if context.name in p]
            if context.name in plan:
                context.settle(status, plan[context.name])
                context.by_run = RunVerdict.DECIDED if status is Status.TUNED else RunVerdict.NOTHING
            elif is_member:
                is_gone = self._seen is not None and context.name not in self._seen
                winner = timed[0][1] if timed else context.incumbent
                context.settle(Status.STARVED if is_gone and status is Status.TUNED else status, winner)
            if is_member:
                for ms, index in timed:  # of each candidate, that of the best plan with it
                    context.times.ms.setdefault(index, float(ms))

    def _host_note(self, raced: list[tuple[float, Plan]]) -> str:
        """Return a note where the host takes longer for a run than the device: no plan makes it faster."""
        if not raced or self._objective == "graph" or self._host_ms < HOST_SHARE * raced[0][0]:
            return ""
        return (
            f"the host bounds this function: it takes {self._host_ms:.3g} ms to enqueue a run, of which "
            f"the device works {raced[0][0]:.3g} ms. Plans were compared by the device's time, after a "
            "filler; they matter once the host is faster, or in a CUDA graph"
        )

    def _searched(self) -> Search:
        """Explore the options; then search the plans."""
        launched: dict[tuple[str, int], frozenset[str]] = {}  # under each option of each choice
        met_under: dict[str, dict[str, int]] = {}  # the options under which a choice is asked for
        while group := self._unexplored(launched, met_under):
            name, index = group[0]
            plan = {**met_under.setdefault(name, {}), **dict(group)}
            before = set(self._choices())
            for _ in range(EXPLORED_RUNS):
                yield AskedPlan(plan, f"explored {name} {index}", is_warmup=True, may_bring=True)
            launched.update(dict.fromkeys(group, self._launched))
            self._seen = (self._seen or frozenset()) | self._launched
            met_under.update(dict.fromkeys(set(self._choices()) - before, plan))
        self._members |= {c.name for c in self._contexts.values() if not c.settled}
        keeps_kernels = self._objective == "kernel"
        space = self._space(launched)
        if plans := predicted.plans_of(space):
            return (yield from predicted.fastest_predicted_plan(space, plans))
        plan = yield from plan_search.fastest_plan(space, self._note, keeps_kernels=keeps_kernels)
        if plan and not self._ms:  # it is the only one that launches leave: without a time nothing is stored
            yield AskedPlan(plan, "the only plan")
        return plan

    def _note(self, untried: str) -> None:
        self._untried = untried

    def _space(self, launched: dict[tuple[str, int], frozenset[str]]) -> PlanSpace:
        seen = frozenset().union(*launched.values()) if launched else frozenset(self._contexts)
        choices = {name: self._options(name) for name in self._choices() if name in seen}
        judged = [
            c
            for c in self._contexts.values()
            if c.name in seen and not c.is_choice and c.launch_ms and c.by_run is not RunVerdict.DECIDED
        ]
        ratios = _family_ratios(judged)
        kernels = [
            levels_of(c.name, _steadied_ms(c, ratios), c.shares, c.incumbent, c.launches) for c in judged
        ]
        texts = {name: context.texts for name, context in self._contexts.items()}
        return PlanSpace(kernels, choices, launched, texts)

    def _options(self, name: str) -> list[int]:
        context = self._contexts[name]
        options = [index for index in range(len(context.digests)) if index not in context.banned]
        return sorted(options, key=lambda index: (index != context.incumbent, index))

    def _choices(self) -> list[str]:
        """Return the choices of this search, in the order of their first launch."""
        judged = (
            c
            for c in self._contexts.values()
            if c.judge == BY_RUN and not (c.settled or c.is_tuned_separately)
        )
        return [context.name for context in judged if context.is_choice and len(context.digests) > 1]

    def _unexplored(
        self, launched: Mapping[tuple[str, int], frozenset[str]], met_under: Mapping[str, Plan]
    ) -> list[tuple[str, int]]:
        """Return the next option, with the same of choices that have the same options and are met alike."""
        choices = [self._contexts[name] for name in self._choices()]
        options = [(c, i) for c in choices for i in range(len(c.digests)) if i not in c.banned]
        left = [(c, i) for c, i in options if (c.name, i) not in launched]
        if not left:
            return []
        first, index = left[0]
        alike = [
            c
            for c, i in left
            if i == index
            and c.texts == first.texts
            and met_under.get(c.name, {}) == met_under.get(first.name, {})
        ]
        return [(context.name, index) for context in alike]


def _config_of(context: Context, index: int) -> tuple[str, str, str]:
    """Return a config of a kernel. Another kernel may have the name, and the config."""
    return context.kernel, context.kernel_id, context.digests[index]


def _family_ratios(contexts: Iterable[Context]) -> dict[tuple[str, str, str], float]:
    """Return a config's time over the fastest of its share, as the median over a kernel's contexts."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for context in contexts:
        alike_ms = _fastest_of_share(context)
        for index, ms in context.launch_ms.items():
            found.setdefault(_config_of(context, index), []).append(ms / alike_ms[index])
    return {config: statistics.median(each) for config, each in found.items() if len(each) >= FAMILY}


def search_by_runs(
    contexts: Mapping[str, Context], rules: Rules, launched: frozenset[str] | None, number: int
) -> RaceRuns | TakeTurns:
    """Return the phase that judges unsettled contexts by whole runs; number: of it in its session.

    launched: by the last run; None: not known.
    """
    if not rules.races:
        return TakeTurns(contexts, rules, launched)
    if any(context.is_tuned_separately and not context.settled for context in contexts.values()):
        return TakeTurns(contexts, rules, None, only_separate=True)
    return RaceRuns(contexts, rules, number)


def _fastest_of_share(context: Context) -> dict[int, float]:
    """Return of each candidate the time of the fastest one with the same share of the device."""
    share = {i: round(context.shares.get(i, -1.0 - i) / SHARE_STEP) for i in context.launch_ms}
    fastest: dict[int, float] = {}
    for index, ms in context.launch_ms.items():
        fastest[share[index]] = min(ms, fastest.get(share[index], ms))
    return {index: fastest[each] for index, each in share.items()}


def _steadied_ms(context: Context, ratios: Mapping[tuple[str, str, str], float]) -> dict[int, float]:
    """Return a context's times by launches, each drawn to its config's in the kernel's other contexts.

    A few samples of one context may be spikes, or of runs in which a neighbour's trial was in its way; those
    differ by more than OWN_SAY, and count for nothing.
    """
    alike_ms, times = _fastest_of_share(context), {}
    for index, ms in context.launch_ms.items():
        if index not in context.banned:
            usual_ms = alike_ms[index] * ratios.get(_config_of(context, index), ms / alike_ms[index])
            differs = ms / usual_ms
            times[index] = usual_ms * (math.sqrt(differs) if 1 / OWN_SAY < differs < OWN_SAY else 1.0)
    return times
