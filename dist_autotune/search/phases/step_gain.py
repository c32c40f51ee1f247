"""Whether tuning pays: steps with the first configs and with the winners, interleaved at a session's end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from msgspec import Struct

from ...formatting import format_ms
from ..context import Context
from ..plans.space import Plan
from ..reports import AgreedRun
from ..rules import Rules
from ..shared_context import Status
from .final_comparison import in_rounds
from .pace import Cost
from .phase import RunPhase

STEPS = 20  # of each side
MOST_RUNS = 10 * 2 * STEPS  # where runs do not launch what is planned, the comparison ends without a result
ERRORS = 2.0  # standard errors of the median difference: less is none
MEDIAN_ERROR = 1.2533  # times that of a mean
QUARTILES = 1.349  # standard deviations between the quartiles: a spike adds nothing


class StepGain(Struct, frozen=True):
    """Medians of interleaved steps: with the winners, and how much longer those with first configs take."""

    before_ms: float
    after_ms: float
    noise_ms: float  # a difference up to this is none
    steps: int = STEPS  # of each side

    @property
    def gain_ms(self) -> float:
        """Return the ms that a step gains; 0.0: nothing beyond the noise."""
        gain_ms = self.before_ms - self.after_ms
        return gain_ms if abs(gain_ms) > self.noise_ms else 0.0

    def text(self, cost_s: float) -> str:
        """Return the times, and the number of steps after which tuning pays off."""
        times = f"step {format_ms(self.before_ms)} -> {format_ms(self.after_ms)} ms"
        medians = f"{times} (medians of {self.steps} interleaved steps each)"
        if self.gain_ms > 0:
            return f"{medians}, pays off after {math.ceil(1e3 * cost_s / self.gain_ms):,} steps"
        if self.gain_ms < 0:
            return f"{medians}: slower than with the first configs"
        return f"{medians}: no gain beyond the noise of {format_ms(self.noise_ms)} ms"


def cost_and_gain(cost: Cost | None, gain: StepGain | None) -> list[str]:
    """Return lines on the cost of a session to the program and the gain of its steps, where known."""
    if cost is None:
        return []
    return [str(cost), *([] if gain is None else [gain.text(cost.total_s)])]


class StepComparison(RunPhase):
    """Compares the plan of first configs with the tuned one; decides nothing."""

    def __init__(self, contexts: Mapping[str, Context], rules: Rules) -> None:
        super().__init__(contexts, rules, "step|")
        self.is_over = True
        self.gain: StepGain | None = None  # None: not compared
        self._runs = 0

    def open(self) -> None:
        """Begin a session, in which nothing has been compared."""
        self.leave()
        self.gain = None

    def begin(self) -> None:
        """Compare the contexts that this session searched, if not all first configs won."""
        tuned = [c for c in self._contexts.values() if c.began is not None and c.status is Status.TUNED]
        differ = [context for context in tuned if context.default != context.incumbent]
        before: Plan = {context.name: context.default for context in differ}
        after: Plan = {context.name: context.incumbent for context in differ}
        self._ms, self._runs, self.gain, self.waiting = {}, 0, None, False
        if differ:
            self._begin(in_rounds({"before": before, "after": after}, STEPS, keeps_each=True))

    def record(self, report: AgreedRun, *, patience: int) -> None:
        super().record(report, patience=patience)
        self._runs += 1
        if self._runs == MOST_RUNS:
            self.leave()

    def _finish(self, plan: Plan) -> None:
        ms = {label: float(each) for label, (_, each) in self._ms.items()}
        pairs = [(ms.get(f"before {n}"), ms.get(f"after {n}")) for n in range(STEPS)]
        rounds = [(before, after) for before, after in pairs if before is not None and after is not None]
        if len(rounds) >= STEPS // 2:
            after_ms = statistics.median(after for _, after in rounds)
            longer_ms = [before - after for before, after in rounds]  # of one round: a host's speed changes
            before_ms = after_ms + statistics.median(longer_ms)
            self.gain = StepGain(before_ms, after_ms, ERRORS * _error_of_median(longer_ms), len(rounds))

    def leave(self) -> None:
        """End without a result."""
        self.is_over = True


def _error_of_median(ms: list[float]) -> float:
    low, _, high = statistics.quantiles(ms, n=4)
    return MEDIAN_ERROR * (high - low) / QUARTILES / math.sqrt(len(ms))
