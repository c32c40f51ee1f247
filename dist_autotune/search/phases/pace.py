"""Spreads the trials of an online session over its steps: which may hold trials, and what tuning has cost.

A settled step takes as long as the last steps that tried and exchanged nothing. Every step may take
1 + `overhead` of that; what it took less is left for others. Where more is spent, the next steps hold no
trial, no compiler runs beside them, and most of them hold no exchange. At the beginning more may be spent, so
that most of the session runs with a fast config; it is paid back, at the latest behind the last trial.
"""

from __future__ import annotations

import enum
import math

from msgspec import Struct

from ...formatting import counted

STALE = 0.97  # of what steps without a trial took: a trial that takes less tells that they do by now
LENT_STEPS = 64  # their overhead may be spent before they are made
KNOWN = 8  # steps without new keys, of which the shortest is one of the program's
LOOK = 3  # steps at a time that tell what one without tuning takes
RECENT = 9  # of these steps without a trial that tell what a settled one takes; behind the last trial all do
MOST_BUSY = 12  # steps with a trial or compilers in a row; then some tell what those without take by now
MARGIN = 0.9  # of the overhead is used: what a settled step takes is known to some per cent
REFILLED = 0.75  # of what is lent: trials begin again when no more is spent
MOST_APART = 16  # steps from one exchange to the next, at most
MOST_HELD = 32  # steps in a row without a trial, where even those take longer than the overhead allows
MOST_REPAID = 600  # steps behind the last trial, likewise
# Times a settled step, at most, that one counts: what takes longer is the program's: a checkpoint, a pause.
LONGEST, LONGEST_QUIET = 5.0, 2.0


class StepKind(enum.Enum):
    """What a step of a session held beside the program's work."""

    NEW = enum.auto()  # first launches of a key, which are compiled in any case
    TRIAL = enum.auto()
    COMPILING = enum.auto()  # compilers ran beside it
    QUIET = enum.auto()

    @classmethod
    def of(cls, *, is_new: bool, is_trial: bool, is_compiling: bool) -> StepKind:
        """Return the kind of a step that held all this: the first of these counts."""
        of_others = cls.COMPILING if is_compiling else cls.QUIET
        return cls.NEW if is_new else cls.TRIAL if is_trial else of_others


class Cost(Struct, frozen=True):
    """Seconds that a session has cost the program, and the steps over which they are spread."""

    trials_s: float = 0.0
    compiling_s: float = 0.0  # beside steps
    exchanges_s: float = 0.0  # without waiting for slower ranks
    steps: int = 0

    @property
    def total_s(self) -> float:
        return self.trials_s + self.compiling_s + self.exchanges_s

    def __str__(self) -> str:
        parts = (
            f"trials {self.trials_s:.2g}, compiling beside {self.compiling_s:.2g}, "
            f"exchanges {self.exchanges_s:.2g}"
        )
        return f"tuning took {self.total_s:.2g} s of {counted(self.steps, 'step')}: {parts}"


class Pace:
    """Decides on the deciding rank which steps hold trials. Without an `overhead` all may.

    free_s: seconds of a session before any step is held back; a shorter one pays nothing back.
    """

    def __init__(self, overhead: float | None, free_s: float) -> None:
        self._overhead, self._free_s = overhead, free_s
        self.open()

    def open(self) -> None:
        """Begin a session."""
        self._seconds = dict.fromkeys(StepKind, 0.0)  # of all steps, without what is the program's
        self._steps = dict.fromkeys(StepKind, 0)
        self._exchanges_s, self._exchanged = 0.0, 0  # steps
        self._first_s: list[float] = []  # steps that launched new keys
        self._quiet_s: list[float] = []  # steps without a trial, with the configs that are launched by now
        self._busy = self._held = self._repaid = 0  # steps in a row
        self._shortest_s = math.inf  # of steps without new keys
        self._is_refilling = False
        self.holds = False  # the next step is to hold no trial, and no compilers run beside it

    def record(self, kind: StepKind, took_s: float, exchange_s: float) -> None:
        """Record a step, with the exchange before it."""
        if took_s - exchange_s < STALE * self.step_s:
            self._quiet_s.clear()  # a faster config has been found since
        if kind is StepKind.NEW:
            self._first_s.append(took_s)
        is_busy = kind in (StepKind.TRIAL, StepKind.COMPILING)
        self._busy, self._held = (self._busy + 1, 0) if is_busy else (0, self._held + 1)
        longest = LONGEST_QUIET if kind is StepKind.QUIET else LONGEST
        if kind is not StepKind.NEW:
            self._shortest_s = min(self._shortest_s, took_s - exchange_s)
            self._seconds[kind] += min(took_s, longest * (self.step_s or took_s))
        self._steps[kind] += 1
        self._exchanges_s += exchange_s * (kind is not StepKind.NEW)  # that of the opening is none of a step
        self._exchanged += kind is not StepKind.NEW
        self.holds = self._overhead is not None and self._is_to_hold(self._overhead)

    def record_apart(self, steps: int, took_s: float) -> None:
        """Record steps without trials and exchanges, of which each took so long."""
        self._quiet_s += [took_s] * steps
        self._seconds[StepKind.QUIET] += steps * min(took_s, LONGEST_QUIET * self.step_s)
        self._steps[StepKind.QUIET] += steps
        self._held += steps

    def _is_to_hold(self, overhead: float) -> bool:
        if self._held >= MOST_HELD or not self.is_felt:
            return False
        most = MOST_BUSY if self._quiet_s else 1
        lent_s = overhead * LENT_STEPS * self.step_s
        self._is_refilling = self._owed_s > lent_s * (REFILLED if self._is_refilling else 1)
        return self._is_refilling or self._busy >= most

    @property
    def is_felt(self) -> bool:
        """Return whether the session lasts so long that a program may feel it."""
        return self._overhead is not None and sum(self._seconds.values()) >= self._free_s

    def shares_of(self, launches: int, device_ms: tuple[float, float]) -> tuple[float, float | None]:
        """Return the least and the most of a step that so many launches take, of least and most ms each.

        The most is None until some steps have told what one takes.
        """
        (least_ms, most_ms), step_ms, shortest_ms = device_ms, 1e3 * self.step_s, 1e3 * self.shortest_s
        part = min(launches * least_ms / step_ms, 1.0) if step_ms else 1.0
        return part, launches * most_ms / shortest_ms if shortest_ms else None

    @property
    def steps_apart(self) -> int:
        """Return how many steps without a trial are to be made before the next exchange."""
        if self._overhead is None or not self.step_s or not (self.holds or self._repaid):
            return 0
        lent_s = 0.0 if self._repaid else self._overhead * LENT_STEPS * self.step_s * REFILLED
        left = (self._owed_s - lent_s) / (self._overhead * self.step_s)
        least = LOOK if len(self._quiet_s) < RECENT else 0
        return min(max(math.ceil(left) - 1, least), MOST_APART - 1)

    @property
    def cost(self) -> Cost:
        """Return what the session has cost so far."""
        step_s = self.step_s + self._exchanges_s / max(self._exchanged, 1)

        def beyond(kind: StepKind) -> float:
            return max(0.0, self._seconds[kind] - step_s * self._steps[kind])

        trials_s, compiling_s = beyond(StepKind.TRIAL), beyond(StepKind.COMPILING)
        return Cost(trials_s, compiling_s, self._exchanges_s, self._made)

    def pays_back(self) -> bool:
        """Return whether another step is to be made, as too much was spent by the last trial; count it."""
        if not self.is_felt or self._repaid >= MOST_REPAID:
            return False
        if not self._repaid:
            self._quiet_s.clear()
        owes = self._repaid < RECENT or self._owed_s > 0
        self._repaid += owes * (1 + self.steps_apart)
        return owes

    @property
    def _extra_s(self) -> float:
        """Return the seconds that steps have taken beyond those without tuning."""
        first_s = sum(min(each, LONGEST * self.step_s) for each in self._first_s)  # longer ones compiled
        return first_s + sum(self._seconds.values()) - self._made * self.step_s

    @property
    def _owed_s(self) -> float:
        """Return the seconds that steps have taken beyond what the overhead allows them."""
        assert self._overhead is not None
        return self._extra_s - MARGIN * self._overhead * self.step_s * self._made

    @property
    def step_s(self) -> float:
        """Return what a step without tuning takes by now, of all steps until that is known; 0.0: none yet."""
        if self._quiet_s:
            known_s = sorted(self._quiet_s if self._repaid else self._quiet_s[-RECENT:])
            return known_s[len(known_s) // 4]  # others slow steps down, and never speed them up
        steps = self._made - len(self._first_s)
        own_s = sum(self._seconds.values()) - self._exchanges_s
        return max(own_s, 0.0) / steps if steps else 0.0

    @property
    def shortest_s(self) -> float:
        """Return what the shortest step took; 0.0: too few are known, and the first ones may compile."""
        return self._shortest_s if self._made - len(self._first_s) >= KNOWN else 0.0

    @property
    def _made(self) -> int:
        return sum(self._steps.values())
