"""Screens many contexts at once, by the time of whole runs, for the few plans worth a race.

In each run some contexts take another candidate. What a candidate adds to a run, over the first one of its
context, is estimated from all runs together: linear regression with a normal prior, in which contexts that
are launched one after another have like effects (`_Model`). What it leaves over shows pairs of candidates
that are faster together than both apart. Sources: docs/search.md.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
import statistics
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..expectation.arithmetic import cholesky, forward
from ..strategies import least
from .space import Plan

LEAST_RUNS, RUNS_PER_EFFECT, MOST_RUNS = 36, 4, 156
FIRST_LOOK = 32  # runs after which it ends if nothing seems to gain
SECOND_LOOK = 10  # runs behind it: of the plan that seems to gain, and of the first, in turn
GAIN = 0.01  # of a run: less is no gain
DOUBT = 2.0  # standard deviations by which a gain must be more than that, from the second look on
MOST_FINALISTS = 8
ERRORS = (0.0, 1.0, 2.0)  # standard deviations that an effect must have to be one, in a plan each
PAIR_ERRORS, PAIR_RUNS, MOST_PAIRS = 2.0, 2, 3  # by which a pair must beat the model, in so many runs
STRETCHES = (2, 4, 8)  # parts of all contexts that change together
AGAIN = 2  # runs of one plan whose time may be the host's
FAR = 3.0  # standard deviations beyond which a run is a spike
REFITS = 3  # without the spikes
NOISE, LEAST_NOISE, MOST_NOISE = 0.015, 0.004, 0.04  # of a run: expected, and the bounds of what is taken
OF_NEIGHBOURS, OWN = 0.15, 0.10  # the prior's deviations, as parts of what a context takes
ALONE = 0.8  # of its own, of a context that is like no other: it may slow others down
OF_OPTION = 0.10  # of a choice, as a part of the run
NEIGHBOURS = 6.0  # contexts further, half of the likeness is gone
SHOWN = 0.5  # of what a context takes by its launches, in the run: the prior's mean

Screening = Generator[Plan, float, "list[Plan]"]


@dataclass(frozen=True)
class Factor:
    """A context and its candidates, the first of which has no effect."""

    name: str
    candidates: Sequence[int]  # of factors that are alike the n-th ones are; some may be the first again
    ms: Sequence[float] = ()  # of their launches in a run; (): a choice
    is_alike: bool = False  # its candidates are like those of others, the nearer in the order of launch
    place: int = 0  # in the order of launch

    @property
    def effects(self) -> list[int]:
        return [kind for kind, index in enumerate(self.candidates) if index != self.candidates[0]]


def runs_at_most(effects: int) -> int:
    return min(LEAST_RUNS + RUNS_PER_EFFECT * effects, MOST_RUNS)


def screened(factors: Sequence[Factor], first: Plan, *, may_end: bool) -> Screening:
    """Yield plans, receive the agreed ms of each; return the plans to race, `first` first.

    first: the plan that stays unless another promises a gain. may_end: after the looks, if none does.
    """
    runs = runs_at_most(sum(len(factor.effects) for factor in factors))
    design = itertools.islice(_design(factors), runs)
    timed: list[tuple[Plan, float]] = []
    if may_end:
        yield from _run(itertools.islice(design, FIRST_LOOK), timed)
        if len(timed) < FIRST_LOOK // 2 or (seems := _seems_best(factors, first, timed)) is None:
            return [first]
        yield from _run(itertools.islice(itertools.cycle((first, seems)), SECOND_LOOK), timed)
        if _finalists(factors, first, timed, DOUBT) == [first]:
            return [first]
    yield from _run(design, timed)
    if len(timed) < runs // 2:
        return [first]
    return _finalists(factors, first, timed, DOUBT * may_end)


def _run(plans: Iterable[Plan], timed: list[tuple[Plan, float]]) -> Generator[Plan, float, None]:
    """Yield plans, each again whose time may be the host's; add those that have one to `timed`."""
    for plan in plans:
        for _ in range(AGAIN):
            ms = yield plan
            if least(ms) == ms:
                break
        if math.isfinite(ms):
            timed.append((plan, ms))


def _seems_best(factors: Sequence[Factor], first: Plan, timed: Sequence[tuple[Plan, float]]) -> Plan | None:
    """Return the plan that promises most; None: it promises no gain."""
    model = _Model(factors, timed)
    plan = model.best(first, 0.0)
    gain_ms, _ = model.gain(plan, first)
    return plan if gain_ms >= GAIN * statistics.median(ms for _, ms in timed) else None


def _finalists(
    factors: Sequence[Factor], first: Plan, timed: Sequence[tuple[Plan, float]], doubt: float
) -> list[Plan]:
    """Return the plans worth a race, `first` first; only that if none promises a gain by `doubt` errors."""
    model = _Model(factors, timed)
    found = [model.best(first, errors) for errors in ERRORS]
    gains = (model.gain(plan, first) for plan in found)
    promised_ms = max(gain_ms - doubt * error_ms for gain_ms, error_ms in gains)
    pairs = model.pairs(found[1])[:MOST_PAIRS]
    if not pairs and promised_ms < GAIN * statistics.median(ms for _, ms in timed):
        return [first]
    for pair in pairs:
        found += [{**found[1], **pair}, {**found[-1], **pair}]
    plans = [first, *found]
    return [plan for place, plan in enumerate(plans) if plan not in plans[:place]][:MOST_FINALISTS]


def _design(factors: Sequence[Factor]) -> Iterator[Plan]:
    """Yield plans, always the same: one stretch of alike contexts takes another kind, the others stay.

    Most effects show only near what contexts do together. The others meet each other evenly.
    """
    drawn = random.Random("screening")
    alike = [factor for factor in factors if factor.is_alike]
    others = [factor for factor in factors if not factor.is_alike]
    kinds = range(1, max((len(factor.candidates) for factor in alike), default=2))
    deck: list[int] = []
    for number, plan in enumerate(_meetings(others)):
        if alike:
            length = max(len(alike) // STRETCHES[number % len(STRETCHES)], 1)
            begin, kind = drawn.randrange(len(alike)), _dealt(deck, kinds, drawn)
            for place, factor in enumerate(alike):
                is_inside = (place - begin) % len(alike) < length
                plan[factor.name] = factor.candidates[kind if is_inside else 0]
        yield {factor.name: plan[factor.name] for factor in factors}


def _meetings(factors: Sequence[Factor]) -> Iterator[dict[str, int]]:
    """Yield plans, always others, in which any two candidates of two contexts meet equally often.

    Row (a, b) of an orthogonal array has a + j b, modulo a prime, in its column j.
    """
    drawn = random.Random("meetings")
    least = max([2, len(factors), *(len(factor.candidates) for factor in factors)])
    prime = next(n for n in itertools.count(least) if all(n % d for d in range(2, n)))
    while True:
        columns = drawn.sample(range(prime), len(factors))
        levels = [drawn.sample(factor.candidates, len(factor.candidates)) for factor in factors]
        for row in drawn.sample(range(prime**2), prime**2):
            a, b = divmod(row, prime)
            places = ((a + column * b) % prime for column in columns)
            yield {
                factor.name: level[place % len(level)]
                for factor, level, place in zip(factors, levels, places, strict=True)
            }


def _dealt(deck: list[int], values: Sequence[int], drawn: random.Random) -> int:
    """Return a value; each comes up as often as any other."""
    if not deck:
        deck += values
        drawn.shuffle(deck)
    return deck.pop()


class _Model:
    """What each candidate adds to a run over the first one of its context, in ms: mean and deviation.

    Bayesian linear regression in its dual form: of n runs an n x n matrix, however many effects there are.
    Its noise is what runs differ by from what the others let expect, in the median: spikes hardly count.
    Times beyond three deviations of it count as no more.
    """

    def __init__(self, factors: Sequence[Factor], timed: Sequence[tuple[Plan, float]]) -> None:
        self._factors, self._plans = factors, [plan for plan, _ in timed]
        run_ms = statistics.median(ms for _, ms in timed)
        effects = [(factor, kind) for factor in factors for kind in factor.effects]
        place_of = {(factor.name, factor.candidates[kind]): n for n, (factor, kind) in enumerate(effects)}
        prior = [[_covariance(one, other, run_ms) for other in effects] for one in effects]
        expected = [SHOWN * (f.ms[kind] - f.ms[0]) if f.ms else 0.0 for f, kind in effects]
        active = [[place_of[w] for w in plan.items() if w in place_of] for plan in self._plans]
        of_runs = [[math.fsum(row[e] for e in each) for row in prior] for each in active]  # runs x effects
        common = run_ms**2  # of all runs: their mean is not known
        between = [[math.fsum(row[e] for e in each) + common for each in active] for row in of_runs]
        own_ms = [math.fsum(expected[e] for e in each) for each in active]
        seen = [ms - own for ms, own in zip(_without_drift([ms for _, ms in timed]), own_ms, strict=True)]
        middle_ms = statistics.median(seen)
        far = FAR * 1.4826 * statistics.median(abs(ms - middle_ms) for ms in seen)
        kept = [min(max(ms, middle_ms - far), middle_ms + far) for ms in seen]
        fit = _Fit(between, NOISE * run_ms)
        kept = fit.without_spikes(seen, kept)
        noise = fit.noise_ms * fit.spread() / run_ms
        fit = _Fit(between, min(max(noise, LEAST_NOISE), MOST_NOISE) * run_ms)
        kept = fit.without_spikes(seen, kept)
        self._place_of, self._prior, self._of_runs, self._lower = place_of, prior, of_runs, fit.lower
        self._left = [ms - own for ms, own in zip(kept, fit.fitted, strict=True)]
        self._noise_ms = fit.noise_ms
        self._mean_ms: dict[tuple[str, int], float] = {}
        self._error_ms: dict[tuple[str, int], float] = {}
        for where, e in place_of.items():
            column = [row[e] for row in of_runs]
            self._mean_ms[where] = expected[e] + math.fsum(map(operator.mul, column, fit.weights))
            known = math.fsum(value * value for value in forward(fit.lower, column))
            self._error_ms[where] = math.sqrt(max(prior[e][e] - known, 0.0))

    def best(self, first: Plan, errors: float) -> Plan:
        """Return of each context what adds least, by so many deviations; else the candidate of `first`."""
        plan = {}
        for factor in self._factors:
            own = first[factor.name]
            own_error_ms = self._error_ms.get((factor.name, own), 0.0)
            added = {own: self._added_ms(factor.name, own)}
            for index in factor.candidates:
                error_ms = max(own_error_ms, self._error_ms.get((factor.name, index), 0.0))
                added.setdefault(index, self._added_ms(factor.name, index) + errors * error_ms)
            plan[factor.name] = min(added, key=added.__getitem__)
        return plan

    def gain(self, plan: Plan, first: Plan) -> tuple[float, float]:
        """Return by how much less a run takes than with `first`, and the deviation of that."""
        changed = [(1, each) for each in plan.items() - first.items() if each in self._place_of]
        changed += [(-1, each) for each in first.items() - plan.items() if each in self._place_of]
        signs = {self._place_of[each]: sign for sign, each in changed}
        between = [math.fsum(sign * row[e] for e, sign in signs.items()) for row in self._of_runs]
        known = math.fsum(value * value for value in forward(self._lower, between))
        prior = math.fsum(v * w * self._prior[e][f] for e, v in signs.items() for f, w in signs.items())
        gain_ms = -math.fsum(sign * self._mean_ms[each] for sign, each in changed)
        return gain_ms, math.sqrt(max(prior - known, 0.0))

    def pairs(self, base: Plan) -> list[Plan]:
        """Return the pairs of candidates that beat `base` only together, the most gainful first."""
        found = []
        single = [factor for factor in self._factors if not factor.is_alike]
        having: dict[tuple[str, int], set[int]] = {}
        for number, plan in enumerate(self._plans):
            for where in plan.items():
                having.setdefault(where, set()).add(number)
        for one, other in itertools.combinations(single, 2):
            for a, b in itertools.product(one.candidates, other.candidates):
                pair = (one.name, a), (other.name, b)
                runs = having.get(pair[0], set()) & having.get(pair[1], set())
                if (a, b) == (base[one.name], base[other.name]) or len(runs) < PAIR_RUNS:
                    continue
                together_ms = statistics.median(self._left[number] for number in runs)
                error_ms = 1.25 * self._noise_ms / math.sqrt(len(runs))
                apart_ms = sum(self._added_ms(n, i) - self._added_ms(n, base[n]) for n, i in pair)
                gain_ms = -(together_ms + apart_ms)
                if min(-together_ms, gain_ms) > PAIR_ERRORS * error_ms:
                    found.append((gain_ms, dict(pair)))
        found.sort(key=lambda pair: -pair[0])
        return [plan for _, plan in found]

    def _added_ms(self, name: str, index: int) -> float:
        return self._mean_ms.get((name, index), 0.0)


class _Fit:
    """The fit of times with one noise, where `between` has the prior covariances of the runs."""

    def __init__(self, between: list[list[float]], noise_ms: float) -> None:
        self._between, self.noise_ms = between, noise_ms
        noisy = [[v + noise_ms**2 * (i == j) for j, v in enumerate(row)] for i, row in enumerate(between)]
        self.lower = cholesky(noisy)

    def without_spikes(self, seen: Sequence[float], kept: list[float]) -> list[float]:
        """Fit the times that were seen; return them, drawn to what is fitted where they are far from it.

        kept: the times to begin with.
        """
        far = FAR * self.noise_ms
        self._set(kept)
        for _ in range(REFITS):
            kept = [own + min(max(ms - own, -far), far) for own, ms in zip(self.fitted, seen, strict=True)]
            self._set(kept)
        return kept

    def _set(self, times: Sequence[float]) -> None:
        self.weights = _backward(self.lower, forward(self.lower, times))
        self.fitted = [math.fsum(map(operator.mul, row, self.weights)) for row in self._between]

    def spread(self) -> float:
        """Return how far runs are from what the others let expect, over how far they should be: the median.

        A run's distance is its weight over its element of the inverse's diagonal (Rasmussen, 5.4.2).
        """
        runs = range(len(self.lower))
        columns = (forward(self.lower, [float(run == each) for each in runs]) for run in runs)
        inverse = [math.fsum(value * value for value in column) for column in columns]
        distances = [abs(w) / math.sqrt(v) for w, v in zip(self.weights, inverse, strict=True)]
        return 1.4826 * statistics.median(distances)


def _covariance(one: tuple[Factor, int], other: tuple[Factor, int], run_ms: float) -> float:
    """Return the prior covariance of two effects."""
    (a, kind), (b, other_kind) = one, other
    covariance = 0.0
    if a is b:
        own = (OWN if a.is_alike else ALONE) * a.ms[0] if a.ms else OF_OPTION * run_ms
        covariance = own**2 * (1.0 if kind == other_kind else 0.5)
    if a.is_alike and b.is_alike and kind == other_kind:
        near = 0.5 ** (abs(a.place - b.place) / NEIGHBOURS)
        covariance += OF_NEIGHBOURS**2 * near * a.ms[0] * b.ms[0]
    return covariance


def _backward(lower: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return x of L^T x = right."""
    solved = list(right)
    for place in range(len(solved) - 1, -1, -1):
        row = lower[place]
        solved[place] /= row[-1]
        for before in range(place):
            solved[before] -= row[before] * solved[place]
    return solved


def _without_drift(times: Sequence[float]) -> list[float]:
    """Return the times less what their neighbourhood takes: clocks and heat move slowly."""
    wide = max(len(times) // 6, 8)
    near = (times[max(0, number - wide) : number + wide + 1] for number in range(len(times)))
    return [ms - statistics.median(window) for ms, window in zip(times, near, strict=True)]
