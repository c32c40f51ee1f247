"""Screening of many contexts where times are the host's or missing; what it finds: test_whole_steps.py."""

import math

import pytest
from flows import driven

from dist_autotune.search.plans import screening
from dist_autotune.search.plans.screening import (
    AGAIN,
    MOST_PAIRED,
    MOST_RUNS,
    MOST_TOLD,
    Factor,
    runs_at_most,
    screened,
)
from dist_autotune.search.strategies import AgreedMs


def alone(contexts=6, candidates=4, scale=0.1):
    """Return contexts that are like no other; their candidates are a little slower, one after another."""
    times = [
        [scale * (1 + k / 4) * (1 + 0.03 * index) for index in range(candidates)] for k in range(contexts)
    ]
    return [Factor(f"k{k}", range(candidates), ms, place=k) for k, ms in enumerate(times)]


def asked_and_found(factors, ms_of, **options):
    """Drive a screening; `ms_of(plan, number)` is the answer to the question of this number."""
    first, asked = {factor.name: factor.candidates[0] for factor in factors}, []
    flow = screened(factors, **{"first": first, "start": first, "may_end": False, **options})
    _, plans = driven(flow, lambda each: asked.append(dict(each[0])) or ms_of(each[0], len(asked) - 1))
    return asked, plans


def test_a_time_that_may_be_the_hosts_is_asked_for_again_and_no_more_often():
    asked, _ = asked_and_found(alone(contexts=2), lambda plan, number: AgreedMs(1.0, 0.5))
    assert len(asked) == AGAIN * runs_at_most(2 * 3)
    assert all(asked[number] == asked[number + 1] for number in range(0, len(asked), AGAIN))


def test_the_plan_that_took_least_is_a_finalist_whatever_the_model_expects():
    """An option that brings kernels is worth it beside others only: sessions chose what took 11 % longer."""
    fastest = []

    def ms_of(plan, number):
        if number == 20:
            fastest.append(dict(plan))
        return 20.0 if plan in fastest else 25.0 - 0.5 * plan["k0"]

    _, plans = asked_and_found(alone(contexts=4), ms_of)
    assert plans[0] == dict.fromkeys(fastest[0], 0)
    assert fastest[0] in plans[1:]


@pytest.mark.parametrize("may_end", [False, True])
def test_of_a_run_that_follows_a_fit_it_is_known_that_ranks_come_late_to_it(monkeypatch, may_end):
    fits, genuine = [0], screening.cholesky

    def counted(matrix):
        fits[-1] += 1
        return genuine(matrix)

    monkeypatch.setattr(screening, "cholesky", counted)
    factors = [Factor(f"k{k}", [1, 0], [2.0, 2.0], k, told_ms=-0.2) for k in range(12)]
    first = {factor.name: 1 for factor in factors}
    flow, told = screened(factors, first, first, may_end=may_end), []
    plan, follows_fit = next(flow)
    while True:
        told.append(follows_fit)
        fits.append(0)
        try:
            plan, follows_fit = flow.send(25.0 - 0.2 * sum(index == 0 for index in plan.values()))
        except StopIteration:
            break
    assert len(told) > screening.FIRST_LOOK
    assert sum(told) >= 1 + may_end
    assert told == [count > 0 for count in fits[:-1]]


@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_with_too_few_times_the_first_candidates_stay(missing):
    factors = alone(contexts=2)
    half = runs_at_most(2 * 3) // 2
    _, plans = asked_and_found(factors, lambda plan, number: 1.0 if number < half - 1 else missing)
    assert plans == [{"k0": 0, "k1": 0}]


def test_of_hundreds_of_contexts_launches_tell_in_a_bounded_number_of_rows(monkeypatch):
    """Fitting takes the cube of the rows, between two runs: of 400 contexts with a row each 5 s."""
    rows, genuine = [], screening.cholesky
    monkeypatch.setattr(screening, "cholesky", lambda matrix: rows.append(len(matrix)) or genuine(matrix))
    factors = [Factor(f"k{k}", [1, 0], [0.1, 0.1], k, told_ms=0.01) for k in range(2 * MOST_TOLD + 1)]
    _, plans = asked_and_found(factors, lambda plan, number: 25.0 + 0.01 * (number % 7), may_end=True)
    assert plans == [dict.fromkeys((factor.name for factor in factors), 1)]
    assert max(rows) <= MOST_TOLD + MOST_RUNS


def test_of_hundreds_of_contexts_a_bounded_number_is_looked_at_in_pairs(monkeypatch):
    """All pairs of 400 contexts, of six candidates each, took 9 s between two runs."""
    paired, genuine = [], screening.itertools.combinations
    monkeypatch.setattr(
        screening.itertools, "combinations", lambda all_, n: paired.append(len(all_)) or genuine(all_, n)
    )
    asked_and_found(alone(contexts=2 * MOST_PAIRED, candidates=2), lambda plan, number: 25.0 + number % 7)
    assert paired == [MOST_PAIRED]
