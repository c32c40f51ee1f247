"""Which candidates of a kernel the run judges: the front of time and share, whatever the unit of time."""

import contextlib
import random

import pytest

from dist_autotune.search.plans.search import fastest_plan
from dist_autotune.search.plans.space import PlanSpace, levels_of

# The fastest of each share, one that is slower than another of its share, one beyond three times the fastest.
MS = {0: 1.0, 1: 1.3, 2: 1.18, 3: 2.9, 4: 3.1, 5: 1.2}
SHARE = {0: 1.0, 1: 0.76, 2: 0.76, 3: 0.5, 4: 0.25, 5: 1.0}


@pytest.mark.parametrize("unit", [1.0, 1e-3, 1e3])
def test_a_kernel_keeps_the_fastest_of_each_share_up_to_three_times_the_fastest(unit):
    ms = {index: unit * each for index, each in MS.items()}
    levels = levels_of("k", ms, SHARE, incumbent=0)
    assert list(levels.ms) == [0, 2, 3]
    assert levels.leaves_room
    assert levels.fullest_within(0.8) == 2
    assert levels.fullest_within(0.6) == 3
    assert levels.fullest_within(0.1) == 3  # none is as small


def space_of(drawn):
    """Return a space whose kernels depend on options, with the launches that a run of some options makes."""
    choices = {f"c{place}": list(range(drawn.randint(2, 3))) for place in range(drawn.randint(0, 3))}
    needs = {}  # name -> options of one choice under which it is launched
    kernels = []
    for place in range(drawn.choice([3, 12, 30])):
        ms = {index: drawn.uniform(1, 1.3) for index in range(drawn.randint(1, 5))}
        share = {index: drawn.choice([1.0, 0.9, 0.75]) for index in ms}
        kernels.append(levels_of(f"k{place}", ms, share, drawn.choice([*ms])))
        if choices and drawn.random() < 0.7:
            choice = drawn.choice([*choices])
            needs[f"k{place}"] = choice, set(drawn.sample(choices[choice], len(choices[choice]) - 1))

    def is_launched(name, options):
        choice, wanted = needs.get(name, (None, ()))
        return choice is None or options[choice] in wanted

    def seen_with(choice, option):
        options = {name: each[0] for name, each in choices.items()} | {choice: option}
        return frozenset({k.name for k in kernels if is_launched(k.name, options)} | choices.keys())

    launched = {(name, option): seen_with(name, option) for name in choices for option in choices[name]}
    is_alike = drawn.random() < 0.5
    texts = {name: [f"{'' if is_alike else name}{i}" for i in choices[name]] for name in choices}
    texts |= {kernel.name: [f"BLOCK: {index}" for index in range(5)] for kernel in kernels}
    space = PlanSpace(kernels, choices, launched, texts)
    return space, lambda options: {k.name for k in kernels if is_launched(k.name, options)}


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_names_what_its_options_launch_and_nothing_else(seed):
    drawn = random.Random(seed)
    space, launched_by = space_of(drawn)
    flow = fastest_plan(space, print)
    ms_of = {}
    with contextlib.suppress(StopIteration):
        plan = next(flow).plan
        for _ in range(5000):
            options = {name: plan[name] for name in space.choices}
            assert plan.keys() == options.keys() | launched_by(options)
            key = tuple(sorted(plan.items()))
            plan = flow.send(ms_of.setdefault(key, drawn.uniform(1, 2)) * drawn.uniform(0.99, 1.01)).plan
        pytest.fail("the search has no end")
