"""What all tuners of a process have found."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .report import TunedContext, TuningReport

if TYPE_CHECKING:
    from .base_tuner import BaseTuner


@dataclass(frozen=True)
class Findings:
    """What one function, loop or program has found, and what stays untuned."""

    report: TuningReport
    untuned: tuple[tuple[str, Any, str], ...] = ()  # kernel, key, reason

    @property
    def name(self) -> str:
        return self.report.function

    @property
    def contexts(self) -> tuple[TunedContext, ...]:
        return *self.report.contexts, *self.report.earlier


class Tuners:
    """The tuners that have made a call since `watch`, those that are gone by now with what they had found."""

    def __init__(self) -> None:
        self._is_watched = False
        self._alive: weakref.WeakSet[BaseTuner] = weakref.WeakSet()
        self._ended: list[Findings] = []

    def watch(self) -> None:
        self._is_watched = True

    def add(self, tuner: BaseTuner) -> None:
        if self._is_watched:
            self._alive.add(tuner)

    def leave(self, tuner: BaseTuner) -> None:
        """Keep what a tuner has found that goes."""
        if self._is_watched:
            self._ended += findings_of(tuner)

    def findings(self) -> list[Findings]:
        found = [each for tuner in list(self._alive) for each in findings_of(tuner)]
        return [*self._ended, *found]


TUNERS = Tuners()


def findings_of(tuner: BaseTuner) -> Iterator[Findings]:
    """Yield what a tuner has found, if it has found something."""
    if (report := tuner.report) is not None:
        yield Findings(report, tuner.untuned)
