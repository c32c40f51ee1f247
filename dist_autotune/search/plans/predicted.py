"""The search among many plans: it launches some, and their times tell which others may win.

For kernels that hold the same share of the device with every candidate, and for one kernel beside options.
Launch times hold only for the options beside which they were taken. Beside others another candidate may win,
such as small tiles in a product that waits for its rows in pieces. So a model learns how much options, fields
of configs and pairs of both add to a run, over all candidates that could win beside some option.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from dataclasses import replace

from ...codec import digest
from ..expectation.fields import Likeness, texts_by_field
from ..expectation.model import Expectation
from ..strategies import faster_of_two, least
from .search import MORE_RUNS, AskedPlan, Search, race_plans, runs_of_race
from .search import MOST_PLANS as MOST_RACED
from .space import MOST_CANDIDATES, SHARE_STEP, KernelLevels, Plan, PlanSpace

FEWEST_PLANS, MOST_PLANS = 12, 400
FIRST_WAVE, WAVE, MOST_TRIED = 20, 3, 96  # plans
MOST_UNTOLD = 4  # of them that launch no kernel: all are tried, and race at last
LIKELY = 0.1  # of the run, that the first ones are expected to lose at most by their launches
SHOWN = 0.5  # of what a candidate takes longer by its launches, beside other options than in these
SPIKE = 1.15  # times what is expected: such a time is taken again
GAIN, CHANCE = 0.01, 0.02  # it ends when the chance that an untried plan wins by more is below
SLOWER = 1.3  # times the usual: that a plan is slower than that counts no more
NEAR, FINALISTS, NEAR_RUNS = 1.04, 8, 40  # of the best: plans that race with the first one and those
MOST_RUNS = 2 * (MOST_TRIED + WAVE - 1 + MOST_UNTOLD) + NEAR_RUNS + MORE_RUNS
_NORMAL = statistics.NormalDist()
_REST, _NOISE = 0.05, 0.011  # deviations: of what options add, expected; of a run


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


def fastest_predicted_plan(space: PlanSpace, plans: Sequence[Plan]) -> Search:
    """Return the fastest of the plans, of which the first wins ties."""
    likeness, untold = _likeness(space, plans), _untold(space, plans)
    slower_ms = [_slower_ms(space, plan) for plan in plans]
    asked = [AskedPlan(plan, f"predicted, plan {index}") for index, plan in enumerate(plans)]
    first_ms = yield replace(asked[0], follows_fit=True)
    again_ms = yield asked[0]
    times = faster_of_two(first_ms, again_ms), again_ms, first_ms  # a late host may hide one of the two
    ms = {0: next(filter(_is_known, times), math.nan)}  # of the plans that were tried
    if not _is_known(ms[0]):  # it tells nothing of others: those race that launches expect
        few = sorted(range(1, len(plans)), key=slower_ms.__getitem__)[: MOST_RACED - 1]
        known = [plans[index] for index in (0, *few)]
        return (yield from race_plans("all", known, runs_of_race(known), MORE_RUNS)).winner
    wave = [*untold, *_first_wave(plans, slower_ms, LIKELY * least(ms[0]), untold)]
    ms |= yield from _timed(asked, wave)
    model = _ExpectedTimes(likeness, slower_ms, ms)
    while wave:
        for index in wave:
            if not least(ms[index]) <= SPIKE * model.by_launches[index]:
                ms[index] = faster_of_two(ms[index], (yield asked[index]))
        wave = model.next_wave(ms)
        ms |= yield from _timed(asked, wave)
    finalists = [plans[index] for index in dict.fromkeys([0, *untold, *_near(ms)])]
    runs = NEAR_RUNS + 2 * len(untold)
    return (yield from race_plans("predicted, near", finalists, runs, MORE_RUNS)).winner


def _timed(asked: Sequence[AskedPlan], wave: Sequence[int]) -> Generator[AskedPlan, float, dict[int, float]]:
    """Launch the plans of a wave once; return their times."""
    ms = {}
    for place, index in enumerate(wave):
        ms[index] = yield replace(asked[index], follows_fit=not place)
    return ms


def _untold(space: PlanSpace, plans: Sequence[Plan]) -> list[int]:
    """Return plans that launch no kernel, as a collective: only their own runs tell of their times."""
    names = {kernel.name for kernel in space.kernels}
    return [index for index, plan in enumerate(plans) if index and not names & plan.keys()][:MOST_UNTOLD]


def _first_wave(
    plans: Sequence[Plan], slower_ms: Sequence[float], likely_ms: float, untold: Container[int]
) -> list[int]:
    """Return plans drawn from those near the fastest by their launches, then from the others."""
    others = (index for index in range(1, len(plans)) if index not in untold)
    drawn = sorted(others, key=lambda index: digest(repr(sorted(plans[index].items()))))
    drawn.sort(key=lambda index: slower_ms[index] > slower_ms[0] + likely_ms)
    return drawn[: FIRST_WAVE - 1]


def _is_known(ms: float) -> bool:
    return 0 < least(ms) < math.inf


def _likeness(space: PlanSpace, plans: Sequence[Plan]) -> Likeness:
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
    return Likeness(found)


def _slower_ms(space: PlanSpace, plan: Plan) -> float:
    """Return the ms that the plan's launches are expected to take beyond the fastest candidates'."""
    launched = [kernel for kernel in space.kernels if kernel.name in plan]
    slower_ms = math.fsum(k.launches * (k.usable[plan[k.name]] - min(k.usable.values())) for k in launched)
    first = space.incumbents
    is_as_launched = all(plan[name] == first.get(name, plan[name]) for name in space.choices if name in plan)
    return slower_ms if is_as_launched else SHOWN * slower_ms


class _ExpectedTimes:
    """Expected times of all plans, from the tried ones: the sum of the launches, and the ms beyond it.

    ms: of the tried plans, at first. Most are no spikes.
    """

    def __init__(self, likeness: Likeness, slower_ms: Sequence[float], ms: Mapping[int, float]) -> None:
        known = {index: least(each) for index, each in ms.items() if _is_known(each)}
        fastest_ms = statistics.median(each - slower_ms[index] for index, each in known.items())
        fastest_ms = max(fastest_ms, min(known.values()) / 2)  # launches may be slower than what holds them
        self.by_launches = [fastest_ms + each for each in slower_ms]
        self._logs = [math.log(each) for each in self.by_launches]
        self._likeness = likeness

    def next_wave(self, ms: Mapping[int, float]) -> list[int]:
        """Return the plans to try next, the likeliest last; none when that cannot pay."""
        likely_ms = {index: self._likely_ms(index, each) for index, each in ms.items() if 0 < each < math.inf}
        added = {index: each / self.by_launches[index] for index, each in likely_ms.items()}
        most = SLOWER * statistics.median(added.values())
        expectation = Expectation(self._likeness, rest=_REST, noise=_NOISE)
        for index, each in added.items():
            expectation.observe(index, min(each, most))
        expected = [mean + each for mean, each in zip(expectation.means, self._logs, strict=True)]
        bar, none_wins = min(expected[index] for index in added) + math.log(1 - GAIN), 1.0
        chances, variances = {}, expectation.variances
        for index, mean in enumerate(expected):
            if index not in ms:
                deviation = math.sqrt(variances[index])
                chances[index] = _NORMAL.cdf((bar - mean) / deviation)
                none_wins *= 1 - chances[index]
        if 1 - none_wins < CHANCE or len(ms) >= MOST_TRIED:
            return []
        return sorted(chances, key=lambda i: (-chances[i], expected[i], i))[WAVE - 1 :: -1]

    def _likely_ms(self, index: int, ms: float) -> float:
        """Return a tried plan's ms; of a time that may hold the host's, the value nearest to expected."""
        return min(max(self.by_launches[index], least(ms)), float(ms))


def _near(ms: Mapping[int, float]) -> list[int]:
    """Return the tried plans near the best."""
    by_time = sorted((i for i in sorted(ms) if 0 < ms[i] < math.inf), key=ms.__getitem__)
    return [index for index in by_time if least(ms[index]) <= NEAR * ms[by_time[0]]][:FINALISTS]
