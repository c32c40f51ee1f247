"""Makes records of decisions from the state of the search: for the log, and to verify a log."""

from __future__ import annotations

from typing import Any

from ..search.context import Context, Outcome, Status
from ..search.messages import Part
from ..search.state import SearchState
from .records import Agreed, Banned, ContextAdmitted, ContextSettled


def plan_of(search: SearchState) -> dict[str, int]:
    """Return the trials of the next run: context -> index of the candidate."""
    return {context.name: context.planned for context in search.unsettled if context.is_on_trial}


def admission(run: int, context: Context, *, local: bool = True) -> ContextAdmitted:
    about = {"default": context.default, "like": context.nearest_key, "again": again(context)}
    fields = {**fields_of(run, context), "candidates": context.texts, **about}
    return ContextAdmitted(**fields, incumbent=context.incumbent, local=local)


def agreed(run: int, context: Context, outcome: Outcome) -> Agreed:
    """Return the agreed time of the candidate on trial; `outcome.index` is not None."""
    index, times = outcome.index, context.times
    assert index is not None
    is_sample = outcome.kind == "sample"
    return Agreed(
        **fields_of(run, context, index),
        ms=times.ms.get(index) if is_sample else None,
        fastest_rank_ms=times.fastest_ms.get(index) if is_sample else None,
        gap_ms=times.gap_ms.get(index, 0.0) if is_sample else 0.0,
        counted=outcome.kind != "incumbent",
    )


def bans(run: int, context: Context, part: Part) -> list[Banned]:
    """Return the bans of this context that ranks reported of one run."""
    return [
        Banned(**fields_of(run, context, context.digests.index(digest)), by_rank=by_rank, reason=reason)
        for digest, (by_rank, reason) in part.bans.items()
        if digest in context.digests
    ]


def banned(run: int, context: Context, index: int) -> Banned:
    """Return a ban that follows from the merged reports."""
    by_rank, reason = context.banned[index]
    return Banned(**fields_of(run, context, index), by_rank=by_rank, reason=reason)


def settled(run: int, context: Context, *, launches: int = 1) -> ContextSettled:
    """Return the result of a context. launches: of this rank in one run."""
    return ContextSettled(**fields_of(run, context, context.incumbent), **result(context), launches=launches)


def result(context: Context) -> dict[str, Any]:
    """Return the figures of a context's result so far, by the names that they have in logs and reports."""
    best = -1 if context.is_spent else context.incumbent
    is_open = not context.settled or context.provisional
    times, texts = context.times, context.texts
    bans = sorted(context.banned.items())
    return {
        "status": context.status.value or "tuning",
        "ms": times.ms.get(best),
        "fastest_rank_ms": times.fastest_ms.get(best),
        "default_ms": context.default_ms,
        "judge": context.judge if is_open else context.final_judge,
        "launch_bound": best >= 0 and times.is_launch_bound(best, context.banned),
        "timings": {texts[index]: ms for index, ms in times.known(context.banned)},
        "banned": {texts[index]: f"rank {rank}: {reason}" for index, (rank, reason) in bans},
        "same_bits": context.same_bits,
        "again": again(context),
        "untried": context.untried,
    }


def again(context: Context) -> str:
    """Return which candidates are raced after an upgrade; empty: there was none."""
    if not context.upgrade or context.status is Status.CACHED:
        return ""
    raced = f"{context.raced} of {len(context.digests)} candidates, the best with {context.upgrade}"
    return f"{raced}; raced again after an upgrade"


def fields_of(run: int, context: Context, index: int | None = None) -> dict[str, Any]:
    """Return the fields that name run, context and, with `index`, the candidate."""
    fields = {"run": run, "context": context.name, "kernel": context.kernel, "key": context.key}
    return fields if index is None else {**fields, "config_id": index, "config": context.texts[index]}
