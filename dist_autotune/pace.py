"""How much of an online session's time goes to trials; by agreed times, so that all ranks decide alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Pace:
    """Bounds the share of time that trials take.

    The time of a trial is that from the exchange before it to the exchange that brought its sample: the
    whole step, not what it took longer than the incumbent, and with every step whose end it waited for. So
    what trials slow a program down by is less than `share`, and at most one trial is made beyond it.
    """

    share: float = 1.0  # 1.0: no bound
    elapsed_s: float = 0.0  # of the session, at the last exchange
    trials_s: float = 0.0  # of that, in trials

    def take(self, elapsed_s: float, *, was_trial: bool) -> bool:
        """Take in the time at the end of a run; return whether the next one must not be a trial."""
        step_s = max(elapsed_s - self.elapsed_s, 0.0)
        self.elapsed_s += step_s
        if was_trial:
            self.trials_s += step_s
        return self.share < 1.0 and self.trials_s > self.share * self.elapsed_s
