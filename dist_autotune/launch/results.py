"""Writes the results of searches to `Autotuner.cache` and to disk."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner

from ..ranks.group import RankGroup
from ..search.orders import ContextOrder
from ..storage.known_results import KnownResults, Origin, holds_other_result, mark_origin
from ..storage.winners import BEST, Entry, Evidence
from ..triton_api import identity, stock_results
from ..triton_api.launch import Key
from ..version import __version__
from .rank_context import Binding, RankContext
from .tunable import CHOICES


def mark_provisional(tuner: Autotuner, key: Key) -> None:
    """Mark a config in `Autotuner.cache` that nobody has timed: sessions tune its key."""
    mark_origin(tuner, key, Origin(RankGroup(), "", provisional=True))


class Results:
    """Publishes the results of one tuned function on one group of ranks."""

    def __init__(self, known: KnownResults) -> None:
        self._known, self._function = known, known.function

    def publish(self, context: ContextOrder, rank_context: RankContext, seconds: float) -> None:
        """Write a result to `Autotuner.cache` and, if a search found it, to disk. seconds: the session's."""
        rank_context.is_published = True
        known, function, about = self._known, self._function, rank_context.identity
        index, times = context.incumbent, context.times.ms
        winner = context.digests[index]
        if about.is_choice:
            ranks = function.group.ranks if about.is_joint else ()
            name, replaces = context.kernel, not function.is_replayed
            CHOICES.remember(name, about.key_text, winner, ranks, among=about.texts, replaces=replaces)
            if not context.provisional:
                known.remember_choice(about, winner)
        self._to_memory(context, rank_context.bindings, seconds, is_cached=context.status == "cached")
        if len(context.digests) == 1:
            return
        key = known.entry_key(about)
        if context.status == "tuned" and index in times:
            entry = Entry(
                key=key,
                winner=winner,
                config=context.texts[index],
                ms=times[index],
                timings={context.texts[i]: ms for i, ms in times.items() if 0 < ms < math.inf},
                fills=context.definition.fills,
                created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                package_version=__version__,
                evidence=_evidence(context, rank_context),
            )
            if known.stores or context.result.ranks < len(function.group.ranks):
                known.disk.put(entry)
        if context.status in ("tuned", "cached") and not (context.provisional or function.is_alone):
            known.disk.record_launch(known.folder, key)

    def add_late(self, context: ContextOrder, binding: Binding) -> None:
        """Write a result to an Autotuner that is launched behind the search for the first time."""
        if not (context.result.is_final and context.result.is_lasting):
            return
        if (tuner := binding.tuner()) is not None and binding.key not in tuner.cache:
            self._to_memory(context, [binding], 0.0, is_cached=True)

    def _to_memory(
        self, context: ContextOrder, bindings: Iterable[Binding], seconds: float, *, is_cached: bool
    ) -> None:
        known = {**context.times.ms, **dict.fromkeys(context.banned, math.inf)}
        by_digest = {context.digests[index]: ms for index, ms in known.items()}
        winner, function = context.digests[context.incumbent], self._function
        for binding in bindings:
            tuner, config = binding.tuner(), binding.configs.get(winner)
            if tuner is None or config is None or len(tuner.configs) == 1:
                continue
            standing = tuner.cache.get(binding.key) if is_cached else None
            if standing is not None and identity.config_digest(standing) == winner:
                continue  # and so does all that belongs to it
            if function.is_replayed and holds_other_result(tuner, binding.key, function.scope):
                continue  # that of eager calls stays
            configs = binding.configs.items()
            by_config = [(own, by_digest[digest]) for digest, own in configs if digest in by_digest]
            stock_results.publish(tuner, binding.key, config, by_config, seconds)
            origin = Origin(function.group.shared, function.scope, context.provisional)
            mark_origin(tuner, binding.key, origin)
            if not context.provisional:
                stock_results.announce(tuner, binding.key, cache_hit=is_cached)


def _evidence(context: ContextOrder, rank_context: RankContext) -> Evidence:
    """Return the evidence for a context's winner."""
    winner, about = context.digests[context.incumbent], rank_context.identity
    arguments = tuple(zip(about.key_names, about.key, strict=False))
    about_triton: dict[str, Any] = {}
    for binding in rank_context.bindings:
        tuner = binding.tuner()
        if tuner is not None and winner in binding.configs:
            about_triton = {
                "config": stock_results.arguments_of(binding.configs[winner]),
                "triton_file": stock_results.result_file(tuner, binding.key, binding.configs),
            }
            break
    known = context.times.known(context.banned)
    others = sorted((ms, index) for index, ms in known if index != context.incumbent)
    best = [context.incumbent, *(index for _, index in others)][:BEST]
    return Evidence(
        torch_version=str(torch.__version__),
        fastest_rank_ms={context.texts[i]: ms for i, ms in context.times.fastest_ms.items()},
        arguments=arguments if stock_results.is_plain(arguments) else (),
        full_name=about.source.full_name,
        best=tuple(context.digests[index] for index in best),
        **about_triton,
    )
