"""Screens the candidates of many contexts at once, by the time of whole runs, for the few plans worth a race.

The model of a run's time: of each context what its launches take, times the share of it that shows in the
run, and what single candidates add beyond that, nothing for most. It is fitted by backfitting with a soft
threshold; what it leaves over shows pairs that are faster together than both apart. Sources: docs/search.md.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Generator, Iterator, Mapping, Sequence

from .strategies import least

RUNS = 156
MOST_LEVELS = 6  # candidates of a context
MOST_FINALISTS = 8
SWEEPS = 12  # of the backfitting
CAUTIOUS, BOLD = 3.5, 2.0  # standard errors that an effect must have to be one
PAIR_ERRORS, PAIR_RUNS = 2.5, 2  # by which a pair must beat the model, in so many runs at least
MOST_PAIRS = 3
FAR = 4.0  # standard deviations beyond which a run is a spike
AGAIN = 2  # runs of one plan whose time may be the host's

Levels = Mapping[str, Mapping[int, float]]  # context -> candidate -> ms by its launches, or 0.0
Plan = dict[str, int]
Screening = Generator[Plan, float, "list[Plan]"]


def screened(levels: Levels) -> Screening:
    """Yield plans, receive the agreed ms of each; return the plans to race, the incumbents' first."""
    runs: list[tuple[Plan, float]] = []
    for plan in itertools.islice(_design(levels), RUNS):
        for _ in range(AGAIN):
            ms = yield plan
            if least(ms) == ms:
                break
        if math.isfinite(ms):
            runs.append((plan, ms))
    first = {name: next(iter(candidates)) for name, candidates in levels.items()}
    if len(runs) < RUNS // 2:
        return [first]
    cautious, bold = (_Model(levels, runs, errors) for errors in (CAUTIOUS, BOLD))
    base = cautious.best(first)
    plans = [first, base, bold.best(first)]
    for pair in cautious.pairs(base)[:MOST_PAIRS]:
        plans += [{**base, **pair}, {**plans[-1], **pair}]
    found = [plan for place, plan in enumerate(plans) if plan not in plans[:place]]
    return found[:MOST_FINALISTS]


def _design(levels: Levels) -> Iterator[Plan]:
    """Yield plans in blocks, in which a context's candidates come up evenly. They are always the same."""
    drawn = random.Random("screening")
    block = max(len(candidates) for candidates in levels.values())
    while True:
        columns = {}
        for name, candidates in levels.items():
            rest = drawn.sample(list(candidates), block % len(candidates))
            column = [*candidates] * (block // len(candidates)) + rest
            drawn.shuffle(column)
            columns[name] = column
        for number in range(block):
            yield {name: column[number] for name, column in columns.items()}


class _Model:
    """The time that contexts and candidates add to a run, where it exceeds so many standard errors."""

    def __init__(self, levels: Levels, runs: Sequence[tuple[Plan, float]], errors: float) -> None:
        self._levels = levels
        self._with = {
            (name, index): [number for number, (plan, _) in enumerate(runs) if plan[name] == index]
            for name, candidates in levels.items()
            for index in candidates
        }
        self._share = dict.fromkeys(levels, 0.0)  # of a context's own time, in the run's
        self._beyond_ms = dict.fromkeys(self._with, 0.0)
        self._left = _without_drift([ms for _, ms in runs])
        self._own: dict[str, list[float]] = {}  # by context and run: ms of its launches, less the mean
        for name in levels:
            own_ms = [levels[name][plan[name]] for plan, _ in runs]
            self._own[name] = [ms - statistics.fmean(own_ms) for ms in own_ms]
        active = set(self._with)
        for sweep in range(2 * SWEEPS):
            if sweep == SWEEPS:  # refit the remaining effects without the threshold's pull
                active = {where for where in active if self._beyond_ms[where]}
            self._noise_ms = 1.4826 * statistics.median(map(abs, self._left))  # median deviation, as sd
            self._fit_shares()
            self._fit_effects(active, errors if sweep < SWEEPS else 0.0)

    def best(self, first: Plan) -> Plan:
        """Return the best candidate of each context by the model, the first one where it has no effect."""
        plan = {}
        for name, candidates in self._levels.items():
            fastest = min(candidates, key=lambda index: (self._added_ms(name, index), index != first[name]))
            is_better = self._added_ms(name, fastest) < self._added_ms(name, first[name])
            has_effect = any(self._beyond_ms[name, index] for index in candidates)
            plan[name] = fastest if is_better and has_effect else first[name]  # else launches judged well
        return plan

    def pairs(self, base: Plan) -> list[Plan]:
        """Return the pairs of candidates that beat `base` only together, the most gainful first."""
        found = []
        for one, other in itertools.combinations(self._levels, 2):
            for a, b in itertools.product(self._levels[one], self._levels[other]):
                numbers = set(self._with[one, a]).intersection(self._with[other, b])
                if (a, b) == (base[one], base[other]) or len(numbers) < PAIR_RUNS:
                    continue
                together_ms = statistics.median(self._left[number] for number in numbers)
                error_ms = 1.25 * self._noise_ms / math.sqrt(len(numbers))
                pair = (one, a), (other, b)
                apart_ms = sum(self._added_ms(n, i) - self._added_ms(n, base[n]) for n, i in pair)
                gain_ms = -(together_ms + apart_ms)
                if min(-together_ms, gain_ms) > PAIR_ERRORS * error_ms:
                    found.append((gain_ms, dict(pair)))
        found.sort(key=lambda pair: -pair[0])
        return [plan for _, plan in found]

    def _added_ms(self, name: str, index: int) -> float:
        return self._share[name] * self._levels[name][index] + self._beyond_ms[name, index]

    def _fit_shares(self) -> None:
        far = FAR * self._noise_ms
        for name, own_ms in self._own.items():
            squares = math.fsum(ms * ms for ms in own_ms)
            if not squares:
                continue
            trimmed = [min(max(left, -far), far) for left in self._left]
            slope = math.fsum(ms * left for ms, left in zip(own_ms, trimmed, strict=True)) / squares
            slope = max(slope, -self._share[name])  # no kernel makes a run faster by taking longer
            self._share[name] += slope
            self._left = [left - slope * ms for left, ms in zip(self._left, own_ms, strict=True)]

    def _fit_effects(self, active: set[tuple[str, int]], errors: float) -> None:
        far = FAR * self._noise_ms
        for where, numbers in self._with.items():
            if where not in active or not numbers:
                continue
            before_ms = self._beyond_ms[where]
            seen_ms = statistics.fmean(min(max(self._left[n] + before_ms, -far), far) for n in numbers)
            needed_ms = errors * self._noise_ms / math.sqrt(len(numbers))
            after_ms = math.copysign(max(abs(seen_ms) - needed_ms, 0.0), seen_ms)
            self._beyond_ms[where] = after_ms
            for number in numbers:
                self._left[number] -= after_ms - before_ms


def _without_drift(times: Sequence[float]) -> list[float]:
    """Return the times less what their neighbourhood takes: clocks and heat move slowly."""
    wide = max(len(times) // 6, 8)
    near = (times[max(0, number - wide) : number + wide + 1] for number in range(len(times)))
    return [ms - statistics.median(window) for ms, window in zip(times, near, strict=True)]
