"""The order in which the candidates of a key are tried, and when the untried ones cannot pay."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ...codec import digest
from ..strategies import least
from .fields import UNKNOWN, Fills, Likeness, TimesByKey
from .gaussian import GaussianProcess, kin_of
from .model import Expectation

GAIN = 0.01  # an untried candidate must win by more ...
GAIN_OF_RUN = 0.003  # ... and by more of a run, where it is known what that takes
OF_SMALL = 0.2  # what one must win by of a key's own time, for that: then at most a quarter is tried
OWN_SHARE = 0.5  # of a time, that is the candidate's own for sure; of less, others learn nothing
CHANCE, CHANCE_OF_MANY = 0.05, 0.01  # that any untried one does so, below which the search ends
AT_LEAST = 3  # candidates: the incumbent and two more
KEYS = 4  # other keys that have told times; with fewer, waves of candidates say what to expect
FEWEST = 12  # candidates: fewer are all tried, but for what the host hides
LIKELY = 3  # times as many as are tried may be tried: what is observed changes what is expected
EXPECTED_FROM = 24  # candidates: of so many, search="auto" tries a few by what launches let expect
MANY = 256  # candidates: of more, a few are tried whatever judges them
FIRST_WAVE, WAVE, MOST_COMPILED = 48, 24, 144  # of them: spread ones, then by what these let expect
FAILED = 2.0  # times the slowest of them
IDLE_WAVES = 3  # in a row that find nothing faster by more than GAIN: then no more are compiled
_NORMAL = statistics.NormalDist()
_MANY, _SHARE, _SHARE_OF_MANY = 100, 0.25, 0.07
_SHARE_UNTOLD, _SHARE_TOLD = 0.4, 0.15  # of 100 and more: of a kernel's first key, with one to three others


def most_tried(candidates: int) -> int:
    """Return how many candidates are tried at most: a quarter, of a hundred and more 7 %."""
    share = _SHARE if candidates < _MANY else _SHARE_OF_MANY
    return min(max(AT_LEAST, int(share * candidates)), candidates)


def best_start(key: str, texts: Collection[str], told: TimesByKey, fills: Fills = UNKNOWN) -> str:
    """Return the text of the candidate that is expected to be the fastest at an untuned key; "": unknown.

    Unknown: fewer than KEYS other keys have told times of these candidates. The order of `texts` is nothing.
    """
    ordered = sorted(texts)
    if len(told) < KEYS or (expectation := Expectation(key, ordered, told, fills)).keys < KEYS:
        return ""
    return ordered[min(expectation.told, key=lambda index: (expectation.means[index], index))]


@dataclass(frozen=True)
class Meanwhile:
    """What the session knows by now."""

    told: TimesByKey = field(default_factory=dict)  # by the kernel's keys, this one too
    part: float = 1.0  # of a run, that this key takes


class TrialOrder:
    """Which candidate to try next, one after another; the first ones are given.

    first: the incumbent. After each trial call `tell`.
    likely: the candidates that may be tried, those expected to be the fastest; others need not be compiled.
    most: how many are tried at most.
    """

    def __init__(self, expectation: Expectation | GaussianProcess, first: int) -> None:
        self.expectation = expectation
        means = expectation.means
        self.most = most_tried(len(means))
        ordered = sorted(range(len(means)), key=lambda index: (means[index], index))
        self.likely = frozenset({first, *ordered[: min(LIKELY * self.most, MOST_COMPILED)]})
        self.tried: list[int] = []
        self.ms: dict[int, float] = {}  # of those tried that have a time; the least of it may be 0
        self.is_hidden = False  # nothing untried can be seen to win, whatever it takes
        self.promise = 1.0  # the chance that some untried one wins
        self._failed: set[int] = set()
        self._first, self._gain = first, GAIN

    def next(self) -> int | None:
        """Return the candidate of the greatest chance to win; None: no untried one is worth a trial."""
        if not (self.tried or self._first in self._failed):
            return self._first
        if len(self.tried) >= self.most:
            return None
        ordered, none_wins = self._promising(self.likely)
        if not ordered or (len(self.tried) >= AT_LEAST and 1 - none_wins < CHANCE):
            return None
        return ordered[0]

    def widen(self) -> bool:
        """Let more candidates be tried, after all that `next` has given; return whether there are any."""
        return False

    def tell(self, index: int, ms: float) -> None:
        """Record the time of a candidate that was tried; nan: it has none; inf: it was banned."""
        if ms == math.inf:
            self._failed.add(index)
            return
        self.tried.append(index)
        if ms > 0:
            self.ms[index] = ms
        if least(ms) > 0:  # else all of it may be the host's
            self._observe(index, least(ms))

    def _observe(self, index: int, ms: float) -> None:
        assert isinstance(self.expectation, Expectation)
        self.expectation.observe(index, ms)

    def untried_text(self) -> str:
        """Return what was not tried, and why; "": nothing."""
        out, means = {*self.tried, *self._failed}, self.expectation.means
        left = [mean for index, mean in enumerate(means) if index not in out]
        if not (left and self.ms):
            return ""
        percent = int(100 * (math.exp(min(left) - self._log_of_best) - 1))
        why = f"the rest was expected at least {percent} % slower"
        if self._gain > GAIN:
            why = f"the rest was not expected to gain {100 * GAIN_OF_RUN:g} % of a run"
        elif self.is_hidden:
            why = "what the rest may gain, the host's part of these launches hides"
        elif percent < 1:
            why = "more is not allowed, though some of the rest may be faster"
        return f"tried {len(means) - len(left)} of {len(means)}; {why}"

    @property
    def _log_of_best(self) -> float:
        """Return the logarithm of the least ms that is known of any tried one; inf: of none."""
        known = [ms for ms in map(least, self.ms.values()) if ms > 0]
        return math.log(min(known)) if known else math.inf

    @property
    def leaves_first(self) -> bool:
        """Return whether none of those tried can be seen to beat the first one either."""
        if not self.is_hidden or self._first not in self.ms:
            return False
        bar_ms = least(self.ms[self._first]) * (1 - GAIN) - min(ms - least(ms) for ms in self.ms.values())
        return all(least(ms) >= bar_ms for ms in self.ms.values())

    def _bar_ms(self) -> float:
        """Return what an untried candidate must take less than to be seen to win; none can below 0.

        The first one counts without the host's part. Where most times hold one, so would that of another.
        """
        host_ms = statistics.median_low(ms - least(ms) for ms in self.ms.values()) if self.ms else 0.0
        best_ms = min(map(float, self.ms.values()), default=math.inf)
        if self._first in self.ms:
            best_ms = min(best_ms, least(self.ms[self._first]))
        return best_ms * (1 - self._gain) - host_ms

    def _promising(self, among: Collection[int]) -> tuple[list[int], float]:
        """Return the untried candidates, the likeliest winner first, and the chance that none wins."""
        bar_ms = self._bar_ms()
        self.is_hidden = bar_ms <= 0
        chances, means = dict(self._chances(among, bar_ms)), self.expectation.means
        none_wins = 1.0
        for chance in chances.values():
            none_wins *= 1 - chance
        self.promise = 1 - none_wins
        return sorted(chances, key=lambda index: (-chances[index], means[index], index)), none_wins

    def _chances(self, among: Collection[int], bar_ms: float) -> Iterator[tuple[int, float]]:
        """Yield the untried candidates, each with its chance to be below the bar."""
        means, variances = self.expectation.means, self.expectation.variances
        for index in sorted({*among}.difference(self.tried, self._failed)):
            if bar_ms == math.inf:  # nothing is known yet
                yield index, _NORMAL.cdf(-means[index])
            elif bar_ms <= 0:
                yield index, 0.0
            else:
                z = (math.log(bar_ms) - means[index]) / math.sqrt(max(variances[index], 1e-8))
                yield index, _NORMAL.cdf(z)


class Waves(TrialOrder):
    """The order of candidates of which other keys told too little before the first trial.

    The first wave is spread over all, or what the few told keys expect to be the fastest; its times, and
    those of the kernel's keys that are tried meanwhile, let expect which to try next, and so on.

    meanwhile: returns what the session knows by now.
    """

    def __init__(
        self,
        key: str,
        texts: Sequence[str],
        told: TimesByKey,
        meanwhile: Callable[[], Meanwhile] = Meanwhile,
        fills: Fills = UNKNOWN,
    ) -> None:
        self._told, self._key, self._texts, self._meanwhile = told, key, texts, meanwhile
        self._fills = fills
        of_own = [fills.get(text, 1.0) for text in texts]
        self._process = GaussianProcess(Likeness.of_texts(texts), fills=of_own)
        kin = kin_of(key, texts, told, fills=bool(fills))
        self._process.fit({}, kin)
        super().__init__(self._process, first=0)
        self._best_of_waves: list[float] = []
        self.most, first, self._wave_size = _sizes(len(texts), is_told=bool(kin))
        # Keys met in the same run try different ones, where nothing is told.
        means = [round(mean, 9) for mean in self.expectation.means]
        others = sorted(range(1, len(texts)), key=lambda index: (means[index], digest(key + texts[index])))
        self._spread = [0, *others]
        self._wave = self._spread[:first]
        self.likely = frozenset(self._wave)

    def next(self) -> int | None:
        out = {*self.tried, *self._failed}
        return next((index for index in self._wave if index not in out), None)

    def _observe(self, index: int, ms: float) -> None:
        """`widen` takes all times in at once."""

    def widen(self) -> bool:
        if len(self.likely) >= min(self.most, len(self._texts)) or self._is_idle():
            return False
        # A time that is mostly the host's says little of the candidate.
        own = {index: least(ms) for index, ms in self.ms.items() if least(ms) >= OWN_SHARE * ms}
        # What fails counts as slow: so do its fields, and the next wave has fewer that do not fit the device.
        failed = dict.fromkeys(sorted(self._failed), FAILED * max(own.values(), default=1.0))
        times = {**own, **failed} if own else {}
        meanwhile = self._meanwhile()
        self._gain = max(GAIN, GAIN_OF_RUN / max(meanwhile.part, GAIN_OF_RUN))
        told = {**self._told, **meanwhile.told}
        self._process.fit(times, kin_of(self._key, self._texts, told, fills=bool(self._fills)))
        ordered, none_wins = self._promising(range(len(self._texts)))
        self.is_hidden |= bool(self.ms) and not own
        if self.ms and len(self.tried) >= AT_LEAST and self._cannot_pay(1 - none_wins):
            return False
        if self._gain > OF_SMALL and len(self.tried) >= most_tried(len(self._texts)):
            return False
        ordered = [index for index in (ordered if own else self._spread) if index not in self.likely]
        self._wave = ordered[: min(self._wave_size, self.most - len(self.likely))]
        self.likely |= {*self._wave}
        return bool(self._wave)

    def _cannot_pay(self, chance: float) -> bool:
        """Return whether no untried one is worth a trial, by the chance that some wins."""
        if self.is_hidden or len(self._texts) > MANY:
            return self.is_hidden  # of so many, chances that follow from one key are too sure of themselves
        has_exact = any(ms == least(ms) for ms in self.ms.values())  # without a part of the host's
        tries_all = len(self._texts) < FEWEST and has_exact and self._gain == GAIN
        return chance < (CHANCE if len(self._texts) < _MANY else CHANCE_OF_MANY) and not tries_all

    def _is_idle(self) -> bool:
        """Return whether the last waves of many candidates have found nothing faster."""
        self._best_of_waves.append(self._log_of_best)
        earlier = self._best_of_waves[:-IDLE_WAVES]
        is_many = len(self._texts) > MANY
        return is_many and bool(earlier) and earlier[-1] - self._best_of_waves[-1] < GAIN


def _sizes(candidates: int, *, is_told: bool) -> tuple[int, int, int]:
    """Return how many of so many candidates are tried at most, in the first wave, and in each further one."""
    if candidates > MANY:
        return MOST_COMPILED, FIRST_WAVE, WAVE
    if candidates >= _MANY:
        share, first = (_SHARE_TOLD, AT_LEAST) if is_told else (_SHARE_UNTOLD, candidates // 8)
        return int(share * candidates), first, candidates // 16
    if candidates < FEWEST:
        return candidates, AT_LEAST, candidates
    return candidates, AT_LEAST, max(2, candidates // 8)
