"""Steps of many kernels in a simulation: what a plan takes, what the best one takes, what a session finds.

A step's time is not the sum of what its kernels take alone: a config may slow down the kernels around it.
Launches are timed with a noise of 2 %, whole runs too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from benchmarks.simulation.protocol_simulation import Simulation

NOISE = 0.02
SLOWED, SLOWER = 5, 0.3  # so many kernels are slowed down by so much
RUNS_AT_MOST = 10_000

Plan = Mapping[str, str]


@dataclass(frozen=True)
class Step:
    """`launch_ms`: of each kernel's candidates, alone. `beyond_ms`: what a plan takes more than their sum."""

    launch_ms: Mapping[str, Mapping[str, float]]
    beyond_ms: Callable[[Plan], float]
    best: Plan

    def ms(self, plan: Plan) -> float:
        return sum(self.launch_ms[kernel][candidate] for kernel, candidate in plan.items()) + self.beyond_ms(
            plan
        )


@dataclass(frozen=True)
class Settled:
    runs: int
    regret: float  # of the plan that is left, against the best one


def a_bad_neighbour(random: Random, kernels: int = 28, candidates: int = 18) -> Step:
    """Return a step in which one kernel's fastest config slows five others down."""
    launch_ms = {f"k{k}": _times(random, f"k{k}", candidates) for k in range(kernels)}
    bad, *slowed = random.sample([*launch_ms], 1 + SLOWED)
    fastest = {kernel: min(times, key=times.__getitem__) for kernel, times in launch_ms.items()}

    def beyond_ms(plan: Plan) -> float:
        if plan.get(bad) != fastest[bad]:
            return 0.0
        return SLOWER * sum(launch_ms[kernel][plan[kernel]] for kernel in slowed)

    plans = [{**fastest, bad: candidate} for candidate in launch_ms[bad]]
    return Step(launch_ms, beyond_ms, min(plans, key=Step(launch_ms, beyond_ms, fastest).ms))


def settle(step: Step, random: Random, runs_at_most: int = RUNS_AT_MOST) -> Settled:
    """Tune a step by the time of its runs; an AssertionError tells that `runs_at_most` are not enough."""
    own_ms = {candidate: ms for times in step.launch_ms.values() for candidate, ms in times.items()}
    simulation = Simulation(
        {kernel: [*times] for kernel, times in step.launch_ms.items()},
        lambda candidate, rank: own_ms[candidate] * random.gauss(1, NOISE),
        run_ms=lambda plan: step.beyond_ms(plan) + step.ms(plan) * random.gauss(0, NOISE),
        objective="thunk",
        search="racing",
    )
    runs = len(simulation.session(runs_at_most + 1))
    return Settled(runs, step.ms(simulation.winners()) / step.ms(step.best) - 1)


def _times(random: Random, kernel: str, candidates: int) -> dict[str, float]:
    """Return what a kernel's candidates take: some kernels are large, and most candidates are not far off."""
    scale_ms = 0.1 * random.lognormvariate(0, 0.6)
    return {f"{kernel}c{c}": scale_ms * (1 + random.gammavariate(1.2, 0.25)) for c in range(candidates)}
