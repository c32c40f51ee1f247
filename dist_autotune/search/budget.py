"""How much of an online session's time goes to trials; by agreed times, so that all ranks decide alike."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

_USUAL_STEPS = 31  # of the last ones, to know what a step without a trial takes


@dataclass
class Pace:
    """Bounds the share of time that trials take.

    A trial is charged the whole step that launches it, not what that takes longer than the incumbent's: from
    the exchange before it to the one after. Steps that pass until its sample is read launch the incumbent;
    they are charged what they take longer together than as many usual steps, as a slow candidate may be felt
    only then. Compiling counts neither as trial nor as time: it happens once, whatever the share.

    So what trials slow a program down by is less than `share` of its time, compiling aside, and at most one
    trial is made beyond it.
    """

    share: float = 1.0  # 1.0: no bound
    elapsed_s: float = 0.0  # of the session, at the last exchange
    counted_s: float = 0.0  # of that, not compiling
    _charged_s: float = 0.0
    _late_s: float = 0.0  # what the steps since the last trial took longer than usual
    _usual_s: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL_STEPS))
    _steps: int = 0

    @property
    def trials_s(self) -> float:
        """What trials are charged."""
        return self._charged_s + max(self._late_s, 0.0)

    def take(
        self, elapsed_s: float, *, was_trial: bool, waited: bool = False, compiling_s: float = 0.0
    ) -> bool:
        """Take in the time at the end of a run; return whether the next one must not be a trial.

        `waited`: for the sample of an earlier trial. `compiling_s`: what of this run's time was compiling.
        """
        lap_s = max(elapsed_s - self.elapsed_s, 0.0)
        step_s = max(lap_s - compiling_s, 0.0)
        self.elapsed_s += lap_s
        self.counted_s += step_s
        self._steps += 1
        if was_trial or not waited:
            self._charged_s, self._late_s = self.trials_s, 0.0
        if was_trial:
            self._charged_s += step_s
        elif waited:
            self._late_s += step_s - (statistics.median(self._usual_s) if self._usual_s else 0.0)
        elif self._steps > 1:  # a program's first step is none like the others
            self._usual_s.append(step_s)
        return self.share < 1.0 and self.trials_s > self.share * self.counted_s
