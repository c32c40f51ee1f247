"""objective='thunk' on steps of many kernels, simulated: how many runs it takes, how good the plan is."""

from random import Random

import pytest

from benchmarks.simulation.simulated_steps import a_bad_neighbour, settle

RUNS = 400


@pytest.mark.parametrize("seed", range(8))
def test_a_step_of_28_kernels_with_18_candidates_settles_in_400_runs_near_the_best_plan(seed):
    assert settle(a_bad_neighbour(Random(seed)), Random(100 + seed), RUNS).regret <= 0.02
