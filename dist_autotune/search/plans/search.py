"""The search for the plan whose runs are fastest: a generator of plans that is sent the agreed ms of each.

Few plans race at once. Of more, all kernels first leave the same room to others, beside options that choices
of one kind take alike (`together`); then single contexts and choices may differ from that (`apart`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..strategies import faster_of_two, racing_runs, rounds
from . import screening
from .screening import Factor
from .space import MOST_CANDIDATES, PlanSpace, spread

MOST_PLANS = 64  # of one race
RUNS_PER_PLAN = 2.7
FEW_ROOMS = 4  # beside many options
MORE_RUNS = 40  # of the best plan and that of the incumbents, where they are near
NEAR = 1.06  # of the best plan: plans that race again
TOGETHER_RUNS, TOGETHER_RUNS_PER_PLAN = 30, 2.0
CONFIRMING_RUNS = 14
NEAR_RUNS, MOST_NEAR = 45, 12  # of those near the best

Plan: TypeAlias = dict[str, int]
Timed: TypeAlias = list[tuple[float, Plan]]  # the plans of a race by their times


@dataclass(frozen=True)
class AskedPlan:
    """A plan for the next run, which is a sample of what has this label."""

    plan: Plan
    label: str
    is_warmup: bool = False  # the run is no sample
    may_bring: bool = False  # an option in the plan may bring kernels


Search: TypeAlias = Generator[AskedPlan, float, Plan]


def runs_at_most(kernels: int, choices: Sequence[int], *, keeps_kernels: bool) -> int:
    """Return how many runs the search takes at most, for so many kernels, and options of each choice."""
    plans = MOST_PLANS if kernels or len(choices) > 1 else min(math.prod(choices), MOST_PLANS)
    race = math.ceil(race_of(range(plans))) + MORE_RUNS
    if kernels < 2 and len(choices) < 2:
        return race
    together = (
        math.ceil(max(TOGETHER_RUNS, TOGETHER_RUNS_PER_PLAN * MOST_PLANS)) + NEAR_RUNS + 2 * CONFIRMING_RUNS
    )
    effects = 5 * (0 if keeps_kernels else kernels) + sum(choices)
    finalists = math.ceil(racing_runs(screening.MOST_FINALISTS + 1)) + MORE_RUNS
    apart = screening.AGAIN * screening.runs_at_most(effects) + finalists
    return max(race + (race if choices else 0), together + apart)


def fastest_plan(space: PlanSpace, *, keeps_kernels: bool = False) -> Search:
    """Return the plan whose runs are fastest; that of the incumbents wins ties.

    keeps_kernels: of too many plans, kernels keep their winners by launches.
    """
    most, plans = few_plans(space, keeps_kernels=keeps_kernels)
    if plans:
        best, timed = yield from raced("all", plans, race_of(plans), MORE_RUNS)
        wider = wider_plans(space, timed, best) if most < MOST_CANDIDATES else []
        if len(wider) > 1:
            best, _ = yield from raced("wider", wider, race_of(wider), MORE_RUNS)
        return best
    if keeps_kernels:
        space = space.with_incumbents()
    return (yield from apart(space, (yield from together(space))))


def race_of(plans: Sequence[object]) -> float:
    """Return the runs of a race of so many plans: of whole runs, which cost more than launches."""
    return max(racing_runs(1), RUNS_PER_PLAN * len(plans))


def few_plans(space: PlanSpace, *, keeps_kernels: bool) -> tuple[int, list[Plan]]:
    """Return all plans with at most so many candidates of each kernel, if they are few enough for a race."""
    fewest = 1 if keeps_kernels else MOST_CANDIDATES
    for most in range(MOST_CANDIDATES, fewest - 1, -1):
        plans = list(itertools.islice(space.all_plans(most), MOST_PLANS + 1))
        if len(plans) <= MOST_PLANS:
            is_all = all(len(kernel.ms) <= most for kernel in space.kernels)
            return MOST_CANDIDATES if is_all else most, plans
    return 0, []


def wider_plans(space: PlanSpace, timed: Timed, best: Plan) -> list[Plan]:
    """Return the best plan, and the options near it with all candidates of their kernel, if it is one."""
    found = [best]
    for ms, plan in timed:
        options = {name: index for name, index in plan.items() if name in space.choices}
        kernels = space.launched_by(options)
        if ms > NEAR * timed[0][0] or len(kernels) > 1:
            break
        for indices in itertools.product(*(kernel.ms for kernel in kernels)):
            wider = {**options, **{k.name: i for k, i in zip(kernels, indices, strict=True)}}
            if wider not in found:
                found.append(wider)
    return found[:MOST_PLANS]


def together(space: PlanSpace) -> Search:
    """Return the fastest of the plans in which all kernels leave the same room, beside each joint option."""
    base, options, rooms = space.incumbents, space.joint_options(), space.rooms()
    if len(options) * (len(rooms) + 1) > MOST_PLANS:
        rooms = [rooms[place] for place in spread(range(len(rooms)), FEW_ROOMS)]
    plans = [base]
    for chosen, room in itertools.product(options, [None, *rooms]):
        moved = {} if room is None else {k.name: k.within(room) for k in space.kernels if k.leaves_room}
        plan = space.with_kernels(chosen, moved)
        if plan not in plans:
            plans.append(plan)
    plans = plans[:MOST_PLANS]
    runs = max(TOGETHER_RUNS, TOGETHER_RUNS_PER_PLAN * len(plans))
    best, timed = yield from raced("together", plans, runs, 0)
    if best != base:  # whose few samples may have been spikes
        best, _ = yield from raced("together, confirmed", [base, best], CONFIRMING_RUNS, CONFIRMING_RUNS)
    if best == base:
        return base
    near = [best, *(plan for ms, plan in timed if ms <= NEAR * timed[0][0] and plan not in (base, best))]
    best, _ = yield from raced("together, near", near[:MOST_NEAR], NEAR_RUNS, 0)
    return best


def apart(space: PlanSpace, best: Plan) -> Search:
    """Return the best plan in which contexts and choices may differ from what they do together."""
    is_moved = best != space.incumbents
    factors = _factors(space, best, is_moved=is_moved)
    if not factors:
        return best
    is_known = all(kernel.share for kernel in space.kernels)
    found = yield from _screened(space, best, factors, may_end=is_known and not is_moved)
    plans = [best, *(space.moved(best, each) for each in found[1:])]
    best, _ = yield from raced("apart", plans, racing_runs(len(plans)), MORE_RUNS)
    return best


def _factors(space: PlanSpace, best: Plan, *, is_moved: bool) -> list[Factor]:
    """Return what may differ from the best plan. Choices that gained nothing together are left alone."""
    factors = []
    kernels = {kernel.name: kernel for kernel in space.kernels}
    for place, (name, index) in enumerate(best.items()):
        if (kernel := kernels.get(name)) is not None:
            kinds = kernel.kinds(index, is_moved=is_moved)
            times = [kernel.launches * kernel.ms[each] for each in kinds]
            family = kernel.family if kernel.leaves_room else ""
            factors.append(Factor(name, kinds, times, family, place))
        elif is_moved and len(space.choices) > 1:
            others = [option for option in space.choices[name] if option != index]
            factors.append(Factor(name, [index, *others]))
    return factors if any(factor.effects for factor in factors) else []


def _screened(
    space: PlanSpace, best: Plan, factors: Sequence[Factor], *, may_end: bool
) -> Generator[AskedPlan, float, list[Plan]]:
    flow = screening.screened(factors, may_end=may_end)
    plan = next(flow)
    for number in itertools.count():
        ms = yield AskedPlan(space.moved(best, plan), f"apart, run {number}")
        try:
            plan = flow.send(ms)
        except StopIteration as stop:
            return list(stop.value)
    raise AssertionError  # the count has no end


def raced(
    name: str, plans: Sequence[Plan], runs: float, more_runs: int
) -> Generator[AskedPlan, float, tuple[Plan, Timed]]:
    """Race the plans, of which the first wins ties; return the best, and all by their times.

    Of a plan with two samples the faster one counts: the other may be a spike.
    """
    if len(plans) < 2:
        return plans[0], []
    ms_of: dict[int, float] = {}
    first_ms: dict[int, tuple[float, int]] = {}  # and how many samples there are
    flow = rounds(list(range(len(plans))), 0, runs, more_runs)
    index = next(flow)
    while True:
        ms = yield AskedPlan(plans[index], f"{name}, plan {index}")
        first, count = first_ms.get(index, (ms, 0))
        first_ms[index] = first, count + 1
        ms_of[index] = faster_of_two(first, ms) if count == 1 else ms
        try:
            index = flow.send(ms)
        except StopIteration as stop:
            timed = sorted((ms, each) for each, ms in ms_of.items() if math.isfinite(ms))
            return plans[int(stop.value)], [(ms, plans[each]) for ms, each in timed]
