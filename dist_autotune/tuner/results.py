"""Finds results of earlier searches in memory and on disk, and writes new ones there."""

from __future__ import annotations

import datetime
import itertools
import math
import socket
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from msgspec.structs import asdict
from triton.runtime.autotuner import Autotuner

from ..codec import digest, to_json
from ..launch.kernel_names import family_of
from ..launch.rank_context import RankContext
from ..launch.tunable import CHOICES
from ..ranks.group import RankGroup
from ..search.context import Context
from ..search.messages import Claim, Offer, Offers, Upgrade
from ..storage.waiting import WaitingContexts
from ..storage.winners import BEST, IMPORTED, Entry, EntryKey, Evidence, Winners, safe_name
from ..triton_api import identity, stock_results
from ..triton_api.launch import Key
from ..version import __version__

if TYPE_CHECKING:
    from .function_state import FunctionSetup


@dataclass(frozen=True)
class Origin:
    """The session that wrote an entry of some `Autotuner.cache`."""

    group: RankGroup
    scope: str
    provisional: bool


_origins: weakref.WeakKeyDictionary[Autotuner, dict[Key, Origin]] = weakref.WeakKeyDictionary()


def mark_provisional(tuner: Autotuner, key: Key) -> None:
    """Have sessions tune the key although `Autotuner.cache` holds a config: nobody timed that."""
    _origins.setdefault(tuner, {})[key] = Origin(RankGroup(), "", provisional=True)


class Results:
    """The results of one tuned function on one group of ranks, in `Autotuner.cache` and on disk."""

    def __init__(self, function: FunctionSetup, disk: Winners) -> None:
        self.ignores_known = False  # retune(): what memory and disk hold does not count
        self.looks_on_disk = False
        self.store = f"{socket.gethostname()}:{disk.directory}"  # what one rank of a host writes for all
        self._stores = True  # this rank does
        self._offers: Offers = {}  # disk entries that all ranks use
        self._of_kernels: dict[str, Offers] = {}  # alone: all entries on disk, by kernel
        self._old: dict[str, tuple[str, Entry] | None] = {}  # from before an upgrade, see `_old_entry`
        self._function, self._disk = function, disk
        self._waiting = WaitingContexts(disk.directory)
        self._scope = self._kernel_scope = function.scope
        options, device = function.options, function.device
        if options.objective != "kernel":  # a launch's time and the whole run's answer different questions
            self._kernel_scope = f"{self._scope} by the whole run".strip()
        self._conditions: dict[str, Any] = {  # of an entry's key: the same for all results of the function
            "device": device.name,
            "capability": device.capability,
            "driver": device.driver,
            "triton_version": triton.__version__,
            "world_size": len(function.group.ranks),
            "agree": options.agree,
        }
        named = f"{function.name}#{function.source_digest}"
        facts = [named, *self._conditions.values(), self._scope, self._kernel_scope]
        self._folder = f"{safe_name(named)}-{digest(to_json(facts))}"

    def offered_at_opening(self) -> Offers:
        """Return the entries of contexts that the function is known to launch, and imported ones.

        In the strict mode all: what a later call launches must be known to all ranks.
        """
        if self.ignores_known or self._function.is_alone:  # one rank looks entries up when it needs them
            return {}
        if self._function.is_strict:
            return self._offers_of(self._disk.entries())
        known = map(self._disk.launched_by, (IMPORTED, self._folder))
        return self._offers_of(itertools.chain.from_iterable(known))

    def offered_after(self, announced: Iterable[RankContext]) -> Offers:
        """Return all entries of the kernels that a run announces, if neither opening nor votes share them."""
        function = self._function
        knows_all = function.is_strict or (function.options.watch and function.tunes)
        if function.is_alone or knows_all or self.ignores_known or not self.looks_on_disk:
            return {}
        wanted = {(rank_context.source.short_name, rank_context.kernel) for rank_context in announced}
        names = sorted({name for name, _ in wanted})
        entries = itertools.chain.from_iterable(map(self._disk.entries, names))
        found = (entry for entry in entries if (entry.key.kernel, entry.key.kernel_digest) in wanted)
        return self._offers_of(found)

    def open(self, offers: Offers, *, same_device: bool, stores: bool) -> None:
        """Begin a session with the offers that all ranks have; stores: no lower rank has this store."""
        self._stores = stores
        self._offers = dict(offers) if same_device else {}
        self.looks_on_disk = same_device

    def close(self) -> None:
        """End a session: only in one do several ranks agree on what is on disk."""
        self.looks_on_disk &= self._function.is_alone

    def add_offers(self, offers: Offers) -> None:
        self._offers = {**offers, **self._offers}

    def _offers_of(self, entries: Iterable[Entry]) -> Offers:
        rank, scopes = self._function.group.rank, (self._scope, self._kernel_scope)
        conditions = self._conditions.items()
        return {
            entry.key.digest: Offer(rank, entry.winner, entry.ms, entry.key.relatives, entry.key.key)
            for entry in entries
            if entry.key.scope in scopes and conditions <= asdict(entry.key).items() and self._may_use(entry)
        }

    def _may_use(self, entry: Entry) -> bool:
        """Return whether the entry holds the bits of the first config, where that is asked."""
        return entry.bit_class == 0 or self._function.bits != "same"

    def find_claim(self, rank_context: RankContext, tuner: Autotuner | None) -> Claim | None:
        """Return the result that a context has in memory or on disk before its first launch here."""
        known = None if tuner is None or self.ignores_known else self._in_memory(tuner, rank_context.key)
        if known is not None:
            return self._function.group.rank, identity.config_digest(known), None
        return self.claim_on_disk(rank_context)

    def claim_on_disk(self, rank_context: RankContext) -> Claim | None:
        """Return the entry that all ranks have agreed on, else this rank's own, which it will report."""
        if self.ignores_known:
            return None
        key = self._entry_key(rank_context)
        if key.digest in self._offers:
            return self._offers[key.digest].claim
        entry = self._disk.get(key) if self.looks_on_disk else None
        if entry is None or not self._may_use(entry):
            return None
        rank_context.holds_claim_back = rank_context.is_joint
        return self._function.group.rank, entry.winner, entry.ms

    @property
    def places(self) -> str:
        """Return where results are looked for, for messages."""
        directory = self._disk.directory
        if directory is None:
            return "in memory, and there is no cache"
        if self._function.is_alone:
            return f"in memory or in {directory}"
        return f"in memory or among what the ranks had in {directory} when their session opened"

    def stored_winners(self, rank_context: RankContext) -> dict[str, str]:
        """Return the winners, by key, of the entries for other keys of a context's kernel.

        Those that all ranks have agreed to use; one rank alone reads the kernel's entries, once.
        """
        if self.ignores_known:
            return {}
        kernel, offers = rank_context.source.short_name, self._offers
        if self._function.is_alone and self.looks_on_disk:
            if kernel not in self._of_kernels:
                self._of_kernels[kernel] = self._offers_of(self._disk.entries(kernel))
            offers = self._of_kernels[kernel]
        relatives = self._entry_key(rank_context).relatives
        return {offer.key: offer.winner for offer in offers.values() if offer.relatives == relatives}

    def find_upgrade(self, rank_context: RankContext) -> Upgrade | None:
        """Return what is raced again of an entry from before an upgrade: its best, and what it did not have.

        None where fewer than two of its best are candidates here; where bits are compared: which candidates
        are, must not depend on what was tuned before.
        """
        function = self._function
        if self.ignores_known or not (self.looks_on_disk and function.tunes and function.bits == "any"):
            return None
        if (old := self._old_entry(rank_context)) is None:
            return None
        (found_with, entry), texts = old, rank_context.texts
        best = [digest for digest in entry.evidence.best if digest in texts]
        new = [digest for digest in texts if digest not in entry.key.candidates]
        if len(best) < 2:
            return None
        added = f" and {len(new)} new" if new else ""
        return function.group.rank, found_with + added, (*best, *new)

    def outdated(self, rank_context: RankContext) -> str:
        """Return, for messages, what the disk holds from before an upgrade; empty: nothing."""
        old = self._old_entry(rank_context)
        return "" if old is None else f", and that of {old[0]} is from before an upgrade"

    def _old_entry(self, rank_context: RankContext) -> tuple[str, Entry] | None:
        """Return the latest entry of another Triton, driver or source, and what it was found with.

        Of functions made by functions only those of the same source: others may be other kernels.
        """
        if not (full_name := rank_context.source.full_name):
            return None
        key = self._entry_key(rank_context)
        if key.digest not in self._old:
            is_made = "<locals>" in full_name
            found = []
            for entry in self._disk.lineage(key, full_name):
                is_same = family_of(entry.key.kernel_digest) == family_of(key.kernel_digest)
                if (found_with := _found_with(entry.key, key, is_same)) and (is_same or not is_made):
                    found.append((found_with, entry))
            self._old[key.digest] = max(found, key=lambda each: _likeness(each[1], key), default=None)
        return self._old[key.digest]

    def _in_memory(self, tuner: Autotuner, key: Key) -> Any:
        """Return the config in `Autotuner.cache` if it counts."""
        group, is_alone = self._function.group, self._function.is_alone
        origin = _origins.get(tuner, {}).get(key)
        if origin is None:  # stock Triton's, or the user's
            counts = is_alone and not self._scope
        else:
            is_ours = is_alone or origin.group is group
            counts = is_ours and origin.scope == self._scope and not origin.provisional
        return tuner.cache.get(key) if counts else None

    def publish(self, context: Context, rank_context: RankContext, seconds: float) -> None:
        """Write a result to `Autotuner.cache` and, if it is a search's, to disk. `seconds`: the session's."""
        rank_context.is_published = True
        index, times = context.incumbent, context.times.ms
        winner = context.digests[index]
        if rank_context.is_choice:
            ranks = self._function.group.ranks if rank_context.is_joint else ()
            CHOICES.remember(context.kernel, rank_context.key_text, rank_context.texts[winner], ranks)
        self._to_memory(context, rank_context, seconds)
        if len(context.digests) == 1:
            return
        key = self._entry_key(rank_context)
        if context.status == "tuned" and index in times:
            entry = Entry(
                key=key,
                winner=winner,
                config=context.texts[index],
                ms=times[index],
                timings={context.texts[i]: ms for i, ms in times.items()},
                created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                package_version=__version__,
                evidence=_evidence(context, rank_context),
                bit_class=context.bit_classes.get(index),
                output_digest=context.output_digests.get(index, ""),
            )
            if self._stores or context.ranks < len(self._function.group.ranks):
                self._disk.put(entry)
        if context.provisional:
            self.record_waiting(rank_context)
        elif context.status in ("tuned", "cached"):
            self._waiting.remove(key)
            if not self._function.is_alone:
                self._disk.record_launch(self._folder, key)

    def record_waiting(self, rank_context: RankContext) -> None:
        """Record on disk, once, that a context was launched and has no result yet."""
        if self._function.tunes and len(rank_context.texts) > 1 and not rank_context.is_recorded:
            rank_context.is_recorded = True
            self._waiting.add(self._entry_key(rank_context), self._function.name)

    def _to_memory(self, context: Context, rank_context: RankContext, seconds: float) -> None:
        known = {**context.times.ms, **dict.fromkeys(context.banned, math.inf)}
        by_digest = {context.digests[index]: ms for index, ms in known.items()}
        winner, is_cached = context.digests[context.incumbent], context.status == "cached"
        for binding in rank_context.bindings:
            tuner, config = binding.tuner(), binding.configs.get(winner)
            if tuner is None or config is None or len(tuner.configs) == 1:
                continue
            standing = tuner.cache.get(binding.key) if is_cached else None
            if standing is not None and identity.config_digest(standing) == winner:
                continue  # and so does all that belongs to it
            configs = binding.configs.items()
            by_config = [(own, by_digest[digest]) for digest, own in configs if digest in by_digest]
            stock_results.publish(tuner, binding.key, config, by_config, seconds)
            origin = Origin(self._function.group, self._scope, context.provisional)
            _origins.setdefault(tuner, {})[binding.key] = origin
            if not context.provisional:
                stock_results.announce(tuner, binding.key, cache_hit=is_cached)

    def _candidates(self, rank_context: RankContext) -> tuple[str, ...]:
        """Return the candidates' digests; in the order of the configs where a class of bits depends on it."""
        candidates = tuple(rank_context.texts)
        return candidates if self._function.bits == "same" else tuple(sorted(candidates))

    def _entry_key(self, rank_context: RankContext) -> EntryKey:
        """Return all that a result of this context depends on."""
        return EntryKey(
            kernel=rank_context.source.short_name,
            kernel_digest=rank_context.kernel,
            key=rank_context.key_text,
            constants=rank_context.constants,
            candidates=self._candidates(rank_context),
            scope=self._scope if rank_context.is_choice else self._kernel_scope,
            **self._conditions,
        )


def _found_with(old: EntryKey, new: EntryKey, is_same_source: bool) -> str:
    """Return what an old entry was found with and a new one would not be; empty: both are of one time."""
    parts = [f"Triton {old.triton_version}"] if old.triton_version != new.triton_version else []
    parts += [f"driver {old.driver or 'unknown'}"] if old.driver != new.driver else []
    return " and ".join(parts if is_same_source else [*parts, "an earlier source"])


def _likeness(entry: Entry, key: EntryKey) -> tuple[bool, str, str]:
    """Return what is greatest for the latest entry of the same Autotuner among those of one function."""
    configs = [each.kernel_digest.partition(".")[2] for each in (entry.key, key)]
    return configs[0] == configs[1], entry.created_at, entry.key.digest


def _evidence(context: Context, rank_context: RankContext) -> Evidence:
    """Return the evidence for a context's winner."""
    winner = context.digests[context.incumbent]
    arguments = tuple(zip(rank_context.key_names, rank_context.key, strict=False))
    about_triton: dict[str, Any] = {}
    for binding in rank_context.bindings:
        tuner = binding.tuner()
        if tuner is not None and winner in binding.configs:
            about_triton = {
                "config": stock_results.arguments_of(binding.configs[winner]),
                "triton_file": stock_results.result_file(tuner, binding.key, binding.configs),
            }
            break
    others = sorted((ms, index) for index, ms in context.known_ms() if index != context.incumbent)
    best = [context.incumbent, *(index for _, index in others)][:BEST]
    return Evidence(
        torch_version=str(torch.__version__),
        fastest_rank_ms={context.texts[i]: ms for i, ms in context.times.fastest_ms.items()},
        arguments=arguments if stock_results.is_plain(arguments) else (),
        full_name=rank_context.source.full_name,
        best=tuple(context.digests[index] for index in best),
        **about_triton,
    )
