"""objective='thunk' on steps of many kernels, simulated: how many runs it takes, how good the plan is."""

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
