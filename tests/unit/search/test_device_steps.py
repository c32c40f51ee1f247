"""A step in virtual time is what was measured, and its best plan is found in a bounded number of runs."""

import math
from dataclasses import dataclass
from functools import partial
from random import Random

import pytest

from benchmarks.simulation.device_steps import DeviceStep, beside_collectives, best_plan, nothing_gains
from benchmarks.simulation.protocol_simulation import Simulation
from benchmarks.simulation.simulated_steps import a_bad_neighbour
from benchmarks.simulation.simulated_steps import settle as settle_simulated

# ---- whole sessions, with the noise of an H200

RANKS = 2
JITTER, SPIKE_CHANCE, SPIKE, DRIFT, DRIFT_RUNS = 0.02, 0.03, 1.5, 0.11, 30.0
FIRST_USE = 1.3  # what a candidate's first launch takes longer
RUNS_AT_MOST = 2000


class DeviceSession(Simulation):
    """Ranks that run one step on a device each."""

    def __init__(self, step: DeviceStep, random: Random) -> None:
        options = {"ranks": RANKS, "search": "racing", "objective": "thunk"}
        super().__init__(step.contexts(), {}, choices=[*step.choices], **options)
        self.step, self._random = step, random
        self._kernels = {kernel.name: kernel for kernel in step.kernels}
        self._took: dict[str, float] = {}
        self._step_ms = 0.0
        self._met: set[tuple[str, str]] = set()

    def run(self) -> None:
        plan = {name: self._candidate(name) for name in self.contexts}
        self._took, self._step_ms = self.step.times(plan)
        super().run()
        self._met.update(plan.items())

    def _whole_ms(self, plan: dict[str, str], rank: int) -> float:
        return self._step_ms * self._noise()

    def _launch_ms(self, name: str, candidate: str, rank: int) -> float:
        first_use = 1.0 if (name, candidate) in self._met else FIRST_USE
        return self._took[name] * self._noise() * first_use

    def _noise(self) -> float:
        drift = 1 + DRIFT * (1 - math.exp(-len(self.plans) / DRIFT_RUNS))
        spike = SPIKE if self._random.random() < SPIKE_CHANCE else 1.0
        return drift * spike * self._random.lognormvariate(0, JITTER)

    def _family(self, name: str) -> str:
        return self._kernels[name].family if name in self._kernels else name

    def _share(self, name: str, candidate: str) -> int:
        return round(1000 * self._kernels[name].candidates[candidate].share) if name in self._kernels else 0


@dataclass(frozen=True)
class Settled:
    runs: int
    regret: float  # of the plan that is left, against the best one of whole families
    gain: float  # of that one, against the plan by launches alone
    has_moved: bool  # it is neither the first candidates nor those that are best by launches


def settle(step: DeviceStep, random: Random) -> Settled:
    session = DeviceSession(step, random)
    runs = len(session.session(RUNS_AT_MOST))
    found, (_, best_ms) = session.winners(), best_plan(step)
    contexts = session.tuning.contexts.values()
    moved = any(c.incumbent not in (0, c.launch_winner) for c in contexts)
    alone_ms = step.ms(step.fastest_alone())
    return Settled(runs, step.ms(found) / best_ms - 1, alone_ms / best_ms - 1, moved)


SIZES = [(kernels, choices) for kernels in (1, 8, 24, 48) for choices in (0, 1, 2, 3)]
BESIDE = {f"{k} kernels, {c} choices": partial(beside_collectives, kernels=k, choices=c) for k, c in SIZES}
NOTHING = {
    f"{k} kernels, {c} choices, nothing gains": partial(nothing_gains, kernels=k, choices=c) for k, c in SIZES
}
STEPS = BESIDE | {
    "24 kernels, 1 choice, half of them beside collectives": partial(
        beside_collectives, kernels=24, choices=1, share=0.5
    ),
    "48 kernels, 3 choices, half, a quarter small": partial(
        beside_collectives, kernels=48, choices=3, share=0.5, mixed=True
    ),
    "48 kernels, half of them beside collectives": partial(beside_collectives, kernels=48, share=0.5),
}


# Several seeds where neighbours' trials are in each other's way most: launches alone misjudge tiles.
CASES = [(name, 0) for name in BESIDE] + [("24 kernels, 1 choices", seed) for seed in range(1, 6)]
# What all kernels do together is then a compromise, and hardly faster than what each wants alone.
CASES += [("24 kernels, 1 choice, half of them beside collectives", seed) for seed in (0, 3, 6, 8)]
CASES += [("48 kernels, 3 choices, half, a quarter small", seed) for seed in (0, 3)]
# Here it gains nothing together, and what stretches gain shows in the second look only.
CASES += [("48 kernels, half of them beside collectives", seed) for seed in (0, 6)]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_the_plan_is_near_the_best_after_a_bounded_number_of_runs(name, seed):
    settled = settle(STEPS[name](Random(f"{name} {seed}")), Random(f"noise {seed}"))
    assert settled.gain > 0.1
    assert settled.regret <= 0.02
    assert settled.runs <= (700 if name.startswith("48") else 500)


@pytest.mark.parametrize("name", NOTHING)
def test_where_nothing_gains_nothing_changes_in_at_most_200_runs(name):
    settled = settle(NOTHING[name](Random(f"{name} 1")), Random("noise 1"))
    assert (settled.has_moved, settled.runs <= 200) == (False, True), settled.runs


@pytest.mark.parametrize("seed", range(8))
def test_a_step_of_28_kernels_with_18_candidates_settles_in_400_runs_near_the_best_plan(seed):
    assert settle_simulated(a_bad_neighbour(Random(seed)), Random(100 + seed), 400).regret <= 0.02
