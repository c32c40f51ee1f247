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
LOOK = 24  # runs; behind each only contexts change that may still gain by it
SURE = 2.0  # standard deviations by which another candidate must be slower for a context not to change
MOST_FINALISTS = 8
ERRORS = (0.0, 1.0, 2.0)  # standard deviations that an effect must have to be one, in a plan each
PAIR_ERRORS, PAIR_RUNS, MOST_PAIRS = 2.0, 2, 3  # by which a pair must beat the model, in so many runs
MOST_PAIRED = 64  # contexts that are looked at in pairs, those that take longest
STRETCHES = (2, 4, 8)  # parts of all contexts that change together
AGAIN = 2  # runs of one plan whose time may be the host's
FAR = 3.0  # standard deviations beyond which a run is a spike
REFITS = 3  # without the spikes
NOISE, LEAST_NOISE, MOST_NOISE = 0.015, 0.004, 0.04  # of a run: expected, and the bounds of what is taken
OF_NEIGHBOURS, OWN = 0.15, 0.10  # the prior's deviations, as parts of what a context takes
ALONE = 0.8  # of its own, of a context that is like no other: it may slow others down
OF_OPTION = 0.10  # of a choice, as a part of the run
NEIGHBOURS = 6.0  # contexts further, half of the likeness is gone
OF_LAUNCH = 0.3  # the deviation of what launches tell of leaving room, as a part of what a context takes
MOST_TOLD = 128  # rows of that: of more contexts, neighbours share one, as fitting takes the cube of rows
DRIFT, DRIFT_RUNS = 0.02, 60.0  # of a run, by clocks and heat; runs further, half of it is still the same
SHOWN = 0.5  # of what a context takes by its launches, in the run: the prior's mean

Asked = tuple[Plan, bool]  # and whether choosing it took a fit, which takes the host long
Screening = Generator[Asked, float, "list[Plan]"]


@dataclass(frozen=True)
class Factor:
    """A context and its candidates, the first of which has no effect.

    Contexts of which launches tell something are alike, the more the nearer they are: the first candidate
    leaves room to others, the second does not, or it is the first again.
    """

    name: str
    candidates: Sequence[int]
    ms: Sequence[float] = ()  # of their launches in a run; (): a choice
    place: int = 0  # in the order of launch
    told_ms: float | None = None  # what the second adds to a run, as launches tell

    @property
    def is_alike(self) -> bool:
        return self.told_ms is not None

    @property
    def effects(self) -> list[int]:
        return [kind for kind, index in enumerate(self.candidates) if index != self.candidates[0]]


def runs_at_most(effects: int) -> int:
    return min(LEAST_RUNS + RUNS_PER_EFFECT * effects, MOST_RUNS)


def screened(factors: Sequence[Factor], first: Plan, start: Plan, *, may_end: bool) -> Screening:
    """Yield plans, receive the agreed ms of each; return the plans to race, `first` first.

    first: the plan that stays unless another promises a gain. start: near which plans are looked at first.
    may_end: after the looks, if none does.
    """
    most = runs_at_most(sum(len(factor.effects) for factor in factors))
    alike = [factor for factor in factors if factor.is_alike]
    others = [factor for factor in factors if not factor.is_alike]
    meetings = _meetings(others)
    drawn = random.Random("screening")
    timed: list[tuple[Plan, float]] = []
    yield from _run(itertools.islice(_design(alike, start, meetings, drawn), FIRST_LOOK), timed, fits=False)
    if len(timed) < FIRST_LOOK // 2:
        return [first]
    if may_end:
        if (seems := _seems_best(factors, first, timed)) is None:
            return [first]
        yield from _run(itertools.islice(itertools.cycle((first, seems)), SECOND_LOOK), timed)
        if _finalists(factors, first, timed, DOUBT) == [first]:
            return [first]
    made, look = FIRST_LOOK, LOOK if alike else most  # what is like no other changes to the end
    while made < most and 2 * len(timed) >= made:
        model = _Model(factors, timed)
        best = model.best(first, 0.0)
        unsure = [factor for factor in alike if not model.is_sure(factor, best)]
        if not (unsure or others):
            break
        plans = ({**best, **plan} for plan in _design(unsure, best, meetings, drawn))
        yield from _run(itertools.islice(plans, min(look, most - made)), timed)
        made += look
    if 2 * len(timed) < min(made, most):
        return [first]
    return _finalists(factors, first, timed, DOUBT * may_end)


def _run(
    plans: Iterable[Plan], timed: list[tuple[Plan, float]], *, fits: bool = True
) -> Generator[Asked, float, None]:
    """Yield plans, each again whose time may be the host's; add those that have one to `timed`.

    fits: choosing them took a fit.
    """
    for number, plan in enumerate(plans):
        for attempt in range(AGAIN):
            ms = yield plan, fits and not (number or attempt)
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
    fastest, _ = min(timed, key=lambda run: run[1])  # whatever the model expects of it
    plans = [first, fastest, *found]
    return [plan for place, plan in enumerate(plans) if plan not in plans[:place]][:MOST_FINALISTS]


def _design(
    alike: Sequence[Factor], base: Plan, meetings: Iterator[Plan], drawn: random.Random
) -> Iterator[Plan]:
    """Yield plans: a stretch of alike contexts leaves room, or none, the others do as `base`.

    Most effects show only near what contexts do together. Those that are not alike meet each other evenly.
    """
    for number, plan in enumerate(meetings):
        if alike:
            length = max(len(alike) // STRETCHES[number % len(STRETCHES)], 1)
            begin, kind = drawn.randrange(len(alike)), drawn.randrange(2)
            stretch = [*alike, *alike][begin : begin + length]
            if all(factor.candidates[kind] == base[factor.name] for factor in stretch):
                kind = 1 - kind
            plan |= {factor.name: base[factor.name] for factor in alike}
            plan |= {factor.name: factor.candidates[kind] for factor in stretch}
        yield plan


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


class _Model:
    """What each candidate adds to a run over the first one of its context, in ms: mean and deviation.

    Bayesian linear regression in its dual form: of n runs an n x n matrix, however many effects there are.
    What launches tell of a context is a row like a run's. The noise is what runs differ by from what the
    others let expect, in the median: spikes hardly count. Beyond three deviations of it times count as no
    more. A drift of the device is as a part of the time that near runs share.
    """

    def __init__(self, factors: Sequence[Factor], timed: Sequence[tuple[Plan, float]]) -> None:
        self._factors, self._plans = factors, [plan for plan, _ in timed]
        run_ms = statistics.median(ms for _, ms in timed)
        effects = [(factor, kind) for factor in factors for kind in factor.effects]
        place_of = {(factor.name, factor.candidates[kind]): n for n, (factor, kind) in enumerate(effects)}
        prior = [[_covariance(one, other, run_ms) for other in effects] for one in effects]
        active = [[place_of[w] for w in plan.items() if w in place_of] for plan in self._plans]
        told = _in_rows([e for e, (factor, _) in enumerate(effects) if factor.is_alike])
        rows = [*active, *told]
        of_rows = [[math.fsum(map(row.__getitem__, each)) for row in prior] for each in rows]
        between = [[math.fsum(map(row.__getitem__, each)) for each in rows] for row in of_rows]
        for one, other in itertools.product(range(len(timed)), repeat=2):
            drift = DRIFT**2 * 0.5 ** (abs(one - other) / DRIFT_RUNS)
            between[one][other] += (1 + drift) * run_ms**2  # their mean is not known
        expected = [0.0 if f.is_alike or not f.ms else SHOWN * (f.ms[kind] - f.ms[0]) for f, kind in effects]
        own_ms = [math.fsum(expected[e] for e in each) for each in active]
        seen = [ms - own for (_, ms), own in zip(timed, own_ms, strict=True)]
        told_ms = [math.fsum(effects[e][0].told_ms or 0.0 for e in each) for each in told]
        errors_ms = [
            OF_LAUNCH * math.sqrt(math.fsum(effects[e][0].ms[0] ** 2 for e in each)) for each in told
        ]
        fit = _Fit(between, seen, told_ms, NOISE * run_ms, errors_ms)
        noise_ms = min(max(fit.spread(), LEAST_NOISE * run_ms), MOST_NOISE * run_ms)
        fit = _Fit(between, seen, told_ms, noise_ms, errors_ms)
        self._place_of, self._prior, self._of_rows, self._lower = place_of, prior, of_rows, fit.lower
        self._left, self._noise_ms = fit.left, noise_ms
        self._mean_ms: dict[tuple[str, int], float] = {}
        self._error_ms: dict[tuple[str, int], float] = {}
        for where, e in place_of.items():
            column = [row[e] for row in of_rows]
            self._mean_ms[where] = expected[e] + math.fsum(map(operator.mul, column, fit.weights))
            known = math.fsum(value * value for value in forward(fit.lower, column))
            self._error_ms[where] = math.sqrt(max(prior[e][e] - known, 0.0))

    def is_sure(self, factor: Factor, plan: Plan) -> bool:
        """Return whether any other candidate of a context makes the run slower, by SURE deviations."""
        own = plan[factor.name]
        others = [index for index in factor.candidates if index != own]
        gains = (self.gain({factor.name: own}, {factor.name: index}) for index in others)
        return own in factor.candidates and all(gain_ms >= SURE * error_ms for gain_ms, error_ms in gains)

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
        between = [math.fsum(sign * row[e] for e, sign in signs.items()) for row in self._of_rows]
        known = math.fsum(value * value for value in forward(self._lower, between))
        prior = math.fsum(v * w * self._prior[e][f] for e, v in signs.items() for f, w in signs.items())
        gain_ms = -math.fsum(sign * self._mean_ms[each] for sign, each in changed)
        return gain_ms, math.sqrt(max(prior - known, 0.0))

    def pairs(self, base: Plan) -> list[Plan]:
        """Return the pairs of candidates that beat `base` only together, the most gainful first."""
        found = []
        single = [factor for factor in self._factors if not factor.is_alike]
        single.sort(key=lambda factor: -max(factor.ms, default=math.inf))  # choices first
        del single[MOST_PAIRED:]
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
    """The fit of times of runs, of this noise, and of what launches tell, with these deviations.

    between: the prior covariances of all of them, runs first.
    """

    def __init__(
        self,
        between: Sequence[Sequence[float]],
        seen: Sequence[float],
        told_ms: Sequence[float],
        noise_ms: float,
        errors_ms: Sequence[float],
    ) -> None:
        self._between, self._runs, self._noise_ms = between, len(seen), noise_ms
        noises = [noise_ms] * len(seen) + [*errors_ms]
        noisy = [[v + noises[i] ** 2 * (i == j) for j, v in enumerate(row)] for i, row in enumerate(between)]
        self.lower = cholesky(noisy)
        middle_ms = statistics.median(seen)
        far = FAR * 1.4826 * statistics.median(abs(ms - middle_ms) for ms in seen)
        times = [*seen, *told_ms]
        self._set([min(max(ms, middle_ms - far), middle_ms + far) for ms in seen] + [*told_ms])
        for _ in range(REFITS):  # without the spikes
            near = zip(times, self._fitted, noises, strict=True)
            self._set([own + min(max(ms - own, -FAR * noise), FAR * noise) for ms, own, noise in near])

    def _set(self, times: Sequence[float]) -> None:
        self.weights = _backward(self.lower, forward(self.lower, times))
        self._fitted = [math.fsum(map(operator.mul, row, self.weights)) for row in self._between]
        self.left = [ms - own for ms, own in zip(times, self._fitted, strict=True)]

    def spread(self) -> float:
        """Return the noise that runs show: how far they are from what the others let expect, in the median.

        A run's distance is its weight over its element of the inverse's diagonal (Rasmussen, 5.4.2).
        """
        size = len(self.lower)
        columns = (  # of the inverse of L, from the diagonal on
            forward([row[run:] for row in self.lower[run:]], [1.0] + [0.0] * (size - run - 1))
            for run in range(self._runs)
        )
        inverse = [math.fsum(value * value for value in column) for column in columns]
        distances = [abs(w) / math.sqrt(v) for w, v in zip(self.weights[: self._runs], inverse, strict=True)]
        return 1.4826 * self._noise_ms * statistics.median(distances)


def _in_rows(places: Sequence[int]) -> list[Sequence[int]]:
    """Return neighbouring places together, in MOST_TOLD rows at most."""
    length = max(math.ceil(len(places) / MOST_TOLD), 1)
    return [places[begin : begin + length] for begin in range(0, len(places), length)]


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
        *before, diagonal = lower[place]
        own = solved[place] = solved[place] / diagonal
        solved[:place] = [value - factor * own for value, factor in zip(solved, before, strict=False)]
    return solved
