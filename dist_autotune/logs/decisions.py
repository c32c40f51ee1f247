"""The records of what was decided, made from the state of a search: for the log, and to check a log against.

All ranks decide alike, so what is here is the same on all of them.
"""

from __future__ import annotations

from typing import Any

from ..search.context_search import Context, Outcome
from ..search.messages import Part
from ..search.state import SearchState
from .records import Agreed, Banned, ContextAdmitted, ContextSettled


def plan_of(tuning: SearchState) -> dict[str, int]:
    """Return what the next run tries: context -> index of the candidate on trial."""
    return {context.name: context.planned for context in tuning.contexts.unsettled if context.is_on_trial}


def admission(run: int, context: Context, *, local: bool = True) -> ContextAdmitted:
    return ContextAdmitted(
        **_about(run, context), candidates=context.texts, incumbent=context.incumbent, local=local
    )


def agreed(run: int, context: Context, outcome: Outcome) -> Agreed:
    """Return what the ranks agreed of the candidate on trial; `outcome.index` is not None."""
    index = outcome.index
    assert index is not None
    is_sample = outcome.kind == "sample"
    return Agreed(
        **_about(run, context),
        config_id=index,
        config=context.texts[index],
        ms=context.times.ms.get(index) if is_sample else None,
        fastest_rank_ms=context.times.fastest_ms.get(index) if is_sample else None,
        gap_ms=context.times.gap_ms.get(index, 0.0) if is_sample else 0.0,
        counted=outcome.kind != "incumbent",
    )


def bans(run: int, context: Context, part: Part) -> list[Banned]:
    """Return the bans of this context that ranks told of in one run."""
    found = []
    for digest, (by_rank, reason) in part.bans.items():
        if digest in context.digests:
            index = context.digests.index(digest)
            ban = Banned(
                **_about(run, context),
                config_id=index,
                config=context.texts[index],
                by_rank=by_rank,
                reason=reason,
            )
            found.append(ban)
    return found


def settled(run: int, context: Context) -> ContextSettled:
    """Return a context's result."""
    winner = context.incumbent
    return ContextSettled(
        **_about(run, context),
        status=context.status,
        config_id=winner,
        config=context.texts[winner],
        ms=context.times.ms.get(winner),
        timings={context.texts[index]: ms for index, ms in context.known_ms()},
        launch_bound=context.is_launch_bound,
    )


def _about(run: int, context: Context) -> dict[str, Any]:
    return {"run": run, "context": context.name, "kernel": context.kernel, "key": context.key}
