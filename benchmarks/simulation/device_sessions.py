"""Whole sessions on steps in virtual time, with the noise of an H200: runs, and regret of the plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.simulation.device_steps import DeviceStep, beside_collectives, best_plan, nothing_gains
from benchmarks.simulation.protocol_simulation import Simulation

RANKS = 2
JITTER, SPIKE_CHANCE, SPIKE, DRIFT, DRIFT_RUNS = 0.02, 0.03, 1.5, 0.11, 30.0
FIRST_USE = 1.3  # what a candidate's first launch takes longer
RUNS_AT_MOST = 2000


class DeviceSession(Simulation):
    """Ranks that run one step on a device each."""

    def __init__(
        self, step: DeviceStep, random: Random, *, knows_shares: bool = True, **options: Any
    ) -> None:
        chosen = {"search": "racing", "objective": "thunk", **options}
        super().__init__(step.contexts(), {}, ranks=RANKS, choices=[*step.choices], **chosen)
        self.step, self._random, self._knows_shares = step, random, knows_shares
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
        if name not in self._kernels or not self._knows_shares:
            return 0
        return round(1000 * self._kernels[name].candidates[candidate].share)


@dataclass(frozen=True)
class Settled:
    runs: int
    regret: float  # of the plan that is left, against the best one of whole families
    gain: float  # of that one, against the plan by launches alone
    has_moved: bool  # it is neither the first candidates nor those that are best by launches


def settle(step: DeviceStep, random: Random, **options: Any) -> Settled:
    session = DeviceSession(step, random, **options)
    runs = len(session.session(RUNS_AT_MOST))
    found, (_, best_ms) = session.winners(), best_plan(step)
    contexts = session.tuning.contexts.values()
    moved = any(c.incumbent not in (0, c.by_launches.winner) for c in contexts)
    alone_ms = step.ms(step.fastest_alone())
    return Settled(runs, step.ms(found) / best_ms - 1, alone_ms / best_ms - 1, moved)


Make = Callable[[Random], DeviceStep]
COUNTS, CHOICES = (1, 8, 24, 48), (0, 1, 2, 3)
BESIDE: dict[str, Make] = {
    f"{kernels} kernels, {choices} choices": lambda random, k=kernels, c=choices: beside_collectives(
        random, k, c
    )
    for kernels in COUNTS
    for choices in CHOICES
}
NOTHING: dict[str, Make] = {
    f"{kernels} kernels, {choices} choices, nothing gains": lambda random, k=kernels, c=choices: (
        nothing_gains(random, k, c)
    )
    for kernels in COUNTS
    for choices in CHOICES
}
OTHERS: dict[str, Make] = {
    "24 kernels, 1 choice, half of them beside collectives": lambda random: beside_collectives(
        random, 24, 1, share=0.5
    ),
    "48 kernels, 3 choices, half, a quarter small": lambda random: beside_collectives(
        random, 48, 3, share=0.5, mixed=True
    ),
    "48 kernels, half of them beside collectives": lambda random: beside_collectives(random, 48, share=0.5),
    "24 kernels, a quarter small": lambda random: beside_collectives(random, 24, mixed=True),
    "8 kernels, collectives of 88 CTAs": lambda random: beside_collectives(random, 8, ctas=88),
    "2 kernels, 1 choice": lambda random: beside_collectives(random, 2, 1),
    "3 kernels, 1 choice": lambda random: beside_collectives(random, 3, 1),
}
