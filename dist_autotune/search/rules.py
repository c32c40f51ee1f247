"""The options that steer the search, and rules that follow from them alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from .expectation.order import AT_LEAST, EXPECTED_FROM, MANY, TrialOrder, expected
from .strategies import RunningFlow, Strategy, racing_runs, timing_default

BY_LAUNCH, BY_RUN = "launch", "run"  # the judge of a candidate


@dataclass(frozen=True)
class Rules:
    """The options that steer the search; equal on all ranks."""

    strategy: Strategy
    search: str
    n_warmup: int
    n_repeat: int
    objective: str = "kernel"
    mode: str = "replay"
    max_runs: int | None = None
    budget_s: float | None = None
    overhead: float | None = None  # of a step, that tuning may take online; None: no limit
    free_s: float = 0.0  # seconds of a session before that counts
    bits: str = "any"  # | "same" | "check": see `verify_bits`
    tries_all: bool = False  # search="racing", as the user has asked
    tunes: bool = True  # False: nothing is ever tried, incumbents only (DIST_AUTOTUNE_MODE=cached)

    @property
    def verifies(self) -> bool:
        """Return whether winners' outputs are compared with the first configs'."""
        return self.tunes and self.bits != "any"

    @property
    def races(self) -> bool:
        """Return whether contexts judged by whole runs are searched as plans; else they take turns."""
        return self.search in ("racing", "expected")

    def tries_few(self, candidates: int, *, is_choice: bool = False) -> bool:
        """Return whether a search of so many candidates tries a few, chosen by their expected times.

        Online that holds for any number: a key that takes little of a step is left as it is.
        """
        if self.tries_all or not self.races:
            return False
        by_launches = self.objective == "kernel" and not is_choice
        if by_launches and self.mode == "online":
            return True
        fewest = EXPECTED_FROM if by_launches else MANY + 1
        is_always = self.search == "expected" and self.objective == "kernel"
        return candidates > AT_LEAST and (is_always or candidates >= fewest)

    def flow_of(self, candidates: int, order: TrialOrder | None = None, default: int = 0) -> RunningFlow:
        """Return a search by the option's strategy; with an `order` one that tries a few.

        default: is launched untuned, so a winner's gain is measured against it.
        """
        strategy = self.strategy if order is None else functools.partial(expected, order=order)
        if self.races and self.objective == "kernel":
            strategy = functools.partial(timing_default, strategy=strategy, default=default)
        counts = {"n_warmup": self.n_warmup, "n_repeat": self.n_repeat}
        return RunningFlow(strategy, candidates, name=self.search, **counts)

    def planned_runs(self, candidates: int) -> int:
        """Return the runs that one search plans; a strategy of the user's counts as `exhaustive`."""
        if self.races:
            return math.ceil(racing_runs(candidates))
        return candidates * (self.n_warmup + self.n_repeat)

    def planned_asks(self, *, is_warmup: bool) -> int:
        """Return the planned warm-ups or samples of a candidate; 0: unknown."""
        if self.search != "exhaustive":
            return 0
        return self.n_warmup if is_warmup else self.n_repeat

    def judges(self, *, is_choice: bool) -> tuple[str, ...]:
        """Return the judges of a context, in order."""
        if is_choice:
            return (BY_RUN,)
        return (BY_LAUNCH,) if self.objective == "kernel" else (BY_LAUNCH, BY_RUN)
