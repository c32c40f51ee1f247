"""Screening many contexts at once: the design of its runs, and the plans that it finds worth a race."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from random import Random

import pytest

from dist_autotune.search.screening import AGAIN, MOST_FINALISTS, RUNS, screened
from dist_autotune.search.strategies import AgreedMs

NOISE = 0.01


def levels_of(contexts=6, candidates=4, scale=0.1):
    """Return contexts whose candidates are a little slower by launches, one after another."""
    return {
        f"k{k}": {index: scale * (1 + k / 4) * (1 + 0.03 * index) for index in range(candidates)}
        for k in range(contexts)
    }


def asked_and_found(levels, ms_of):
    """Drive a screening; `ms_of(plan, number)` is the answer to the question of this number."""
    flow, asked = screened(levels), []
    plan = next(flow)
    while True:
        asked.append(dict(plan))
        try:
            plan = flow.send(ms_of(plan, len(asked) - 1))
        except StopIteration as stop:
            return asked, stop.value


def found(levels, beyond, seed=0, noise=NOISE):
    """Return the plans that are found where a run takes its launches and what `beyond(plan, number)` adds."""
    random = Random(seed)

    def ms_of(plan, number):
        own_ms = sum(levels[name][index] for name, index in plan.items())
        return (own_ms + beyond(plan, number)) * random.gauss(1, noise)

    return asked_and_found(levels, ms_of)[1]


def test_the_runs_are_always_the_same():
    levels = levels_of()
    first, second = (asked_and_found(levels, lambda plan, number: 1.0)[0] for _ in range(2))
    assert first == second
    assert len(first) == RUNS


@pytest.mark.parametrize("candidates", [(2, 2, 2), (4, 3, 6), (1, 5, 2)], ids=str)
def test_candidates_come_up_evenly_in_every_block_of_runs(candidates):
    levels = {f"k{k}": dict.fromkeys(range(count), 1.0) for k, count in enumerate(candidates)}
    asked, _ = asked_and_found(levels, lambda plan, number: 1.0)
    block = max(candidates)
    for begin in range(0, RUNS - block + 1, block):
        for name, count in zip(levels, candidates, strict=True):
            times = Counter(plan[name] for plan in asked[begin : begin + block])
            assert set(times.values()) <= {block // count, -(-block // count)}


def test_pairs_of_candidates_come_up_together_often_enough_to_be_told():
    asked, _ = asked_and_found(levels_of(), lambda plan, number: 1.0)
    together = Counter((plan["k1"], plan["k4"]) for plan in asked)
    assert min(together[pair] for pair in itertools.product(range(4), repeat=2)) >= 2


def test_the_plan_of_the_incumbents_is_the_first_found_and_they_are_few():
    levels = levels_of()
    plans = found(levels, lambda plan, number: 0.0)
    assert plans[0] == dict.fromkeys(levels, 0)
    assert len(plans) <= MOST_FINALISTS
    assert len({tuple(plan.items()) for plan in plans}) == len(plans)


@pytest.mark.parametrize("seed", range(3))
def test_candidates_that_pay_each_by_itself_are_in_one_plan(seed):
    pays = {"k0": 2, "k3": 3, "k5": 1}
    plans = found(
        levels_of(),
        lambda plan, number: -0.06 * sum(plan[name] == index for name, index in pays.items()),
        seed,
    )
    assert any(all(plan[name] == index for name, index in pays.items()) for plan in plans)


@pytest.mark.parametrize("seed", range(3))
def test_the_fastest_by_launches_that_slows_its_neighbours_is_left(seed):
    plans = found(levels_of(), lambda plan, number: 0.15 * (plan["k2"] == 0), seed)
    assert any(plan["k2"] == 1 and set(plan.values()) == {0, 1} for plan in plans)


@pytest.mark.parametrize("seed", range(3))
def test_two_candidates_that_pay_only_together_are_found(seed):
    gain = {0: 0.0, 1: 0.01, 2: -0.15}
    plans = found(
        levels_of(), lambda plan, number: gain[(plan["k1"] == 2) + (plan["k4"] == 3)], seed, noise=0.02
    )
    assert any((plan["k1"], plan["k4"]) == (2, 3) for plan in plans)


def test_without_any_effect_no_candidate_is_taken_for_the_noise():
    equals = {f"k{k}": dict.fromkeys(range(4), 0.1) for k in range(6)}
    for seed in range(5):
        plans = found(equals, lambda plan, number: 0.0, seed, noise=0.02)
        cautious = plans[1] if len(plans) > 1 else plans[0]
        assert sum(index != 0 for index in cautious.values()) <= 1


def test_spikes_do_not_hide_an_effect_or_make_one():
    plans = found(levels_of(), lambda plan, number: 3.0 * (number % 17 == 5) - 0.08 * (plan["k3"] == 2))
    assert any(plan["k3"] == 2 for plan in plans)
    assert all(plan["k0"] == 0 for plan in plans[1:2])


def test_a_clock_that_drifts_does_not_hide_an_effect_or_make_one():
    def beyond(plan, number):
        return number / RUNS - 0.08 * (plan["k3"] == 2)

    base = found(levels_of(), beyond)[1]
    assert base == {**dict.fromkeys(base, 0), "k3": 2}


def test_a_time_that_may_be_the_hosts_is_asked_for_again_and_no_more_often():
    levels = levels_of(contexts=2)
    asked, _ = asked_and_found(levels, lambda plan, number: AgreedMs(1.0, 0.5))
    assert len(asked) == AGAIN * RUNS
    assert all(asked[number] == asked[number + 1] for number in range(0, len(asked), AGAIN))


@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_with_too_few_times_the_incumbents_stay(missing):
    levels = levels_of(contexts=2)
    _, plans = asked_and_found(levels, lambda plan, number: 1.0 if number < RUNS // 2 - 1 else missing)
    assert plans == [dict.fromkeys(levels, 0)]
