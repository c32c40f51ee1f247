"""A step in virtual time is what was measured, and its best plan is found in a bounded number of runs."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.simulation.device_sessions import BESIDE, NOTHING, OTHERS, settle
from benchmarks.simulation.device_steps import (
    Candidate,
    Collective,
    DeviceStep,
    Kernel,
)

# GEMM of 132 and of 100 programs alone, all-reduce alone; the step with each, as measured on 2 x H200.
MEASURED = {
    "8192 x 3584 x 8192": (0.607, 0.722, 0.848, 1.467, 0.915),
    "8192 x 8192 x 4096": (0.718, 0.892, 1.755, 2.473, 1.742),
    "4096 x 4096 x 4096": (0.185, 0.254, 0.452, 0.637, 0.478),
}


@pytest.mark.parametrize("shape", MEASURED)
def test_a_gemm_beside_an_all_reduce_takes_what_it_took_on_two_gpus(shape):
    full, less, all_reduce, step_full, step_less = MEASURED[shape]
    candidates = {"132": Candidate(full, 132), "100": Candidate(less, 100)}
    step = DeviceStep([Kernel("gemm", "gemm", candidates, Collective(all_reduce))])
    assert step.ms({"gemm": "132"}) == pytest.approx(step_full, rel=0.01)
    assert step.ms({"gemm": "100"}) == pytest.approx(step_less, rel=0.06)


# Several seeds where neighbours' trials are in each other's way most: launches alone misjudge tiles.
CASES = [(name, 0) for name in BESIDE] + [("24 kernels, 1 choices", seed) for seed in range(1, 6)]
# What all kernels do together is then a compromise, and hardly faster than what each wants alone.
CASES += [("24 kernels, 1 choice, half of them beside collectives", seed) for seed in (0, 3, 6, 8)]
CASES += [("48 kernels, 3 choices, half, a quarter small", seed) for seed in (0, 3)]
# Here it gains nothing together, and what stretches gain shows in the second look only.
CASES += [("48 kernels, half of them beside collectives", seed) for seed in (0, 6)]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_the_plan_is_near_the_best_after_a_bounded_number_of_runs(name, seed):
    settled = settle({**BESIDE, **OTHERS}[name](Random(f"{name} {seed}")), Random(f"noise {seed}"))
    assert settled.gain > 0.1
    assert settled.regret <= 0.02
    assert settled.runs <= (700 if name.startswith("48") else 500)


@pytest.mark.parametrize("name", NOTHING)
def test_where_nothing_gains_nothing_changes_in_at_most_200_runs(name):
    settled = settle(NOTHING[name](Random(f"{name} 1")), Random("noise 1"))
    assert (settled.has_moved, settled.runs <= 200) == (False, True), settled.runs
