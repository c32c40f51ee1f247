"""The search among plans of which some are launched: what they take lets expect which others may win.

For kernels that hold the same share of the device with every candidate, and for one kernel beside options.
What launches say of a candidate holds for the options beside which it was launched. Beside others another
may win: of a product that waits for its rows in pieces, one with small tiles. So what options, fields of
configs and pairs of both add to a run is learned, over all candidates that could win beside some option.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Generator, Iterator, Mapping, Sequence

from ...codec import digest
from ..expectation.arithmetic import log, normal_below
from ..expectation.fields import Value, texts_by_field, values_of
from ..expectation.gaussian import GaussianProcess
from ..strategies import faster_of_two, least
from .search import MORE_RUNS, AskedPlan, Search, race_of, raced
from .search import MOST_PLANS as MOST_RACED
from .space import MOST_CANDIDATES, SHARE_STEP, KernelLevels, Plan, PlanSpace

FEWEST_PLANS, MOST_PLANS = 12, 400
FIRST_WAVE, WAVE, MOST_TRIED = 20, 3, 96  # plans
LIKELY = 0.1  # of the run, that the first ones are expected to lose at most by their launches
SHOWN = 0.5  # of what a candidate takes longer by its launches, beside other options than in these
SPIKE = 1.15  # times what is expected: such a time is taken again
GAIN, CHANCE = 0.01, 0.02  # it ends when the chance that an untried plan wins by more is below
NEAR, FINALISTS, NEAR_RUNS = 1.02, 5, 40  # of the best: plans that race with the first one
MOST_RUNS = 2 * (MOST_TRIED + WAVE - 1) + NEAR_RUNS + MORE_RUNS
_DEVIATION, _NOISE = 0.05, 0.1  # of what options add, expected; of a run, over the variance of that


def plans_of(space: PlanSpace) -> list[Plan]:
    """Return the plans to search among; none where a race of all, or rooms, are to decide."""
    if not space.kernels:
        return []
    for most in range(MOST_CANDIDATES, 0, -1):
        plans = list(itertools.islice(_plans(space, most), MOST_PLANS + 1))
        if len(plans) <= MOST_PLANS:
            is_predictable = _launches_one(space, plans) or all(map(_holds_one_share, space.kernels))
            return plans if is_predictable and len(plans) >= FEWEST_PLANS else []
    return []


def _launches_one(space: PlanSpace, plans: Sequence[Plan]) -> bool:
    """Return whether a plan is options and the one kernel that they launch: it leaves room to no other."""
    names = {kernel.name for kernel in space.kernels}
    return bool(space.choices) and all(len(names & plan.keys()) < 2 for plan in plans)


def _plans(space: PlanSpace, most: int) -> Iterator[Plan]:
    """Yield plans with at most so many candidates of a kernel; without choices they are near the fastest."""
    if not space.choices:
        return space.all_plans(operator.methodcaller("thinned", most))
    return space.all_plans(lambda kernel: [*kernel.usable][:most])


def _holds_one_share(kernel: KernelLevels) -> bool:
    """Return whether all candidates hold the same share; the incumbent's is that under any option."""
    shares = {round(each / SHARE_STEP) for index, each in kernel.share.items() if index != kernel.incumbent}
    return bool(kernel.share) and len(shares) < 2


def predicted(space: PlanSpace, plans: Sequence[Plan]) -> Search:
    """Return the fastest of the plans, of which the first wins ties."""
    process = GaussianProcess(_fields(space, plans), deviation=_DEVIATION, noise=_NOISE)
    ms: dict[int, float] = {}  # of the plans that were tried
    first_ms = yield from _timed(plans, 0, 0.0)
    slower_ms = [_slower_ms(space, plan) for plan in plans]
    if not 0 < least(first_ms) < math.inf:  # it tells nothing of others: those race that launches expect
        few = sorted(range(1, len(plans)), key=slower_ms.__getitem__)[: MOST_RACED - 1]
        known = [plans[index] for index in (0, *few)]
        return (yield from raced("all", known, race_of(known), MORE_RUNS)).winner
    ms[0] = first_ms
    by_launches = [least(first_ms) + each for each in slower_ms]
    limit_ms = by_launches[0] * (1 + LIKELY)
    spread = sorted(
        range(1, len(plans)),
        key=lambda i: (by_launches[i] > limit_ms, digest(repr(sorted(plans[i].items())))),
    )
    wave, expected = spread[: FIRST_WAVE - 1], [log(each) for each in by_launches]
    while wave:
        for index in wave:
            ms[index] = yield from _timed(plans, index, SPIKE * by_launches[index])
        expected, wave = _next_wave(process, by_launches, ms)
    limit = min(expected[index] for index in ms) + log(NEAR)
    near = [i for i in sorted(ms, key=lambda i: (expected[i], i)) if i and expected[i] <= limit][:FINALISTS]
    finalists = [plans[index] for index in (0, *near)]
    return (yield from raced("predicted, near", finalists, NEAR_RUNS, MORE_RUNS)).winner


def _fields(space: PlanSpace, plans: Sequence[Plan]) -> list[list[Value]]:
    """Return of each plan the values of its options, and of the configs of its kernels in their order.

    So kernels of which an option launches one share the names of their fields, and tell of each other.
    """
    found = []
    for plan in plans:
        fields = {f"choice {name}": space.texts[name][i] for name, i in plan.items() if name in space.choices}
        kernels = (kernel.name for kernel in space.kernels if kernel.name in plan)
        for place, name in enumerate(kernels):
            config = texts_by_field(space.texts[name][plan[name]])
            fields |= {f"{place} {field}": text for field, text in config.items()}
        found.append(fields)
    return values_of(found)


def _timed(plans: Sequence[Plan], index: int, limit_ms: float) -> Generator[AskedPlan, float, float]:
    """Return the time of a run; above the limit the faster one of two: one of them may be a spike."""
    asked = AskedPlan(plans[index], f"predicted, plan {index}")
    first_ms = yield asked
    if math.isfinite(first_ms) and least(first_ms) <= limit_ms:
        return first_ms
    return faster_of_two(first_ms, (yield asked))


def _slower_ms(space: PlanSpace, plan: Plan) -> float:
    """Return what the plan's launches are expected to take longer than the fastest candidates'."""
    launched = [kernel for kernel in space.kernels if kernel.name in plan]
    slower_ms = math.fsum(k.launches * (k.usable[plan[k.name]] - min(k.usable.values())) for k in launched)
    first = space.incumbents
    is_as_launched = all(plan[name] == first.get(name, plan[name]) for name in space.choices if name in plan)
    return slower_ms if is_as_launched else SHOWN * slower_ms


def _next_wave(
    process: GaussianProcess, by_launches: Sequence[float], ms: Mapping[int, float]
) -> tuple[list[float], list[int]]:
    """Return the expected log ms of each plan, and the plans to try next; none when that cannot pay."""
    added = {i: least(each) / by_launches[i] for i, each in ms.items() if 0 < least(each) < math.inf}
    process.fit(added)
    expected = [mean + log(each) for mean, each in zip(process.means, by_launches, strict=True)]
    bar, none_wins = min(expected[index] for index in added) + log(1 - GAIN), 1.0
    chances = {}
    for index in range(len(expected)):
        if index not in ms:
            chances[index] = normal_below((bar - expected[index]) / math.sqrt(process.variances[index]))
            none_wins *= 1 - chances[index]
    if 1 - none_wins < CHANCE or len(ms) >= MOST_TRIED:
        return expected, []
    return expected, sorted(chances, key=lambda i: (-chances[i], expected[i], i))[:WAVE]
