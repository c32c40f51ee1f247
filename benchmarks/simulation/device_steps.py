"""A step in virtual time: kernels on one stream, collectives on another, and the SMs that they share.

A persistent kernel holds an SM with each of its programs until it ends. A collective starts once as many SMs
are free as it has CTAs, and holds them until it ends; programs that then find no SM run behind it. Kernels
with more programs than SMs let a collective in at once, and go on with the others.

Calibrated with a GEMM beside an all-reduce on 2 x H200 (2026-11-22): 132
programs 0.607 ms alone and 1.467 with the all-reduce, 100 programs 0.722 and 0.915. So the candidate that
wins is 1.18 to 3 times slower alone: the more CTAs the collectives need, the slower.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

SMS = 132
LEFT_FREE = (0, 8, 16, 24, 32, 56, 88)  # SMs, by candidate of a persistent kernel
TILES = (1.0, 1.12)  # what they take, over the better one
KERNEL_BESIDE, COLLECTIVE_BESIDE = 1.04, 1.08  # slower while the other runs
WAVES_POWER = 0.75  # of more waves: fewer programs have more bandwidth and clock each
LATENCY_MS = 0.005  # of a collective behind what it waits for
MOST_CTAS = 24
CTAS = {"none": MOST_CTAS, "4": 4, "8": 8, "16": 16}  # of a collective, by option of its limit
SLOWER_WITH = {4: 2.5, 8: 1.35, 16: 1.02}  # CTAs: a collective's time over that with all
SETTLED_BELOW = 1e-12

Plan = Mapping[str, str]  # kernel or choice -> candidate or option


@dataclass(frozen=True)
class Candidate:
    ms: float  # alone
    programs: int

    @property
    def share(self) -> float:
        """Return the share of the SMs that it holds."""
        return min(self.programs / SMS, 1.0)


@dataclass(frozen=True)
class Collective:
    ms: float  # with all CTAs, alone
    choice: str = ""  # of its limit

    def with_limit(self, plan: Plan) -> tuple[float, int]:
        """Return (ms, CTAs) under the option of its choice."""
        ctas = CTAS[plan[self.choice]] if self.choice else MOST_CTAS
        return self.ms * SLOWER_WITH.get(ctas, 1.0), ctas


@dataclass(frozen=True)
class Kernel:
    name: str
    family: str
    candidates: Mapping[str, Candidate]
    collective: Collective | None = None  # launched beside it


@dataclass(frozen=True)
class DeviceStep:
    """Kernels in the order of their launch, and the options of each choice."""

    kernels: Sequence[Kernel]
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def contexts(self) -> dict[str, list[str]]:
        return {
            **{k.name: [*k.candidates] for k in self.kernels},
            **{c: [*o] for c, o in self.choices.items()},
        }

    def ms(self, plan: Plan) -> float:
        return self.times(plan)[1]

    def times(self, plan: Plan) -> tuple[dict[str, float], float]:
        """Return ms of each kernel in the step, and of the step."""
        return _Device(self, plan).run()

    def fastest_alone(self) -> dict[str, str]:
        """Return the plan that tuning each kernel alone gives, with the first options."""
        alone = {k.name: min(k.candidates, key=lambda c: k.candidates[c].ms) for k in self.kernels}
        return {**alone, **{choice: options[0] for choice, options in self.choices.items()}}


class _Device:
    """One run of a step."""

    def __init__(self, step: DeviceStep, plan: Plan) -> None:
        self._kernels = [(k, k.candidates[plan[k.name]]) for k in step.kernels]
        self._limits = [k.collective and k.collective.with_limit(plan) for k in step.kernels]

    def run(self) -> tuple[dict[str, float], float]:
        now = 0.0
        took: dict[str, float] = {}
        begins: list[tuple[float, float, int]] = []  # waiting collectives: (ready at, ms, CTAs)
        running: list[float] = []  # [ms left, CTAs] of the collective
        for (kernel, candidate), limit in zip(self._kernels, self._limits, strict=True):
            if limit is not None:
                begins.append((now + LATENCY_MS, *limit))
            began, left, behind = now, candidate.ms, 0.0
            fills = candidate.programs > SMS
            free = SMS - (int(running[1]) if running else 0)
            held = min(candidate.programs, free)
            if not fills and candidate.programs > held:
                behind = candidate.ms  # of the programs that find no SM
            while left > SETTLED_BELOW or behind > SETTLED_BELOW:
                if not running and begins:
                    fits = fills or held + begins[0][2] <= SMS
                    if (
                        fits
                        and begins[0][0] <= now + SETTLED_BELOW
                        and not (behind and left <= SETTLED_BELOW)
                    ):
                        running = [begins[0][1], float(begins[0][2])]
                        begins.pop(0)
                if behind and (not running or left <= SETTLED_BELOW):
                    # An SM is free: of the collective that has ended, or of the first programs.
                    if left <= SETTLED_BELOW:
                        left, behind, held = behind, 0.0, candidate.programs - held
                        continue
                    left, behind, held = behind, 0.0, candidate.programs
                    continue
                speed = 1 / KERNEL_BESIDE if running else 1.0
                if fills and running:
                    speed *= 1 - running[1] / SMS
                step = left / speed
                if running:
                    step = min(step, running[0] * COLLECTIVE_BESIDE)
                elif begins and (fills or held + begins[0][2] <= SMS) and begins[0][0] > now:
                    step = min(step, begins[0][0] - now)
                now += step
                left -= step * speed
                if running:
                    running[0] -= step / COLLECTIVE_BESIDE
                    if running[0] <= SETTLED_BELOW:
                        running = []
            took[kernel.name] = now - began
            if not running and begins and begins[0][0] <= now:  # it waited longer than the next kernel
                running = [begins[0][1], float(begins[0][2])]
                begins.pop(0)
        end = now + (running[0] if running else 0.0)
        for ready, ms, _ in begins:
            end = max(end, ready) + ms
        return took, end


def persistent(random: Random, name: str, family: str, ms: float, collective: Collective | None) -> Kernel:
    """Return a kernel whose candidates are tiles and numbers of programs, the fastest alone on all SMs."""
    tiles = random.randrange(500, 2000)
    candidates = {}
    for number, slower in enumerate(TILES):
        for free in LEFT_FREE:
            waves = math.ceil(tiles / (SMS - free)) / (tiles / SMS)
            took = ms * slower * waves**WAVES_POWER * random.gauss(1, 0.005)
            candidates[f"{number} {SMS - free}"] = Candidate(took, SMS - free)
    return Kernel(name, family, candidates, collective)


def filling(name: str, family: str, ms: float) -> Kernel:
    """Return a kernel of many short programs, with nothing beside it."""
    drawn = Random(family)  # a config is as good in every shape
    factors = [1.0, *(1 + drawn.gammavariate(1.2, 0.25) for _ in range(5))]
    drawn.shuffle(factors)
    return Kernel(name, family, {f"{n}": Candidate(ms * f, 4096) for n, f in enumerate(factors)})


def beside_collectives(
    random: Random,
    kernels: int,
    choices: int = 0,
    *,
    share: float = 1.0,
    mixed: bool = False,
) -> DeviceStep:
    """Return a step of kernels with collectives beside them.

    choices: limits of the collectives, which take turns with them. share: of the kernels that have one: those
    behind. mixed: every fourth kernel is small, of many programs.
    """
    made, first = [], round(kernels * (1 - share))
    ratio = random.uniform(0.8, 1.4)  # of a collective over its kernel
    for number in range(kernels):
        ms = 0.6 * random.lognormvariate(0, 0.35)
        if mixed and number % 4 == 3:
            made.append(filling(f"norm{number}", "norm", 0.2 * ms))
            continue
        choice = f"limit{number % choices}" if choices else ""
        beside = Collective(ms * ratio * random.uniform(0.8, 1.25), choice) if number >= first else None
        family = "gemm" if number % 3 or kernels < 24 else "attention"
        made.append(persistent(random, f"k{number}", family, ms, beside))
    options = [*CTAS]
    return DeviceStep(made, {f"limit{number}": options for number in range(choices)})


def nothing_gains(random: Random, kernels: int, choices: int = 0) -> DeviceStep:
    """Return a step in which kernels are fastest as they are alone, and no choice matters."""
    made = [
        persistent(random, f"k{n}", "gemm", 0.6 * random.lognormvariate(0, 0.35), None)
        for n in range(kernels)
    ]
    return DeviceStep(made, {f"limit{number}": [*CTAS] for number in range(choices)})


def best_plan(step: DeviceStep) -> tuple[dict[str, str], float]:
    """Return the best plan of whole families, and its ms.

    A family: kernels of one name that have collectives beside them, or of which none has. Each two of rooms
    and options are searched exhaustively, all others as they are, until no two of them make a plan better.
    """
    family = {kernel.name: f"{kernel.family} {bool(kernel.collective)}" for kernel in step.kernels}
    rooms = sorted({c.programs for k in step.kernels for c in k.candidates.values()}, reverse=True)
    axes: dict[str, Sequence[object]] = {**dict.fromkeys(family.values(), rooms), **step.choices}
    best = {name: values[0] for name, values in axes.items()}

    def plan_of(chosen: Mapping[str, object]) -> dict[str, str]:
        options = {choice: str(chosen[choice]) for choice in step.choices}
        return {**options, **{k.name: fastest_within(k, chosen[family[k.name]]) for k in step.kernels}}

    pairs = [*itertools.combinations(axes, 2)] or [(next(iter(axes)),) * 2]
    starts = [
        {**best, **dict.fromkeys(family.values(), room), **{c: axes[c][place] for c in step.choices}}
        for room in rooms
        for place in range(len(CTAS) if step.choices else 1)
    ]
    best = min(starts, key=lambda each: step.ms(plan_of(each)))
    best_ms, before_ms = step.ms(plan_of(best)), math.inf
    while best_ms < before_ms:
        before_ms = best_ms
        for one, other in pairs:
            for a, b in itertools.product(axes[one], axes[other]):
                chosen = {**best, one: a, other: b}
                if (ms := step.ms(plan_of(chosen))) < best_ms:
                    best, best_ms = chosen, ms
    return plan_of(best), best_ms


def fastest_within(kernel: Kernel, programs: int) -> str:
    """Return the fastest candidate that has at most so many programs; without one, that with the fewest."""
    fits = [name for name, each in kernel.candidates.items() if each.programs <= programs]
    if not fits:  # of many short programs
        return min(kernel.candidates, key=lambda name: kernel.candidates[name].ms)
    return min(fits, key=lambda name: kernel.candidates[name].ms)
