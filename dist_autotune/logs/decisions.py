"""Makes records of decisions from the orders of the deciding rank."""

from __future__ import annotations

from typing import Any

from ..search.orders import ContextOrder, Orders
from ..search.shared_context import Outcome
from .records import Agreed, Banned, ContextAdmitted, ContextSettled


def plan_of(orders: Orders) -> dict[str, int]:
    """Return the trials of the next run: context -> index of the candidate."""
    return {context.name: context.planned for context in orders.unsettled if context.is_on_trial}


def admission(run: int, context: ContextOrder, *, local: bool = True) -> ContextAdmitted:
    like, again = context.definition.nearest_key, context.result.again
    about = {"default": context.default, "like": like, "again": again}
    fields = {**fields_of(run, context), "candidates": context.texts, **about}
    return ContextAdmitted(**fields, incumbent=context.incumbent, local=local)


def agreed(run: int, context: ContextOrder, outcome: Outcome) -> Agreed:
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


def banned(run: int, context: ContextOrder, index: int) -> Banned:
    """Return a ban that ranks reported of one run, or that follows from their reports."""
    by_rank, reason = context.banned[index]
    return Banned(**fields_of(run, context, index), by_rank=by_rank, reason=reason)


def settled(run: int, context: ContextOrder, *, launches: int = 1) -> ContextSettled:
    """Return the result of a context. launches: of this rank in one run."""
    return ContextSettled(**fields_of(run, context, context.incumbent), **result(context), launches=launches)


def result(context: ContextOrder) -> dict[str, Any]:
    """Return the figures of a context's result so far, by the names that they have in logs and reports."""
    best = -1 if context.is_spent else context.incumbent
    is_open = not context.settled or context.provisional
    times, texts = context.times, context.texts
    bans = sorted(context.banned.items())
    return {
        "status": context.status.value or "tuning",
        "ms": times.ms.get(best),
        "fastest_rank_ms": times.fastest_ms.get(best),
        "default_ms": times.ms.get(context.default),  # of samples: its warm-up may hold first-launch costs
        "judge": context.judge if is_open else context.definition.final_judge,
        "launch_bound": best >= 0 and times.is_launch_bound(best, context.banned),
        "timings": {texts[index]: ms for index, ms in times.known(context.banned)},
        "banned": {texts[index]: f"rank {rank}: {reason}" for index, (rank, reason) in bans},
        "same_bits": context.result.same_bits,
        "again": context.result.again,
        "untried": context.result.untried,
        "not_fastest": context.result.not_fastest,
    }


def fields_of(run: int, context: ContextOrder, index: int | None = None) -> dict[str, Any]:
    """Return the fields that name run, context and, with `index`, the candidate."""
    fields = {"run": run, "context": context.name, "kernel": context.kernel, "key": context.key}
    return fields if index is None else {**fields, "config_id": index, "config": context.texts[index]}
