"""objective='thunk' on steps of many kernels, simulated: how many runs it takes, how good the plan is."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.simulation.simulated_steps import a_bad_neighbour, a_pair, settle

RUNS = 400


@pytest.mark.parametrize("seed", range(2))
def test_a_step_of_28_kernels_with_18_candidates_settles_in_400_runs_near_the_best_plan(seed):
    assert settle(a_bad_neighbour(Random(seed)), Random(100 + seed), RUNS).regret <= 0.02


def test_two_configs_that_gain_only_together_are_found():
    found = [settle(a_pair(Random(seed)), Random(100 + seed), RUNS) for seed in range(6)]
    assert max(settled.regret for settled in found) <= 0.02


@pytest.mark.parametrize("make", [a_bad_neighbour, a_pair], ids=lambda make: make.__name__)
def test_the_best_plan_of_a_step_is_the_best(make):
    step = make(Random(1))
    best_ms = step.ms(step.best)
    for kernel, times in step.launch_ms.items():
        for candidate in times:
            assert step.ms({**step.best, kernel: candidate}) >= best_ms
    by_launch = {kernel: min(times, key=times.__getitem__) for kernel, times in step.launch_ms.items()}
    assert step.ms(by_launch) > 1.01 * best_ms
