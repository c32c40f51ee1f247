"""The search for the plan with the fastest runs: a generator of plans that is sent the agreed ms of each.

Few plans race at once. Of more, those race in which kernels leave the same room to others, beside options
that choices of one kind take alike (`fastest_joint_plan`); then single choices take other options
(`fastest_single_options`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..strategies import racing_runs, rounds
from .space import MOST_CANDIDATES, Plan, PlanSpace, spread

MOST_PLANS = 64  # of one race
RUNS_PER_PLAN = 2.7
FEW_ROOMS = 4  # beside many options
MORE_RUNS = 40  # of the best plan and that of the incumbents, where they are near
SEEMS = 0.015  # of
GAIN = 0.025  # of the time of the incumbents' plan, for another to be faster
TOGETHER_RUNS, TOGETHER_RUNS_PER_PLAN = 30, 2.0
CONFIRMED, CONFIRMING_RUNS = 3, 24  # of the fastest, with the incumbents' plan
NEAR_RUNS, NEAR_RUNS_PER_PLAN = 45, 3.0  # of those beside the best
SPARED_RUNS, SPARED, MOST_SPARED = 16, 0.02, 4  # of a plan, beyond what launches let expect; candidates
MOST_BESIDE = 6  # options of them


@dataclass(frozen=True)
class AskedPlan:
    """A plan for the next run, which is a sample of this label."""

    plan: Plan
    label: str
    is_warmup: bool = False  # the run is no sample
    may_bring: bool = False  # an option in the plan may bring kernels
    follows_fit: bool = False  # choosing it took the host long: ranks come late to its run


Search: TypeAlias = Generator[AskedPlan, float, Plan]
Note: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class RaceResult:
    """The result of a race of plans. timed: plans by their times, the fastest first."""

    winner: Plan
    timed: Sequence[tuple[float, Plan]] = ()

    @property
    def fastest(self) -> Plan:
        return self.timed[0][1] if self.timed else self.winner

    def gain(self, base: Plan, expected_ms: float = 0.0) -> float:
        """Return the part of the base plan's time that another gains against `expected_ms` beyond it."""
        base_ms = next((ms for ms, plan in self.timed if plan == base), math.inf)
        other_ms = next((ms for ms, plan in self.timed if plan != base), math.inf)
        return 1 - (other_ms - expected_ms) / base_ms if self.timed else 0.0


def runs_at_most(kernels: int, choices: Sequence[int]) -> int:
    """Return how many runs the search takes at most, for so many kernels, and options of each choice."""
    plans = MOST_PLANS if kernels or len(choices) > 1 else min(math.prod(choices), MOST_PLANS)
    race = math.ceil(runs_of_race(range(plans))) + MORE_RUNS
    if kernels < 2 and len(choices) < 2:
        return race
    first = math.ceil(runs_of_joint_race(range(MOST_PLANS))) + CONFIRMING_RUNS
    if len(choices) > 1:
        single = range(min(1 + sum(options - 1 for options in choices), MOST_PLANS))
        first += math.ceil(runs_of_joint_race(single) + runs_of_race([*choices, 0])) + MORE_RUNS
    return max(race, first + math.ceil(NEAR_RUNS_PER_PLAN * (2 + 3 * MOST_BESIDE)))


def fastest_plan(space: PlanSpace, note: Note, *, keeps_kernels: bool = False) -> Search:
    """Return the plan with the fastest runs; the incumbents' plan wins ties.

    note: is told of plans left out. keeps_kernels: of too many plans, kernels keep their winners by launches.
    """
    if plans := few_plans(space, keeps_kernels=keeps_kernels):
        race = yield from race_plans("all", plans, runs_of_race(plans), MORE_RUNS)
        return race.winner
    if keeps_kernels:
        space = space.with_incumbents()
    plan = yield from fastest_joint_plan(space)
    if plan != space.incumbents or not space.rooms():  # else many joint plans have raced, and none gains
        plan = yield from fastest_single_options(space, plan, note)
    return plan if space.rooms() else (yield from replace_interfering(space, plan))


def runs_of_race(plans: Sequence[object]) -> float:
    """Return the runs of a race of so many plans: of whole runs, which cost more than launches."""
    return max(racing_runs(1), RUNS_PER_PLAN * len(plans))


def runs_of_joint_race(plans: Sequence[object]) -> float:
    """Return the runs of a race of so many plans, the fastest of which race again."""
    return max(TOGETHER_RUNS, TOGETHER_RUNS_PER_PLAN * len(plans))


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
class JointPlan:
    """A plan in which kernels leave the same room to others, beside these options."""

    plan: Plan
    options: Plan
    room: float | None = None  # that is left; None: none
    kernels: tuple[str, ...] = ()  # that leave it


def fastest_joint_plan(space: PlanSpace) -> Search:
    """Return the fastest plan in which all kernels, or those that want it, leave the same room to others.

    Choices of one kind take the same option. The incumbents' plan stays unless another is surely faster.
    """
    joint = joint_plans_of(space)
    plans = [each.plan for each in joint]
    base = plans[0]
    race = yield from race_plans("together", plans, runs_of_joint_race(plans), 0)
    if race.gain(base) < SEEMS:
        return base
    few = [plan for _, plan in race.timed if plan != base][:CONFIRMED]
    again = yield from race_plans("together, confirmed", [base, *few], CONFIRMING_RUNS, 0)
    if again.gain(base) < GAIN:  # a few samples, of which some were spikes, had promised it
        return base
    best = joint[plans.index(again.fastest)]
    changed = _joint_plan(space, _fastest_options(joint, race), best.room, best.kernels)
    plans = [each.plan for each in _distinct([best, *_beside(space, best), changed])]
    last = yield from race_plans("together, near", plans, max(NEAR_RUNS, NEAR_RUNS_PER_PLAN * len(plans)), 0)
    return last.fastest


def fastest_single_options(space: PlanSpace, plan: Plan, note: Note) -> Search:
    """Return the plan with other options of single choices, where one of a kind does better with its own.

    Each other option of each choice is tried alone; then the best of each choice are joined, one by one.
    """
    taken = {name: plan[name] for names in space.kinds if len(names) > 1 for name in names if name in plan}
    others = [{name: i} for name in taken for i in space.choices[name] if i != taken[name]]
    if len(others) >= MOST_PLANS:
        note(
            "choices with the same options took the same one, and none was tried with one of its own: that "
            f"would be {len(others)} plans, more than {MOST_PLANS - 1}. Offer fewer options"
        )
        return plan
    options = {name: plan.get(name, each[0]) for name, each in space.choices.items()}
    plans = [plan, *(space.with_kernels({**options, **other}, plan) for other in others)]
    race = yield from race_plans("single", plans, runs_of_joint_race(plans), 0)
    joined = [plan]
    for _, faster in itertools.takewhile(lambda each: each[1] != plan, race.timed):
        ((name, index),) = others[plans.index(faster) - 1].items()
        if options[name] == taken[name]:
            options[name] = index
            joined.append(space.with_kernels(options, plan))
    return (yield from race_plans("single, joined", joined, runs_of_race(joined), MORE_RUNS)).winner


def replace_interfering(space: PlanSpace, plan: Plan) -> Search:
    """Return the plan with another candidate of the kernel that slows others down most, if one does.

    Kernels take their next fastest candidates: all, then half of them, down to one. A half counts by how much
    less its runs take than launches let expect.
    """
    kernels = {kernel.name: kernel for kernel in space.kernels if kernel.name in plan and len(kernel.ms) > 1}
    names, gain = [*kernels], 0.0
    while names:
        half = names[: len(names) // 2] if gain else names
        others = {name: kernels[name].next_fastest for name in half}
        expected_ms = math.fsum(kernels[name].slower_ms(other) for name, other in others.items())
        label, plans = f"spared, {half[0]} of {len(half)}", [plan, {**plan, **others}]
        race = yield from race_plans(label, plans, SPARED_RUNS, 0)
        gained = race.gain(plan, expected_ms)
        if not gain:
            gain = gained
            if gain < SPARED:
                return plan
        else:
            names = half if gained >= gain / 2 else names[len(half) :]
        if len(names) == 1:
            near = [{**plan, names[0]: index} for index in kernels[names[0]].thinned(MOST_SPARED)]
            return (yield from race_plans("spared, one", near, RUNS_PER_PLAN * len(near), MORE_RUNS)).winner
    return plan


def joint_plans_of(space: PlanSpace) -> list[JointPlan]:
    """Return the incumbents' plan, and plans in which all kernels, or those that want it, leave a room."""
    options, rooms = space.joint_options(MOST_PLANS), space.rooms()
    moving = [tuple(kernel.name for kernel in kernels) for kernels in space.leaving_room()]
    if len(options) * (len(moving) * len(rooms) + 1) > MOST_PLANS:
        rooms = [rooms[place] for place in spread(range(len(rooms)), FEW_ROOMS)]
    joint = [JointPlan(space.incumbents, options[0])]
    for chosen in options:
        if len(joint) >= MOST_PLANS:
            break  # of several choices there are thousands, and each is compared with those before
        found = [_joint_plan(space, chosen, None, ())]
        found += [_joint_plan(space, chosen, room, kernels) for room in rooms for kernels in moving]
        joint = _distinct([*joint, *found])
    return joint[:MOST_PLANS]


def _fastest_options(joint: Sequence[JointPlan], race: RaceResult) -> Plan:
    """Return of each choice the option of the fastest plan in which it is not that of the incumbents."""
    own, found = joint[0].options, dict(joint[0].options)
    plans = [each.plan for each in joint]
    for _, plan in reversed(race.timed):
        options = joint[plans.index(plan)].options
        found |= {name: index for name, index in options.items() if index != own[name]}
    return found


def _beside(space: PlanSpace, base: JointPlan) -> list[JointPlan]:
    """Return the joint plans that differ from one in the options, in the next room, or in both."""
    rooms: list[float | None] = [None, *space.rooms()]
    place = rooms.index(base.room)
    near = rooms[max(place - 1, 0) : place + 2]
    chosen = space.joint_options(MOST_BESIDE)
    return [_joint_plan(space, options, room, base.kernels) for options in chosen for room in near]


def _distinct(joint: Sequence[JointPlan]) -> list[JointPlan]:
    """Return the joint plans without those that repeat a plan."""
    plans: dict[tuple[tuple[str, int], ...], JointPlan] = {}
    for each in joint:
        plans.setdefault(tuple(each.plan.items()), each)
    return list(plans.values())


def _joint_plan(space: PlanSpace, options: Plan, room: float | None, kernels: tuple[str, ...]) -> JointPlan:
    able = [kernel for kernel in space.kernels if kernel.name in kernels]
    candidates = {} if room is None else {kernel.name: kernel.fullest_within(room) for kernel in able}
    return JointPlan(space.with_kernels(options, candidates), options, room, kernels)


def race_plans(
    name: str, plans: Sequence[Plan], runs: float, more_runs: int
) -> Generator[AskedPlan, float, RaceResult]:
    """Race the plans, of which the first wins ties."""
    if len(plans) < 2:
        return RaceResult(plans[0])
    flow = rounds(list(range(len(plans))), 0, runs, more_runs)
    index, is_first = next(flow), True
    while True:
        ms = yield AskedPlan(plans[index], f"{name}, plan {index}", follows_fit=is_first)
        try:
            index, is_first = flow.send(ms), False
        except StopIteration as stop:
            timed = sorted((ms, each) for each, ms in stop.value.ms.items() if math.isfinite(ms))
            return RaceResult(plans[stop.value], [(ms, plans[each]) for ms, each in timed])
