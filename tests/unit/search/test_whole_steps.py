"""objective='thunk' on steps of many kernels, simulated: how many runs it takes, how good the plan is."""

from __future__ import annotations

from random import Random

import pytest

from simulated_steps import Step, a_bad_neighbour, a_pair, settle

RUNS = 400


@pytest.mark.parametrize("seed", range(2))
def test_a_step_of_28_kernels_with_18_candidates_settles_in_400_runs_near_the_best_plan(seed):
    assert settle(a_bad_neighbour(Random(seed)), Random(100 + seed), RUNS).regret <= 0.02


def test_configs_that_pay_each_by_itself_are_in_one_plan():
    kernels = [f"k{k}" for k in range(5)]
    launch_ms = {kernel: {f"{kernel}c{c}": 1 + c / 20 for c in range(6)} for kernel in kernels}
    pays = {"k1": "k1c2", "k3": "k3c1"}

    def beyond_ms(plan):
        return -0.5 * sum(plan.get(kernel) == candidate for kernel, candidate in pays.items())

    step = Step(launch_ms, beyond_ms, {**{kernel: f"{kernel}c0" for kernel in kernels}, **pays})
    for seed in range(3):
        assert settle(step, Random(seed), RUNS).regret <= 0.01


@pytest.mark.parametrize("make", [a_bad_neighbour, a_pair], ids=lambda make: make.__name__)
def test_the_best_plan_of_a_step_is_the_best(make):
    step = make(Random(1))
    best_ms = step.ms(step.best)
    for kernel, times in step.launch_ms.items():
        for candidate in times:
            assert step.ms({**step.best, kernel: candidate}) >= best_ms
    by_launch = {kernel: min(times, key=times.__getitem__) for kernel, times in step.launch_ms.items()}
    assert step.ms(by_launch) > 1.01 * best_ms
