"""Screening of many contexts where times are the host's or missing; what it finds: test_whole_steps.py."""

from __future__ import annotations

import math

import pytest

from dist_autotune.search.plans.screening import (
    AGAIN,
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
    first = {factor.name: factor.candidates[0] for factor in factors}
    flow, asked = screened(factors, **{"first": first, "start": first, "may_end": False, **options}), []
    plan = next(flow)
    while True:
        asked.append(dict(plan))
        try:
            plan = flow.send(ms_of(plan, len(asked) - 1))
        except StopIteration as stop:
            return asked, stop.value


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
