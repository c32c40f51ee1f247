"""How far a session has come and how long it may still take; from the state that all ranks hold alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..formatting import counted


@dataclass(frozen=True)
class RunsSpent:
    """What the runs of a session were for. The rest launched what is settled, or had nothing to try."""

    runs: int = 0
    trials: int = 0
    waits: int = 0  # online: until the device was done with a trial, and its time was read on all ranks

    def after(self, *, trial: bool, wait: bool) -> RunsSpent:
        """Return what they were for after one more."""
        if trial:
            return replace(self, runs=self.runs + 1, trials=self.trials + 1)
        if wait:
            return replace(self, runs=self.runs + 1, waits=self.waits + 1)
        return replace(self, runs=self.runs + 1)


@dataclass(frozen=True)
class Outlook:
    """What has been tried of what there is to try, and an estimate of the runs that are still to come."""

    timed: int  # candidates with a time, or banned, in all contexts
    candidates: int
    planned_trials: int  # at most, as the search plans
    spent: RunsSpent

    @property
    def more_runs(self) -> int:
        """About how many runs are still to come: as so far, and if the search takes all it plans."""
        spent = self.spent
        return math.ceil(max(self.planned_trials - spent.trials, 1) * spent.runs / max(spent.trials, 1))

    def __str__(self) -> str:
        spent = self.spent
        made = f"{self.timed} of {counted(self.candidates, 'candidate')} timed"
        trials = f"{spent.trials} of at most {counted(max(self.planned_trials, spent.trials), 'trial')}"
        of_runs = f" ({spent.waits} waited for the device)" if spent.waits else ""
        runs = f"in {counted(spent.runs, 'run')}{of_runs}"
        return f"{made}, {trials} {runs}; about {counted(self.more_runs, 'run')} to go"
