"""The search for the plan whose runs are fastest: a generator of plans that is sent the agreed ms of each.

Few plans race at once. Of more, all kernels first leave the same room to others, beside options that choices
of one kind take alike (`together`); then single contexts and choices may differ from that (`apart`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..strategies import racing_runs, rounds
from . import screening
from .screening import Factor
from .space import MOST_CANDIDATES, KernelLevels, Plan, PlanSpace, spread

MOST_PLANS = 64  # of one race
RUNS_PER_PLAN = 2.7
FEW_ROOMS = 4  # beside many options
MORE_RUNS = 40  # of the best plan and that of the incumbents, where they are near
GAIN = 0.03  # of the time of the incumbents' plan, for another to be faster
NEAR = 1.06  # of the best plan: plans that race again
TOGETHER_RUNS, TOGETHER_RUNS_PER_PLAN = 30, 2.0
CONFIRMED, CONFIRMING_RUNS = 3, 16  # of the fastest, with the incumbents' plan
NEAR_RUNS, MOST_NEAR = 45, 12  # of those near the best


@dataclass(frozen=True)
class AskedPlan:
    """A plan for the next run, which is a sample of what has this label."""

    plan: Plan
    label: str
    is_warmup: bool = False  # the run is no sample
    may_bring: bool = False  # an option in the plan may bring kernels
    follows_fit: bool = False  # choosing it took the host long: ranks come late to its run


Search: TypeAlias = Generator[AskedPlan, float, Plan]


@dataclass(frozen=True)
class Raced:
    """What a race of plans has found. timed: plans by their times, the fastest first."""

    winner: Plan
    timed: Sequence[tuple[float, Plan]] = ()

    @property
    def fastest(self) -> Plan:
        return self.timed[0][1] if self.timed else self.winner

    @property
    def near(self) -> list[Plan]:
        """Return the plans within NEAR of the fastest, which is one of them whatever its time."""
        fastest_ms = self.timed[0][0] if self.timed else 0.0
        return [plan for ms, plan in self.timed if ms <= max(NEAR * fastest_ms, fastest_ms)]

    def gain(self, base: Plan) -> float:
        """Return by what part of the base plan's time the fastest is faster."""
        base_ms = next((ms for ms, plan in self.timed if plan == base), math.inf)
        return 1 - self.timed[0][0] / base_ms if self.timed else 0.0


def runs_at_most(kernels: int, choices: Sequence[int], *, keeps_kernels: bool) -> int:
    """Return how many runs the search takes at most, for so many kernels, and options of each choice."""
    plans = MOST_PLANS if kernels or len(choices) > 1 else min(math.prod(choices), MOST_PLANS)
    race = math.ceil(race_of(range(plans))) + MORE_RUNS
    if kernels < 2 and len(choices) < 2:
        return race
    together = (
        math.ceil(max(TOGETHER_RUNS, TOGETHER_RUNS_PER_PLAN * MOST_PLANS)) + NEAR_RUNS + CONFIRMING_RUNS
    )
    effects = 5 * (0 if keeps_kernels else kernels) + sum(choices)
    finalists = math.ceil(racing_runs(screening.MOST_FINALISTS + 1)) + MORE_RUNS
    apart = screening.AGAIN * screening.runs_at_most(effects) + finalists
    return max(race, together + apart)


def fastest_plan(space: PlanSpace, *, keeps_kernels: bool = False) -> Search:
    """Return the plan whose runs are fastest; that of the incumbents wins ties.

    keeps_kernels: of too many plans, kernels keep their winners by launches.
    """
    if plans := few_plans(space, keeps_kernels=keeps_kernels):
        race = yield from raced("all", plans, race_of(plans), MORE_RUNS)
        return race.winner
    if keeps_kernels:
        space = space.with_incumbents()
    wanting = space.wanting_room()
    start, is_faster = yield from together(starts_of(space, wanting))
    may_end = not (is_faster or wanting) and all(kernel.share for kernel in space.kernels)
    return (yield from apart(space, start, is_faster=is_faster, may_end=may_end))


def race_of(plans: Sequence[object]) -> float:
    """Return the runs of a race of so many plans: of whole runs, which cost more than launches."""
    return max(racing_runs(1), RUNS_PER_PLAN * len(plans))


def few_plans(space: PlanSpace, *, keeps_kernels: bool) -> list[Plan]:
    """Return all plans, with as many candidates of each kernel as leaves few enough for a race; else none."""
    fewest = 1 if keeps_kernels else MOST_CANDIDATES
    for most in range(MOST_CANDIDATES, fewest - 1, -1):
        thinned = operator.methodcaller("thinned", most)
        plans = list(itertools.islice(space.all_plans(thinned), MOST_PLANS + 1))
        if len(plans) <= MOST_PLANS:
            return plans
    return []


@dataclass(frozen=True)
class Start:
    """A plan in which contexts do alike; others are searched near it. room: that is left; None: none."""

    plan: Plan
    room: float | None = None


def starts_of(space: PlanSpace, wanting: list[KernelLevels]) -> list[Start]:
    """Return the incumbents' plan, and those in which all kernels, or those that want it, leave a room."""
    options, rooms = space.joint_options(MOST_PLANS), space.rooms()
    able = [kernel for kernel in space.kernels if kernel.leaves_room]
    moving = [able, wanting] if wanting else [able]
    if len(options) * (len(moving) * len(rooms) + 1) > MOST_PLANS:
        rooms = [rooms[place] for place in spread(range(len(rooms)), FEW_ROOMS)]
    starts = [Start(space.incumbents)]
    for chosen in options:
        if len(starts) >= MOST_PLANS:
            break  # of several choices there are thousands, and each is compared with those before
        found = [Start(space.with_kernels(chosen, {}))]
        for room, kernels in itertools.product(rooms, moving):
            candidates = {kernel.name: kernel.within(room) for kernel in kernels}
            found.append(Start(space.with_kernels(chosen, candidates), room))
        for start in found:
            if all(start.plan != other.plan for other in starts):
                starts.append(start)
    return starts[:MOST_PLANS]


def together(starts: Sequence[Start]) -> Generator[AskedPlan, float, tuple[Start, bool]]:
    """Return the fastest start, and whether it gains over the first.

    If none does: the fastest that leaves room, as some contexts may gain by it.
    """
    plans = [start.plan for start in starts]
    base = plans[0]
    race = yield from raced("together", plans, max(TOGETHER_RUNS, TOGETHER_RUNS_PER_PLAN * len(plans)), 0)
    if race.gain(base) >= GAIN:
        few = [plan for plan in race.near if plan != base][:CONFIRMED]
        again = yield from raced("together, confirmed", [base, *few], CONFIRMING_RUNS, 0)
        if again.gain(base) >= GAIN:  # and not by a few samples of which some were spikes
            near = [plan for plan in race.near if plan != base]
            last = yield from raced("together, near", near[:MOST_NEAR], NEAR_RUNS, 0)
            return starts[plans.index(last.fastest)], True
        race = Raced(again.winner, [*again.timed, *race.timed])
    ordered = (starts[plans.index(plan)] for _, plan in race.timed)
    return next((start for start in ordered if start.room is not None), starts[0]), False


def apart(space: PlanSpace, start: Start, *, is_faster: bool, may_end: bool) -> Search:
    """Return the best plan in which some contexts do as at the start, others as in the incumbents' plan.

    is_faster: the start is, but wins no tie; else the incumbents' plan stays unless another gains.
    """
    kept = start.plan if is_faster else space.incumbents
    factors = _factors(space, start, is_faster=is_faster)
    if not factors:
        return kept
    first = {factor.name: kept.get(factor.name, start.plan[factor.name]) for factor in factors}
    found = yield from _screened(space, start.plan, factors, first, may_end=may_end)
    others = [space.moved(start.plan, each) for each in found[1:]]
    plans = [*others, start.plan] if is_faster else [kept, *others]
    race = yield from raced("apart", plans, racing_runs(len(plans)), MORE_RUNS)
    return race.winner


def _factors(space: PlanSpace, start: Start, *, is_faster: bool) -> list[Factor]:
    """Return what may differ from what contexts do together.

    Choices only where they gained together, and where no kernel leaves room: what options of single choices
    add to a run would hide what stretches of kernels do.
    """
    moves_choices = is_faster and len(space.choices) > 1 and not any(k.leaves_room for k in space.kernels)
    factors = []
    kernels = {kernel.name: kernel for kernel in space.kernels}
    for place, (name, index) in enumerate(start.plan.items()):
        if (kernel := kernels.get(name)) is None:
            if moves_choices:
                others = [option for option in space.choices[name] if option != index]
                factors.append(Factor(name, [index, *others]))
            continue
        kinds, told_ms = kernel.kinds(index), None
        if start.room is None:
            kinds = [index] if kernel.leaves_room else kinds
        elif kernel.leaves_room:
            kinds = kernel.with_and_without(start.room)
            told_ms = -kernel.launches * kernel.room_costs * kernel.ms[kernel.fullest]
        times = [kernel.launches * kernel.ms[each] for each in kinds]
        factors.append(Factor(name, kinds, times, place, told_ms))
    return factors if any(factor.effects for factor in factors) else []


def _screened(
    space: PlanSpace, best: Plan, factors: Sequence[Factor], first: Plan, *, may_end: bool
) -> Generator[AskedPlan, float, list[Plan]]:
    flow = screening.screened(factors, first, best, may_end=may_end)
    plan, follows_fit = next(flow)
    for number in itertools.count():
        ms = yield AskedPlan(space.moved(best, plan), f"apart, run {number}", follows_fit=follows_fit)
        try:
            plan, follows_fit = flow.send(ms)
        except StopIteration as stop:
            return list(stop.value)
    raise AssertionError  # the count has no end


def raced(
    name: str, plans: Sequence[Plan], runs: float, more_runs: int
) -> Generator[AskedPlan, float, Raced]:
    """Race the plans, of which the first wins ties."""
    if len(plans) < 2:
        return Raced(plans[0])
    flow = rounds(list(range(len(plans))), 0, runs, more_runs)
    index = next(flow)
    for number in itertools.count():
        ms = yield AskedPlan(plans[index], f"{name}, plan {index}", follows_fit=not number)
        try:
            index = flow.send(ms)
        except StopIteration as stop:
            timed = sorted((ms, each) for each, ms in stop.value.ms.items() if math.isfinite(ms))
            return Raced(plans[stop.value], [(ms, plans[each]) for ms, each in timed])
    raise AssertionError  # the count has no end
