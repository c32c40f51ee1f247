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
    tries_rival: bool  # launches something else than the plan so far
    awaits_rival: bool  # an earlier run whose sample is still to come did
    holds: bool  # is no trial, to keep to the share of the time

    @staticmethod
    def of(unsettled: Iterable[Context], plan: PlanTrial | None, *, on_hold: bool) -> Purpose:
        """Return what the next run is for, or the one under way. `plan`: what is judged as a whole."""
        if plan is not None:
            tries, is_rival = not (plan.waiting or on_hold), plan.is_rival
            return Purpose(tries, plan.waiting, tries and is_rival, plan.waiting and is_rival, on_hold)
        contexts = list(unsettled)
        on_trial = [context for context in contexts if context.is_on_trial]
        waiting = [context for context in contexts if context.waiting]
        return Purpose(
            tries=bool(on_trial),
            waits=bool(waiting),
            tries_rival=any(context.tries_rival for context in on_trial),
            awaits_rival=any(context.tries_rival for context in waiting),
            holds=on_hold,
        )
