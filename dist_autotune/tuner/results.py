"""Results of searches: where they are found before one, and where they go after it."""

from __future__ import annotations

import datetime
import itertools
import math
import re
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import triton
from triton.runtime.autotuner import Autotuner

from ..codec import digest, to_json
from ..launch.rank_context import Claim, RankContext
from ..launch.rank_contexts import RankContexts
from ..launch.tunable import CHOICES
from ..ranks.group import RankGroup, SingleRank
from ..search.context_search import Context
from ..search.state import SearchState
from ..storage.device import Device
from ..storage.winners import Entry, EntryKey, Winners
from ..triton_api import autotuner_cache, identity, subclasses
from ..triton_api.launch import Key
from ..version import __version__
from .report import TunedContext

Offers: TypeAlias = dict[str, tuple[int, str, float]]
"""Digest of an entry's key -> (the rank that has it, winner, ms)."""


@dataclass(frozen=True)
class Mark:
    """Who wrote an entry of some `Autotuner.cache`."""

    agreement: RankGroup
    scope: str
    provisional: bool


class Marks:
    """Which entries of `Autotuner.cache` come from a session of ours. Holds no Autotuner alive."""

    def __init__(self) -> None:
        self._marks: weakref.WeakKeyDictionary[Autotuner, dict[Key, Mark]] = weakref.WeakKeyDictionary()

    def put(self, tuner: Autotuner, key: Key, mark: Mark) -> None:
        self._marks.setdefault(tuner, {})[key] = mark

    def find(self, tuner: Autotuner, key: Key) -> Mark | None:
        return self._marks.get(tuner, {}).get(key)


MARKS = Marks()


def mark_provisional(tuner: Autotuner, key: Key) -> None:
    """Have sessions tune what `Autotuner.cache` holds for the key: nothing was timed to put it there."""
    MARKS.put(tuner, key, Mark(SingleRank(), "", provisional=True))


class Results:
    """The results of one tuned function on one group of ranks.

    function: names the function. scope: "" for results that all functions share. agree, objective: options
    that keys of disk entries depend on: a launch's time and the whole run's are no answers to one question.
    """

    def __init__(
        self,
        disk: Winners,
        agreement: RankGroup,
        device: Device,
        function: str,
        scope: str,
        agree: str,
        objective: str = "kernel",
    ) -> None:
        self._disk = disk
        self._agreement = agreement
        self._device = device
        self._scope = scope
        self._agree = agree
        self._kernel_scope = scope if objective == "kernel" else f"{scope} by the whole run".strip()
        facts = function, *vars(device).values(), triton.__version__, len(agreement.ranks), agree
        readable = re.sub(r"[^A-Za-z0-9_.]+", "_", function)[:80]
        self._folder = f"{readable}-{digest(to_json([*facts, self._scope, self._kernel_scope]))}"

    def on_disk(self, rank_context: RankContext) -> Claim | None:
        """Return what this rank's disk has for a context."""
        entry = self._disk.get(self.entry_key(rank_context))
        return None if entry is None else Claim(self._agreement.rank, entry.winner, entry.ms)

    def launched_before(self) -> Offers:
        """Return the entries of what the function is known to launch."""
        return self._offers(self._disk.launched_by(self._folder))

    def of_kernels(self, kernels: Iterable[tuple[str, str]]) -> Offers:
        """Return the entries of kernels, given as (readable name, identity)."""
        wanted = set(kernels)
        found = (self._disk.entries_of(name) for name in sorted({name for name, _ in wanted}))
        entries = itertools.chain.from_iterable(found)
        return self._offers(each for each in entries if (each.key.kernel, each.key.kernel_digest) in wanted)

    def _offers(self, entries: Iterable[Entry]) -> Offers:
        usable = (entry for entry in entries if self._is_usable(entry))
        return {entry.key.digest: (self._agreement.rank, entry.winner, entry.ms) for entry in usable}

    def in_memory(self, tuner: Autotuner, key: Key) -> Any:
        """Return the config in `Autotuner.cache` if it counts."""
        if subclasses.keeps_its_own_cache(tuner):
            return None
        config, mark = tuner.cache.get(key), MARKS.find(tuner, key)
        if config is None or (mark is not None and mark.provisional):
            return None
        if mark is None:
            return config if isinstance(self._agreement, SingleRank) and not self._scope else None
        if not isinstance(self._agreement, SingleRank) and mark.agreement is not self._agreement:
            return None
        return config if mark.scope == self._scope else None

    def publish(self, context: Context, rank_context: RankContext, seconds: float) -> None:
        """Write a result to `Autotuner.cache` and, if it is a search's, to disk. `seconds`: the session's."""
        rank_context.is_published = True
        winner = context.digests[context.incumbent]
        timings = {context.digests[index]: ms for index, ms in context.times.ms.items()}
        failed = {context.digests[index]: math.inf for index in context.banned}
        if rank_context.is_choice:
            CHOICES.remember(context.kernel, rank_context.key_text, rank_context.texts[winner])
        for binding in rank_context.bindings:
            tuner = binding.tuner()
            config = binding.configs.get(winner)
            if tuner is None or config is None or len(tuner.configs) == 1:
                continue
            if subclasses.keeps_its_own_cache(tuner):  # it might take an entry for another key's
                continue
            cached = context.status == "cached"
            standing = tuner.cache.get(binding.key)
            if cached and standing is not None and identity.candidate_digest(standing.all_kwargs()) == winner:
                continue  # and so does all that belongs to it
            known = {**timings, **failed}
            by_config = [(own, known[digest]) for digest, own in binding.configs.items() if digest in known]
            autotuner_cache.publish(tuner, binding.key, config, by_config, seconds)
            MARKS.put(tuner, binding.key, Mark(self._agreement, self._scope, context.provisional))
            if not context.provisional:
                autotuner_cache.announce(tuner, binding.key, cache_hit=cached)
        ms = timings.get(winner)
        if context.status == "tuned" and ms is not None and len(context.digests) > 1:
            self._disk.put(self._entry(context, rank_context, winner, ms))
        if (
            context.status in ("tuned", "cached")
            and len(context.digests) > 1
            and len(self._agreement.ranks) > 1
        ):
            self._disk.note_launched(self._folder, self.entry_key(rank_context))

    def _entry(self, context: Context, rank_context: RankContext, winner: str, ms: float) -> Entry:
        return Entry(
            key=self.entry_key(rank_context),
            winner=winner,
            config=context.texts[context.incumbent],
            ms=ms,
            timings={context.texts[index]: ms for index, ms in context.times.ms.items()},
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            package_version=__version__,
        )

    def entry_key(self, rank_context: RankContext) -> EntryKey:
        """Return all that a result of this context depends on."""
        return EntryKey(
            kernel=rank_context.source.short_name,
            kernel_digest=rank_context.kernel,
            key=rank_context.key_text,
            constants=rank_context.constants,
            candidates=tuple(sorted(rank_context.texts)),
            device=self._device.name,
            capability=self._device.capability,
            driver=self._device.driver,
            triton_version=triton.__version__,
            world_size=len(self._agreement.ranks),
            scope=self._scope if rank_context.is_choice else self._kernel_scope,
            agree=self._agree,
        )

    def _is_usable(self, entry: Entry) -> bool:
        key = entry.key
        return (
            (key.device, key.capability, key.driver)
            == (self._device.name, self._device.capability, self._device.driver)
            and key.triton_version == triton.__version__
            and key.world_size == len(self._agreement.ranks)
            and key.scope in (self._scope, self._kernel_scope)
            and key.agree == self._agree
        )


def tuned_contexts(
    tuning: SearchState, rank_contexts: RankContexts, names: set[str]
) -> tuple[TunedContext, ...]:
    """Return the contexts among `names` that there was a choice in, as they stand."""
    contexts = []
    for name in sorted(names):
        context, rank_context = tuning.contexts.get(name), rank_contexts.by_name.get(name)
        if context is None or rank_context is None or len(context.digests) == 1:
            continue
        best = None if context.is_spent else context.incumbent
        contexts.append(
            TunedContext(
                kernel=context.kernel,
                key=rank_context.key,
                config=None if best is None else rank_context.config_of(context.digests[best]),
                ms=None if best is None else context.times.ms.get(best),
                fastest_rank_ms=None if best is None else context.times.fastest_ms.get(best),
                launch_bound=best is not None and context.is_launch_bound,
                status=context.status or "tuning",
                timings={context.texts[index]: ms for index, ms in context.known_ms()},
                banned={
                    context.texts[index]: f"rank {rank}: {reason}"
                    for index, (rank, reason) in sorted(context.banned.items())
                },
            )
        )
    return tuple(contexts)
