"""Spreads the trials of an online session over its steps, and counts the cost of tuning.

The time of a step with a trial or compilers beyond the nearest steps without counts as spent, and so do each
exchange and the additional time of a reported step. A host that is fast and slow in turns adds nothing. Each
step may spend `overhead` of its time without tuning. When more is spent, the next steps hold no trial and
mostly no exchange, and compilers pause if they alone spend more. At the beginning more may be spent, so that
most of the session runs with a fast config. It is paid back, at the latest after the last trial, together
with the time that the first configs took beyond the winners, once steps have been compared.
"""

from __future__ import annotations

import enum
import math
import statistics

from msgspec import Struct

from ...formatting import counted, format_s

LENT_STEPS = 64  # their overhead may be spent before they are made
KNOWN = 8  # steps without new keys, of which the shortest is one of the program's
NEAR = 3  # the last steps without tuning, whose median is what one takes by now; at first in a row
MOST_BUSY = 8  # steps with a trial or exchange, or twice as many beside compilers, before one tells the rest
MOST_UNTOLD = 64  # steps in a row with none without tuning, of which a later one would tell nothing any more
MARGIN = 0.9  # of the overhead is used: what a step without tuning takes is known to some per cent
REFILLED = 0.75  # of what is lent: trials begin again when no more is spent
MOST_APART = 16  # steps from one exchange to the next, at most
WAITS_APART = 7  # the same while compilers are waited for
MOST_HELD = 32  # steps in a row without a trial, where even those take longer than the overhead allows
MOST_REPAID = 2000  # steps after the last trial, likewise
# Times a step without tuning, at most, that one counts: what takes longer is the program's, as a checkpoint.
LONGEST, LONGEST_QUIET = 5.0, 1.5


class StepKind(enum.Enum):
    """The tuner's work in a step, beside the program's: the first of these that it held."""

    NEW = enum.auto()  # first launches of a key, which are compiled in any case
    TRIAL = enum.auto()
    COMPILING = enum.auto()  # compilers ran beside it
    QUIET = enum.auto()


class Cost(Struct, frozen=True):
    """Seconds that a session has cost the program, and the steps over which they are spread."""

    trials_s: float = 0.0
    compiling_s: float = 0.0  # beside steps
    exchanges_s: float = 0.0  # without waiting for slower ranks; and what steps take longer that are reported
    steps: int = 0

    @property
    def total_s(self) -> float:
        return self.trials_s + self.compiling_s + self.exchanges_s

    def __str__(self) -> str:
        parts = (
            f"{format_s(self.trials_s)} trials, {format_s(self.compiling_s)} compiling beside steps, "
            f"{format_s(self.exchanges_s)} exchanges"
        )
        return f"tuning took {format_s(self.total_s)} of {counted(self.steps, 'step')}: {parts}"


class Pace:
    """Decides on the deciding rank which steps hold trials. Without an `overhead` all may.

    free_s: seconds of a session before any trial is held back; a shorter one pays nothing back.
    """

    def __init__(self, overhead: float | None, free_s: float) -> None:
        self._overhead, self._free_s = overhead, free_s
        self.open()

    def open(self) -> None:
        """Begin a session."""
        self._took_s = self._exchanges_s = 0.0  # of all steps
        self._made = self._old = 0  # steps; without new keys
        self._beyond_s = dict.fromkeys(StepKind, 0.0)  # what steps took beyond those without tuning near them
        self._own_s = self._beside_s = 0.0  # what these steps, and those beside compilers, take without
        self._since_quiet: list[tuple[StepKind, float]] = []  # steps since the last one without tuning
        self._quiet_s: list[float] = []  # the last steps without tuning
        self.saved_s = self._all_saved_s = 0.0  # of the device, by what was found so far: in a step, in all
        self._slower_s = 0.0  # what steps took with the first configs beyond the winners
        self._held = self._repaid = 0  # steps in a row
        self._shortest_s = math.inf  # of steps without new keys
        self._is_refilling = False
        self.holds = self.pauses = False  # the next step is to hold no trial; no compilers run beside it

    def record(self, kind: StepKind, took_s: float, exchange_s: float = 0.0, steps: int = 0) -> None:
        """Record a step and the exchange that came with it, or `steps` without any that took so long each.

        The latter measure steps without tuning: a reported step launches the slow way.
        """
        is_apart, steps = steps > 0, max(steps, 1)
        self._made += steps
        self._took_s += steps * took_s + exchange_s
        self._all_saved_s += steps * self.saved_s
        if kind is not StepKind.NEW:
            self._old += steps
            self._shortest_s = min(self._shortest_s, took_s)
            self._exchanges_s += exchange_s  # that of the opening is none of a step
        if kind is StepKind.QUIET and is_apart:
            self._record_quiet(took_s, steps)
        else:
            self._since_quiet += [(kind, took_s)] * steps
            if len(self._since_quiet) >= MOST_UNTOLD:
                self._quiet_s = self._quiet_s or [self.step_s]
                self._settle(self._quiet_s[-1])
        is_held = self.holds or kind not in (StepKind.TRIAL, StepKind.COMPILING)
        self._held = self._held + steps if is_held else 0
        if self._overhead is not None:
            self._decide(self._overhead, kind)

    def _record_quiet(self, took_s: float, steps: int) -> None:
        """Record steps without tuning: with the one before, they tell the cost of the steps between."""
        before_s = self._quiet_s[-1] if self._quiet_s else took_s
        self._quiet_s = [*self._quiet_s, *[took_s] * min(steps, NEAR)][-NEAR:]
        near_s = min(statistics.fmean((before_s, took_s)), LONGEST_QUIET * self.step_s)
        self._own_s += near_s * steps
        self._settle(near_s)

    def _settle(self, near_s: float) -> None:
        """Count the cost of the last steps, given the time of one without tuning."""
        for kind, spent_s in self._beyond(near_s).items():
            self._beyond_s[kind] += spent_s
        self._beside_s += near_s * sum(kind is StepKind.COMPILING for kind, _ in self._since_quiet)
        self._own_s += near_s * len(self._since_quiet)
        self._since_quiet.clear()

    def _beyond(self, near_s: float) -> dict[StepKind, float]:
        """Return the cost of the last steps by kind, given the time of one without tuning."""
        spent_s = dict.fromkeys(StepKind, 0.0)
        for kind, own_s in self._since_quiet:
            beyond_s = min(own_s, LONGEST * near_s) - near_s
            # A session opens within its first step, of which only the rest is told.
            spent_s[kind] += max(beyond_s, 0.0) if kind is StepKind.NEW else beyond_s
        return spent_s

    def _decide(self, overhead: float, kind: StepKind) -> None:
        """Decide whether the next step holds a trial, and whether compilers run beside it."""
        self.holds = self.pauses = False
        if self._held >= MOST_HELD:
            return
        lent_s = overhead * LENT_STEPS * self.step_s
        self._is_refilling = self._owed_s > lent_s * (REFILLED if self._is_refilling else 1)
        busy = sum(0.5 if kind is StepKind.COMPILING else 1.0 for kind, _ in self._since_quiet)
        looks = busy >= (MOST_BUSY if self._quiet_s else 0.5)
        # While no candidate is compiled, one look more costs no trial.
        looks = looks and (self.is_felt or kind is StepKind.COMPILING)
        is_refilling = self.is_felt and self._is_refilling
        self.holds = looks or is_refilling
        slows = self._beyond_s[StepKind.COMPILING] > MARGIN * overhead * self._beside_s
        self.pauses = looks or (is_refilling and slows)

    @property
    def is_felt(self) -> bool:
        """Return whether the session lasts so long that a program may feel it."""
        return self._overhead is not None and self._took_s >= self._free_s

    def shares_of(self, launches: int, device_ms: tuple[float, float]) -> tuple[float, float | None]:
        """Return the least and the most share of a step that so many launches take, of so many ms each.

        The most is None until some steps have told what one takes.
        """
        (least_ms, most_ms), step_ms, shortest_ms = device_ms, 1e3 * self.step_s, 1e3 * self.shortest_s
        part = min(launches * least_ms / step_ms, 1.0) if step_ms else 1.0
        return part, launches * most_ms / shortest_ms if shortest_ms else None

    @property
    def steps_apart(self) -> int:
        """Return how many steps are to be made before the next exchange, if they hold no trial."""
        if self._overhead is None or not self.step_s:
            return 0
        if not (self.holds or self._repaid):
            return WAITS_APART
        lent_s = 0.0 if self._repaid else self._overhead * LENT_STEPS * self.step_s * REFILLED
        left = (self._owed_s - lent_s) / (self._overhead * self.step_s)
        least = NEAR if len(self._quiet_s) < NEAR else 1
        return min(max(math.ceil(left) - 1, least), MOST_APART - 1)

    @property
    def cost(self) -> Cost:
        """Return the cost of the session so far."""
        last_s = self._beyond(self.step_s)
        spent_s = {kind: max(0.0, beyond_s + last_s[kind]) for kind, beyond_s in self._beyond_s.items()}
        exchanges_s = self._exchanges_s + spent_s[StepKind.QUIET]
        return Cost(spent_s[StepKind.TRIAL], spent_s[StepKind.COMPILING], exchanges_s, self._made)

    def count_gain(self, gain_s: float) -> None:
        """Count the cost of steps with the first configs: each so much longer than one with the winners."""
        if self.saved_s:
            self._slower_s = gain_s * max(0.0, self._made - self._all_saved_s / self.saved_s)

    def pays_back(self) -> bool:
        """Return whether another step is to be made, as too much was spent by the last trial; count it."""
        owes = self.is_felt and self._repaid < MOST_REPAID
        owes = owes and (len(self._since_quiet) > 1 or self._owed_s > 0)
        self._repaid += owes * (1 + self.steps_apart)
        return owes

    @property
    def _owed_s(self) -> float:
        """Return the seconds of tuning beyond the share that `overhead` allows."""
        assert self._overhead is not None
        spent_s = sum(self._beyond_s.values()) + sum(self._beyond(self.step_s).values())
        own_s = self._own_s + len(self._since_quiet) * self.step_s
        return spent_s + self._exchanges_s + self._slower_s - MARGIN * self._overhead * own_s

    @property
    def step_s(self) -> float:
        """Return the s of a recent step without tuning, of any step until one is known; 0.0: none yet."""
        old_s = [own_s for kind, own_s in self._since_quiet if kind is not StepKind.NEW]
        return statistics.median(self._quiet_s or old_s or [0.0])

    @property
    def shortest_s(self) -> float:
        """Return the s of the shortest step; 0.0: too few are known, and the first ones may compile."""
        return self._shortest_s if self._old >= KNOWN else 0.0
