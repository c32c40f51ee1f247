"""Screening many contexts at once: the design of its runs, and the plans that it finds worth a race."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from random import Random

import pytest

from dist_autotune.search.plans.screening import (
    AGAIN,
    FIRST_LOOK,
    Factor,
    runs_at_most,
    screened,
)
from dist_autotune.search.strategies import AgreedMs

NOISE = 0.01


def alone(contexts=6, candidates=4, scale=0.1):
    """Return contexts that are like no other; their candidates are a little slower, one after another."""
    times = [
        [scale * (1 + k / 4) * (1 + 0.03 * index) for index in range(candidates)] for k in range(contexts)
    ]
    return [Factor(f"k{k}", range(candidates), ms, place=k) for k, ms in enumerate(times)]


def asked_and_found(factors, ms_of, **options):
    """Drive a screening; `ms_of(plan, number)` is the answer to the question of this number."""
    first = {factor.name: factor.candidates[0] for factor in factors}
    flow, asked = screened(factors, **{"first": first, "may_end": False, **options}), []
    plan = next(flow)
    while True:
        asked.append(dict(plan))
        try:
            plan = flow.send(ms_of(plan, len(asked) - 1))
        except StopIteration as stop:
            return asked, stop.value


def found(factors, beyond, seed=0, noise=NOISE, **options):
    """Return the plans that are found where a run takes its launches and what `beyond(plan, number)` adds."""
    random = Random(seed)
    own = {(f.name, index): ms for f in factors for index, ms in zip(f.candidates, f.ms, strict=True)}

    def ms_of(plan, number):
        return (sum(own[each] for each in plan.items()) + beyond(plan, number)) * random.gauss(1, noise)

    return asked_and_found(factors, ms_of, **options)[1]


def test_candidates_that_are_like_no_others_meet_each_other_evenly():
    asked, _ = asked_and_found(alone(candidates=7), lambda plan, number: 1.0)
    for one, other in itertools.combinations(asked[0], 2):
        for begin in (0, 49):
            met = Counter((plan[one], plan[other]) for plan in asked[begin : begin + 49])
            assert set(met.values()) == {1}
            assert len(met) == 49


def test_it_ends_at_the_first_look_where_nothing_gains():
    factors = [Factor(f"k{k}", [0, 1], [0.1, 0.12], "gemm", k) for k in range(24)]
    random = Random(1)

    def ms_of(plan, number):
        return (2.4 + 0.02 * sum(plan.values())) * random.gauss(1, 0.02)

    asked, plans = asked_and_found(factors, ms_of, may_end=True)
    assert (len(asked), plans) == (FIRST_LOOK, [dict.fromkeys(plans[0], 0)])


def test_what_launches_let_expect_is_a_start_that_the_runs_overrule():
    factors = [Factor(f"k{k}", [0, 1], [0.1, 0.16], place=k) for k in range(6)]
    # Slower by 0.06 by its launches each; in the run `k1` and `k4` are faster by 0.015.
    plans = found(factors, lambda plan, number: -0.075 * (plan["k1"] + plan["k4"]), noise=0.0)
    assert all(plan == {**dict.fromkeys(plan, 0), "k1": 1, "k4": 1} for plan in plans[1:])
    assert len(plans) > 1


@pytest.mark.parametrize("seed", range(3))
def test_the_fastest_by_launches_that_slows_its_neighbours_is_left(seed):
    plans = found(alone(), lambda plan, number: 0.15 * (plan["k2"] == 0), seed)
    others = [sum(plan[f"k{k}"] > 0 for k in (0, 1, 3, 4, 5)) for plan in plans if plan["k2"] > 0]
    assert min(others) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_two_candidates_that_pay_only_together_are_found(seed):
    gain = {0: 0.0, 1: 0.01, 2: -0.15}
    plans = found(alone(), lambda plan, number: gain[(plan["k1"] == 2) + (plan["k4"] == 3)], seed, noise=0.02)
    assert any((plan["k1"], plan["k4"]) == (2, 3) for plan in plans)


def test_spikes_do_not_hide_an_effect_or_make_one():
    plans = found(alone(), lambda plan, number: 0.5 * (number % 17 == 5) - 0.08 * (plan["k3"] == 2))
    assert any(plan["k3"] == 2 and plan["k0"] == 0 for plan in plans)


def test_a_time_that_may_be_the_hosts_is_asked_for_again_and_no_more_often():
    asked, _ = asked_and_found(alone(contexts=2), lambda plan, number: AgreedMs(1.0, 0.5))
    assert len(asked) == AGAIN * runs_at_most(2 * 3)
    assert all(asked[number] == asked[number + 1] for number in range(0, len(asked), AGAIN))


@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_with_too_few_times_the_first_candidates_stay(missing):
    factors = alone(contexts=2)
    half = runs_at_most(2 * 3) // 2
    _, plans = asked_and_found(factors, lambda plan, number: 1.0 if number < half - 1 else missing)
    assert plans == [{"k0": 0, "k1": 0}]
