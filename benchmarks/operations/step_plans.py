"""Which configs and options a training step takes: tuned ways to choose them, and a search over all.

Picks of several tunings are called in turns in one process.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.common.arms import GpuClock, WallClock
from benchmarks.common.launched import Held, name_of
from benchmarks.common.ranks import ON_GPU
from benchmarks.common.tuned import tune_online
from dist_autotune.launch.tunable import CHOICES
from dist_autotune.triton_api.identity import key_text

if TYPE_CHECKING:
    from benchmarks.training_step import Step

MOST_STEPS = 600 if ON_GPU else 2  # of one tuning; then it is timed as it is
FAMILIES_S = 15.0 if ON_GPU else 0.5  # the longest search over plans of families


@dataclass(frozen=True)
class Picks:
    """Results for all kernels, and an option for each choice that is known; else the first.

    everywhere: by the name of a choice, what all its calls take instead.
    """

    held: Held
    choices: dict[tuple[str, str], Any] = field(default_factory=dict)
    everywhere: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        self.held.put_back()
        with mock.patch.object(CHOICES, "recall", self._choose):  # what a `tunable` takes outside of calls
            yield

    def _choose(self, name: str, options: Any, key: tuple[Any, ...], among: tuple[int, ...]) -> Any:
        chosen = self.everywhere.get(name, self.choices.get((name, key_text(key))))
        return chosen if chosen in options else options[0]

    def choices_of(self, step: Step) -> dict[str, tuple[Any, ...]]:
        """Return the options of each choice that a step makes, by its name."""
        seen: dict[str, tuple[Any, ...]] = {}

        def choose(name: str, options: Any, key: tuple[Any, ...], among: tuple[int, ...]) -> Any:
            seen[name] = tuple(options)
            return self._choose(name, options, key, among)

        self.held.put_back()
        with mock.patch.object(CHOICES, "recall", choose):
            step()
        return seen


def tune_all(
    step: Step, tuners: list[Any], tunings: dict[str, str], budget_s: float | None
) -> tuple[dict[str, Picks], dict[str, Any], dict[str, int]]:
    """Return picks, report and number of steps of each tuning."""
    picks, reports, steps = {}, {}, {}
    for name, objective in tunings.items():
        picks[name], reports[name], steps[name] = tune(step, tuners, name, objective, budget_s)
        step.ranks.say(f"{name}: {steps[name]} steps, {reports[name].seconds:.1f} s")
    return picks, reports, steps


def tune(
    step: Step, tuners: list[Any], name: str, objective: str, budget_s: float | None
) -> tuple[Picks, Any, int]:
    """Tune the step from nothing; return the picks, the report and how many steps it took."""
    clear(tuners)
    options = {"objective": objective, "name": f"step, {name}", "budget_s": budget_s}
    report, steps = tune_online(lambda: step(), MOST_STEPS, **options)
    names = {name_of(tuner) for tuner in tuners}
    choices = {
        (context.kernel, key_text(context.key)): context.config
        for context in report.contexts
        if context.kernel not in names
    }
    with Picks(Held(tuners), choices).in_use():
        step()  # keys of a tuning that has not ended
    return Picks(Held(tuners), choices), report, steps


def tune_with_stock(step: Step, tuners: list[Any]) -> tuple[Picks, int, int]:
    """Let each rank tune alone; return its picks, on how many keys the ranks disagree, and of how many."""
    clear(tuners)
    with Picks(Held(tuners)).in_use():
        step()
    texts = {
        f"{name_of(tuner)} {key}": str(config) for tuner in tuners for key, config in tuner.cache.items()
    }
    everywhere = step.ranks.gather(texts)
    differing = [key for key in texts if len({each.get(key) for each in everywhere}) > 1]
    return Picks(Held(tuners)), len(differing), len(texts)


def first_configs(tuners: list[Any], known: Picks) -> Picks:
    """Return the first candidate for every key that these picks know."""
    known.held.put_back()
    for tuner in tuners:
        tuner.cache.update(dict.fromkeys(tuner.cache, tuner.configs[0]))
    return Picks(Held(tuners))


def clear(tuners: list[Any]) -> None:
    for tuner in tuners:
        tuner.cache.clear()


def best_of_families(step: Step, base: Picks) -> tuple[Picks, dict[str, Any]]:
    """Return the fastest combination of options, each for all calls of its choice, and what a record says."""
    clock = GpuClock() if ON_GPU else WallClock(step.ranks)
    as_tuned = object()
    families = base.choices_of(step)
    for name, options in dict(families).items():  # some are made only beside other options
        for option in options:
            families |= replace(base, everywhere={name: option}).choices_of(step)
    combinations = [
        {name: option for name, option in zip(families, options, strict=True) if option is not as_tuned}
        for options in itertools.product(*((as_tuned, *options) for options in families.values()))
    ]
    plans = [replace(base, everywhere=everywhere) for everywhere in combinations]
    times: dict[int, list[float]] = {}
    ends = time.perf_counter() + FAMILIES_S
    live = random.Random(0).sample(range(len(plans)), len(plans))  # in time, those that were drawn first
    while len(live) > 1 or not times:
        for index in live:
            with plans[index].in_use():
                if index not in times:
                    step()  # what it launches may be new
                ms = clock.time(step).ms
            of_ranks = step.ranks.gather((ms, time.perf_counter() > ends))
            times.setdefault(index, []).append(max(ms for ms, _ in of_ranks))
            if any(is_over for _, is_over in of_ranks):
                break
        live = sorted(times, key=lambda index: statistics.median(times[index]))[: -(-len(live) // 3)]
    facts = {"best_family_plan": combinations[live[0]], "family_plans": f"{len(times)} of {len(plans)} timed"}
    return plans[live[0]], facts


def gain_found_percent(alone_ms: float, found_ms: float, best_ms: float) -> float | None:
    """Return which part of the best plan's gain over tuning alone was found; None: there is no gain."""
    gain_ms = alone_ms - best_ms
    return round(100 * (alone_ms - found_ms) / gain_ms, 1) if gain_ms > 0 else None
