"""What a run is for. No torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .context_search import Context
from .plan_trial import PlanTrial


@dataclass(frozen=True)
class Purpose:
    """What a run is for; several contexts may be at different points of their searches."""

    tries: bool  # a candidate, the incumbent among them, or a plan
    waits: bool  # for the sample of an earlier run

    @staticmethod
    def of(unsettled: Iterable[Context], plan: PlanTrial | None) -> Purpose:
        """Return what the next run is for, or the one under way. `plan`: what is judged as a whole."""
        if plan is not None:
            return Purpose(not plan.waiting, plan.waiting)
        contexts = list(unsettled)
        return Purpose(
            tries=any(context.is_on_trial for context in contexts),
            waits=any(context.waiting for context in contexts),
        )
