"""The search that tries a few candidates of a key: in which order, and when the untried ones cannot pay."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ...codec import digest
from ..strategies import (
    PAIR_FACTOR,
    Flow,
    Pause,
    Warmup,
    Winner,
    faster_of_two,
    least,
    racing_runs,
    rounds,
    within,
)
from .fields import UNKNOWN, Fills, TimesByKey
from .model import Expectation

GAIN = 0.01  # an untried candidate must win by more ...
SMALL = 0.01  # of an online run: a key that takes less is decided without a trial of another candidate
GAIN_OF_RUN = 0.003  # ... and by more of a run, where it is known what that takes
OF_SMALL = 0.2  # what one must win by of a key's own time, for that: then at most a quarter is tried
OWN_SHARE = 0.5  # of a time, that is the candidate's own for sure; of less, others learn nothing
CHANCE, CHANCE_OF_MANY = 0.05, 0.01  # that any untried one does so, below which the search ends
AT_LEAST = 3  # candidates: the incumbent and two more
FEWEST = 12  # candidates: fewer are all tried, but for what the host hides
KEYS = 4  # other keys that have told times: they are surer than one to three
EXPECTED_FROM = 24  # candidates: of so many, search="auto" tries a few by what launches let expect
MANY = 256  # candidates: of more, a few are tried whatever judges them
FIRST_WAVE, WAVE, MOST_COMPILED = 48, 24, 144  # of them, where no key tells
FAILED = 2.0  # times the slowest: what failed counts as
IDLE_WAVES = 3  # in a row that find nothing faster by more than GAIN: then no more are compiled
_MANY, _SHARE_UNTOLD = 100, 0.4  # of so many candidates and more, where no key tells
_SHARE, _SHARE_OF_MANY = 0.15, 0.07  # where one key has told; four, of a hundred candidates and more
_AT_LEAST_TOLD = 16  # candidates of these, or where four keys tell a quarter: 15 % of few lose too much
_SHARE_MEANWHILE = 0.6  # of fewer than a hundred, where other keys tell since the first trial
_SHARE_OF_SMALL = 0.25
MORE_RUNS = 24  # of the fastest and the first, where the noise may explain what lies between them
_WAVE_TOLD = 4  # of those after the first three
_WAVE_ONLINE = 4  # at least: steps go on while a wave is compiled, and each one takes as long as its slowest
_NORMAL = statistics.NormalDist()


def best_start(key: str, texts: Collection[str], told: TimesByKey, fills: Fills = UNKNOWN) -> str:
    """Return the text of the candidate that is expected to be the fastest at an untuned key; "": unknown.

    Unknown: fewer than KEYS other keys have told times of these candidates. The order of `texts` is nothing.
    """
    ordered = sorted(texts)
    expected = Expectation.of_key(key, ordered, told, fills) if len(told) >= KEYS else None
    if expected is None or expected.keys < KEYS:
        return ""
    return ordered[min(expected.told, key=lambda index: (expected.means[index], index))]


@dataclass(frozen=True)
class Meanwhile:
    """The state of the session that steers the order of trials."""

    told: TimesByKey = field(default_factory=dict)  # by the kernel's keys, this one too
    part: float = 1.0  # of a run, that this key takes for sure
    most: float | None = 1.0  # of a run, that this key may take; None: not known yet
    is_online: bool = False  # what it takes is known some steps after the first candidate's trial


class TrialOrder:
    """Which candidate of a key to try next: in waves, each chosen by the times so far.

    Call `tell` after each trial, and `widen` after a wave. The first candidate is the incumbent.

    told: times of other keys from before the session. meanwhile: returns the state of the session. fills:
    how much of the SMs' time launches at this key fill.
    likely: the candidates that may be tried by now; others need not be compiled. most: how many are tried.
    """

    def __init__(
        self,
        key: str,
        texts: Sequence[str],
        told: TimesByKey,
        meanwhile: Callable[[], Meanwhile] = Meanwhile,
        fills: Fills = UNKNOWN,
    ) -> None:
        self._key, self._texts, self._told = key, texts, told
        self._meanwhile, self._fills = meanwhile, fills
        self.tried: list[int] = []
        self.ms: dict[int, float] = {}  # of those tried that have a time; the least of it may be 0
        self.is_hidden = False  # nothing untried can be seen to win, whatever it takes
        self._failed: set[int] = set()
        self._gain = GAIN
        self._best_of_waves: list[float] = []
        known = meanwhile()
        self._expect(known)
        self.most, self._first_wave, self._wave_size = _sizes(
            len(texts), self.expectation.keys, is_online=known.is_online
        )
        self._small_part = 0.0  # of a run, that this key takes at most; 0.0: not small, or not known
        self._wave = list[int]()
        self.likely = frozenset[int]()
        self._waits = known.is_online and len(texts) <= MANY  # for what the key takes of a run
        self._choose(1 if self._waits else self._first_wave, after=[0])

    def next(self) -> int | None:
        """Return the next candidate of the wave; None: all have been tried."""
        out = {*self.tried, *self._failed}
        return next((index for index in self._wave if index not in out), None)

    def tell(self, index: int, ms: float) -> None:
        """Record the time of a candidate that was tried; nan: it has none; inf: it was banned."""
        if ms == math.inf:
            self._failed.add(index)
            return
        self.tried.append(index)
        if ms > 0:
            self.ms[index] = ms

    def widen(self) -> bool:
        """Let another wave be tried, after all that `next` has given; return whether one is to come."""
        meanwhile = self._meanwhile()
        if self._waits and meanwhile.most is None and self.ms:
            self._wave = []
            return True  # a run without a trial, until it is known
        if meanwhile.told.keys() - {self._key} and len(self._texts) >= FEWEST:
            self.most = min(self.most, max(FEWEST, int(_SHARE_MEANWHILE * len(self._texts))))
        if self.ms:  # else nothing is known of its part
            self._gain = max(GAIN, GAIN_OF_RUN / max(meanwhile.part, GAIN_OF_RUN))
        self._expect(meanwhile)
        if len(self.likely) >= self.most or self._is_idle():
            return False
        self.is_hidden = self._bar == -math.inf or bool(self.ms and not self._own_ms)
        if len(self.tried) >= AT_LEAST and self.ms and self._cannot_pay():
            return False
        most = meanwhile.most or 1.0
        self._small_part = most if most < SMALL and self.ms else 0.0
        if self._small_part:
            return False
        few = max(AT_LEAST, _SHARE_OF_SMALL * len(self._texts))
        if self._gain > OF_SMALL and len(self.tried) >= few:
            return False
        begun = len(self.likely)
        wave = self._wave_size if begun >= self._first_wave else self._first_wave - begun
        self._choose(min(wave, self.most - begun))
        return bool(self._wave)

    @property
    def untried(self) -> str:
        """Return which candidates were not tried, and why; "": none."""
        out, means = {*self.tried, *self._failed}, self.expectation.means
        left = [mean for index, mean in enumerate(means) if index not in out]
        if not (left and self.ms):
            return ""
        percent = int(100 * (math.exp(min(left) - self._log_of_best) - 1))
        why = f"the rest was expected at least {percent} % slower"
        if self._small_part:
            why = f"the key takes {100 * self._small_part:.1g} % of a run at most"
        elif self._gain > GAIN:
            why = f"the rest was not expected to gain {100 * GAIN_OF_RUN:g} % of a run"
        elif self.is_hidden:
            why = "what the rest may gain, the host's part of these launches hides"
        elif percent < 1:
            why = "more is not allowed, though some of the rest may be faster"
        return f"tried {len(means) - len(left)} of {len(means)}; {why}"

    @property
    def leaves_first(self) -> bool:
        """Return whether no tried candidate is known to beat the first one."""
        if not self.is_hidden or 0 not in self.ms:
            return False
        bar_ms = least(self.ms[0]) * (1 - GAIN) - min(ms - least(ms) for ms in self.ms.values())
        return all(least(ms) >= bar_ms for ms in self.ms.values())

    @property
    def _log_of_best(self) -> float:
        """Return the logarithm of the least ms that is known of any tried one; inf: of none."""
        known = [ms for ms in map(least, self.ms.values()) if ms > 0]
        return math.log(min(known)) if known else math.inf

    @property
    def _own_ms(self) -> dict[int, float]:
        """Return the times that are mostly the candidates' own; others say little of them."""
        return {index: least(ms) for index, ms in self.ms.items() if least(ms) >= OWN_SHARE * ms}

    @property
    def _bar(self) -> float:
        """Return the log ms below which an untried candidate is seen to win; -inf: none can be.

        The first one counts without the host's part if most times hold one: another's would hold it, too.
        """
        if not self.ms:
            return float(self.expectation.means[0]) + math.log(1 - self._gain)
        host_ms = statistics.median_low(ms - least(ms) for ms in self.ms.values())
        best_ms = min(map(float, self.ms.values()))
        if 0 in self.ms:
            best_ms = min(best_ms, least(self.ms[0]))
        bar_ms = best_ms * (1 - self._gain) - host_ms
        return math.log(bar_ms) if bar_ms > 0 else -math.inf

    def _expect(self, meanwhile: Meanwhile) -> None:
        """Expect times from all known ones. A failed candidate counts as slow, and so do its fields."""
        told = {**self._told, **{other: ms for other, ms in meanwhile.told.items() if other != self._key}}
        self.expectation = Expectation.of_key(self._key, self._texts, told, self._fills)
        if own_ms := self._own_ms:
            failed_ms = FAILED * max(own_ms.values())
            for index, ms in {**own_ms, **dict.fromkeys(sorted(self._failed), failed_ms)}.items():
                self.expectation.observe(index, ms)

    def _choose(self, count: int, after: Sequence[int] = ()) -> None:
        """Set the wave: `after`, then the likeliest winners, as if each before took its expected time."""
        self._wave, bar, expected = [*after], self._bar, self.expectation
        left = sorted(
            {*range(len(self._texts))}.difference(self.likely, self._failed, after), key=self._place
        )
        for place in range(min(count, len(left) + len(after))):
            if place >= len(after):
                deviations = self._deviations(bar)
                self._wave.append(max(left, key=deviations.__getitem__))
                left.remove(self._wave[-1])
            expected.observe(self._wave[place], math.exp(expected.means[self._wave[place]]))
        self.likely |= {*self._wave}

    def _place(self, index: int) -> str:
        """Order equally likely candidates so that keys met in the same run try different ones."""
        return digest(self._key + self._texts[index])

    def _deviations(self, bar: float) -> list[float]:
        """Return how many deviations below the bar each candidate is expected."""
        expected = self.expectation
        if bar == -math.inf:
            return [-mean for mean in expected.means.tolist()]
        return [
            round((bar - mean) / math.sqrt(max(variance, 1e-8)), 9)
            for mean, variance in zip(expected.means.tolist(), expected.variances.tolist(), strict=True)
        ]

    def _cannot_pay(self) -> bool:
        """Return whether no untried one is worth a trial, by the chance that some wins."""
        count = len(self._texts)
        if self.is_hidden or (count > MANY and not self.expectation.keys):
            return self.is_hidden  # of so many, chances that follow from one key are too sure of themselves
        if count < FEWEST and self._gain == GAIN and any(ms == least(ms) for ms in self.ms.values()):
            return False
        none_wins, out = 1.0, {*self.tried, *self._failed}
        for index, z in enumerate(self._deviations(self._bar)):
            none_wins *= 1.0 if index in out else 1 - _NORMAL.cdf(z)
        is_sure = count < _MANY or self.expectation.keys >= KEYS
        return 1 - none_wins < (CHANCE if is_sure else CHANCE_OF_MANY)

    def _is_idle(self) -> bool:
        """Return whether the last waves of many candidates have found nothing faster."""
        self._best_of_waves.append(self._log_of_best)
        earlier = self._best_of_waves[:-IDLE_WAVES]
        is_many = len(self._texts) > MANY and not self.expectation.keys
        return is_many and bool(earlier) and earlier[-1] - self._best_of_waves[-1] < GAIN


def expected(candidates: Sequence[int], *, n_warmup: int, n_repeat: int, order: TrialOrder) -> Flow:
    """Try candidates in their order, until the untried ones cannot pay; race those near the best.

    One warm-up run and two samples each, then rounds as in `racing`, with the same budget of runs for those
    that were tried. Before more than the first ones are tried, a `Pause`. It uses no `n_warmup`, `n_repeat`.
    """
    agreed_ms: dict[int, float] = {}
    made = 0
    while True:
        if (index := order.next()) is None:
            if not order.widen():
                break
            yield Pause()
            continue
        ms = yield Warmup(index)
        made += 1
        if ms != math.inf:
            one = yield index
            ms = faster_of_two(one, (yield index))
            made += 2
        agreed_ms[index] = ms
        order.tell(index, ms)
    if order.leaves_first:
        return Winner(candidates[0], {candidates[0]})
    alive = within(agreed_ms, order.tried or list(candidates[:1]), PAIR_FACTOR)
    runs_left = racing_runs(len(order.tried)) - made
    return (yield from rounds(alive, candidates[0], runs_left, MORE_RUNS))


def _sizes(candidates: int, keys: int, *, is_online: bool) -> tuple[int, int, int]:
    """Return how many of so many candidates are tried at most, in the first wave, and in each further one."""
    if candidates < FEWEST:
        return candidates, AT_LEAST, candidates
    wave = max(_WAVE_ONLINE if is_online else 2, candidates // 8)
    if keys:
        share = _SHARE_OF_MANY if candidates >= _MANY and keys >= KEYS else _SHARE
        fewest = min(_AT_LEAST_TOLD, max(AT_LEAST, candidates // 4) if keys >= KEYS else candidates)
        return max(int(share * candidates), fewest), AT_LEAST, min(wave, _WAVE_TOLD)
    if candidates > MANY:
        return MOST_COMPILED, FIRST_WAVE, WAVE
    if candidates >= _MANY:
        return int(_SHARE_UNTOLD * candidates), candidates // 8, candidates // 16
    return candidates, AT_LEAST, wave
