"""Known results of one tuned function: in memory, on disk, and of other keys."""

from __future__ import annotations

import itertools
import socket
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import triton
from msgspec import Struct
from msgspec.structs import asdict
from triton.runtime.autotuner import Autotuner

from ..codec import digest, to_json
from ..errors import NotTuned
from ..formatting import config_label, context_label, escaped
from ..ranks.group import RankGroup
from ..search.expectation.fields import LaunchMs, TimesByKey
from ..search.expectation.keys import by_distance, named
from ..search.messages import Claim, Offer, Offers, Upgrade
from ..search.orders import Orders
from ..triton_api import identity
from ..triton_api.identity import family_of
from ..triton_api.launch import Key
from .scope import ContextIdentity, FunctionScope
from .winners import IMPORTED, Entry, EntryKey, Winners, safe_name

LISTED_KEYS = 3  # tuned keys that an error names
TELLING = 16  # keys on disk, the nearest, whose times tell what to expect of a new one


class Origin(Struct, frozen=True, gc=False):
    """The session that wrote an entry of some `Autotuner.cache`."""

    group: RankGroup
    scope: str
    provisional: bool


_origins: weakref.WeakKeyDictionary[Autotuner, dict[Key, Origin]] = weakref.WeakKeyDictionary()


def mark_origin(tuner: Autotuner, key: Key, origin: Origin) -> None:
    _origins.setdefault(tuner, {})[key] = origin


_choices: weakref.WeakKeyDictionary[RankGroup, dict[str, str]] = weakref.WeakKeyDictionary()  # by EntryKey


def holds_other_result(tuner: Autotuner, key: Key, scope: str) -> bool:
    """Return whether `Autotuner.cache` holds a result, but none of this scope."""
    origin = _origins.get(tuner, {}).get(key)
    is_own = origin is not None and (origin.scope == scope or origin.provisional)
    return key in tuner.cache and not is_own


@dataclass(frozen=True)
class KnownOfKernel:
    """Winners and times of a kernel's other keys, and any entry from before an upgrade, on all ranks."""

    winners: Mapping[str, str]  # digests by tuned key
    told: TimesByKey  # agreed times by key and text
    upgrade: Upgrade | None  # what is raced again after an upgrade


class KnownResults:
    """The results that contexts of one function begin with.

    orders: those that reached the ranks; replaced when all contexts are dropped.
    """

    def __init__(self, function: FunctionScope, disk: Winners, orders: Orders) -> None:
        self.function, self.disk, self.orders = function, disk, orders
        self.ignores_known = False  # retune(): what memory and disk hold does not count
        self.looks_on_disk = False
        self.store = escaped(f"{socket.gethostname()}:{disk.directory}")  # one rank of a host writes for all
        self.stores = True  # this rank does
        self._offers: Offers = {}  # disk entries that all ranks use
        self._of_kernels: dict[str, tuple[list[Entry], Offers]] = {}  # all entries on disk, by kernel
        self._old: dict[str, tuple[str, Entry] | None] = {}  # from before an upgrade, see `_old_entry`
        device = function.device
        self._conditions: dict[str, Any] = {  # of an entry's key: the same for all results of the function
            "device": device.name,
            "capability": device.capability,
            "driver": device.driver,
            "triton_version": triton.__version__,
            "world_size": len(function.group.ranks),
        }
        name = f"{function.name}#{function.source_digest}"
        about = [name, *self._conditions.values(), function.scope, function.kernel_scope]
        self.folder = f"{safe_name(name)}-{digest(to_json(about))}"  # of what the function launches

    def entry_key(self, context: ContextIdentity) -> EntryKey:
        """Return all that a result of this context depends on."""
        function = self.function
        return EntryKey(
            kernel=context.source.short_name,
            kernel_digest=context.kernel,
            key=context.key_text,
            constants=context.constants,
            candidates=tuple(sorted(context.texts)),
            scope=function.scope if context.is_choice else function.kernel_scope,
            **self._conditions,
        )

    # -- what ranks offer each other -----------------------------------------------------------------------

    def offered_at_opening(self) -> Offers:
        """Return the entries of contexts that the function is known to launch, and imported ones.

        In modes that do not tune, all entries: no later call asks the peers.
        """
        if self.ignores_known or self.function.is_alone:  # one rank looks entries up when it needs them
            return {}
        if not self.function.tunes:
            return self._offers_of(self.disk.entries())
        known = map(self.disk.launched_by, (IMPORTED, self.folder))
        return self._offers_of(itertools.chain.from_iterable(known))

    def open(self, offers: Offers, *, same_device: bool, stores: bool) -> None:
        """Begin a session with the offers that all ranks have; stores: no lower rank has this store."""
        self.stores = stores
        self._offers = dict(offers) if same_device else {}
        self.looks_on_disk = same_device

    def close(self) -> None:
        """End a session: outside of one, several ranks cannot agree on entries on disk."""
        self.looks_on_disk &= self.function.is_alone

    def _offers_of(self, entries: Iterable[Entry]) -> Offers:
        function, conditions = self.function, self._conditions.items()
        scopes = function.scope, function.kernel_scope
        return {
            entry.key.digest: Offer(
                function.group.rank,
                entry.winner,
                entry.ms,
                entry.key.relatives,
                entry.key.key,
                entry.times if function.tells_times else (),
            )
            for entry in entries
            if entry.key.scope in scopes and conditions <= asdict(entry.key).items()
        }

    # -- the result of a context ---------------------------------------------------------------------------

    def find_claim(self, context: ContextIdentity, tuner: Autotuner | None) -> Claim | None:
        """Return the result that memory or disk has for a context before its first launch here."""
        known = None if tuner is None or self.ignores_known else self._in_memory(tuner, context.key)
        if known is not None:
            return self.function.group.rank, identity.config_digest(known), None
        on_disk, chosen = self.claim_on_disk(context), self._choice_in_memory(context)
        counts = self.function.is_alone or self.entry_key(context).digest in self._offers
        if chosen is None or (on_disk is not None and counts):  # its cache may be another one than memory's
            return on_disk
        return self.function.group.rank, chosen, None

    def claim_on_disk(self, context: ContextIdentity) -> Claim | None:
        """Return the entry that all ranks have agreed on, else this rank's own, which it will report."""
        if self.ignores_known:
            return None
        key = self.entry_key(context)
        if key.digest in self._offers:
            return self._offers[key.digest].claim
        entry = self.disk.get(key) if self.looks_on_disk else None
        if entry is None:
            return None
        return self.function.group.rank, entry.winner, entry.ms

    def holds_back(self, context: ContextIdentity) -> bool:
        """Return whether a claim on disk is reported and not launched: all ranks take the same option."""
        is_agreed = self.entry_key(context).digest in self._offers or self._choice_in_memory(context)
        return context.is_joint and not is_agreed

    def _in_memory(self, tuner: Autotuner, key: Key) -> Any:
        """Return the config in `Autotuner.cache` if it counts."""
        function = self.function
        origin = _origins.get(tuner, {}).get(key)
        if origin is None:  # stock Triton's, or the user's
            counts = function.is_alone and not function.scope
        else:
            is_ours = function.is_alone or origin.group is function.group.shared
            counts = is_ours and origin.scope == function.scope and not origin.provisional
        return tuner.cache.get(key) if counts else None

    def remember_choice(self, context: ContextIdentity, winner: str) -> None:
        """Keep the option that the group settled on, for functions of this process that do not tune."""
        _choices.setdefault(self.function.group.shared, {})[self.entry_key(context).digest] = winner

    def _choice_in_memory(self, context: ContextIdentity) -> str | None:
        if not context.is_choice or self.function.tunes:
            return None
        return _choices.get(self.function.group.shared, {}).get(self.entry_key(context).digest)

    # -- what other keys and older entries tell ------------------------------------------------------------

    def of_kernel(self, context: ContextIdentity, kernel_id: str) -> KnownOfKernel:
        """Return winners and times of other keys, and any upgrade. kernel_id: the kernel's agreed name."""
        upgrade = self._find_upgrade(context)
        if not self.function.keys_teach:
            return KnownOfKernel({}, {}, upgrade)
        return KnownOfKernel(self.winners(context, kernel_id), self._told(context, kernel_id), upgrade)

    def _told(self, context: ContextIdentity, kernel_id: str) -> TimesByKey:
        """Return the times, by key and config, of this process and of the nearest keys on disk."""
        if context.is_choice:
            return {}
        offers = (offer for offer in self._related(context) if offer.times)
        times = {each.key: {text: LaunchMs(ms, fill) for text, ms, fill in each.times} for each in offers}
        nearest = by_distance(context.key_text, times)[:TELLING]
        return {**{key: times[key] for key in nearest}, **self.orders.times_by_key(kernel_id)}

    def winners(self, context: ContextIdentity, kernel_id: str) -> dict[str, str]:
        """Return the winners, by key, of other keys of a context's kernel: only what all ranks know."""
        stored = {offer.key: offer.winner for offer in self._related(context)}
        return {**stored, **self.orders.tuned_keys(kernel_id)}

    def _related(self, context: ContextIdentity) -> list[Offer]:
        """Return the entries of the kernel that all ranks have agreed to use; one alone reads them, once."""
        if self.ignores_known:
            return []
        kernel, offers = context.source.short_name, self._offers
        if self.function.is_alone and self.looks_on_disk:
            _, offers = self._on_disk(kernel)
        relatives = self.entry_key(context).relatives
        return [offer for offer in offers.values() if offer.relatives == relatives]

    def _on_disk(self, kernel: str) -> tuple[list[Entry], Offers]:
        """Return all entries of a kernel, read once, and the usable ones as offers."""
        if kernel not in self._of_kernels:
            entries = [*self.disk.entries(kernel)]
            self._of_kernels[kernel] = entries, self._offers_of(entries)
        return self._of_kernels[kernel]

    def _find_upgrade(self, context: ContextIdentity) -> Upgrade | None:
        """Return the candidates to race again after an upgrade: the best of an old entry, and new ones.

        None if fewer than two of the best are candidates here, or if bits are compared: the candidates must
        not depend on earlier tuning.
        """
        function = self.function
        if self.ignores_known or not (self.looks_on_disk and function.tunes and function.bits == "any"):
            return None
        if (old := self._old_entry(context)) is None:
            return None
        (found_with, entry), texts = old, context.texts
        best = [each for each in entry.evidence.best if each in texts]
        new = [each for each in texts if each not in entry.key.candidates]
        if len(best) < 2:
            return None
        added = f" and {len(new)} new" if new else ""
        return function.group.rank, found_with + added, (*best, *new)

    def _old_entry(self, context: ContextIdentity) -> tuple[str, Entry] | None:
        """Return the latest entry of another Triton, driver or source, after the versions that differ.

        A function made by another one has entries of its own source only: others may be other kernels.
        """
        if not (full_name := context.source.full_name):
            return None
        key = self.entry_key(context)
        if key.digest not in self._old:
            is_made, found = "<locals>" in full_name, list[tuple[str, Entry]]()
            for entry in self._on_disk(context.source.short_name)[0]:
                is_same = family_of(entry.key.kernel_digest) == family_of(key.kernel_digest)
                found_with = _found_with(entry.key, key, is_same) if is_same or not is_made else ""
                is_of_kernel = entry.evidence.full_name == full_name and entry.key.lineage == key.lineage
                if found_with and is_of_kernel:
                    found.append((found_with, entry))
            self._old[key.digest] = max(found, key=lambda each: _likeness(each[1], key), default=None)
        return self._old[key.digest]

    # -- the strict mode -----------------------------------------------------------------------------------

    def not_tuned(self, context: ContextIdentity, kernel_id: str, winner: str, failure: str) -> NotTuned:
        """Return the error for a launch that would not be with a search's result.

        winner: that result, which cannot be launched because of a `failure`; empty: there is none.
        """
        kernel, key = context.source.short_name, context.named_key
        if winner:
            config = config_label(context.texts.get(winner, winner))
            why = f"its config {config} cannot be launched: {failure}"
        else:
            old = self._old_entry(context)
            outdated = "" if old is None else f", and that of {old[0]} is from before an upgrade"
            why = f"there is no result for it {self._places}{outdated or self._elsewhere(context)}"
        others = by_distance(context.key_text, self.winners(context, kernel_id))[:LISTED_KEYS]
        nearest = ", ".join(context_label("", named(key, other)) for other in others)
        return NotTuned(
            f"{context_label(kernel, key)} is not tuned, and DIST_AUTOTUNE_MODE=strict launches nothing "
            f"else: {why}. Nearest tuned keys: {nearest or 'none'}. Tune it on this hardware "
            "(DIST_AUTOTUNE_MODE=tune) and ship the result (dist-autotune cache export, import), or set "
            "DIST_AUTOTUNE_MODE=cached, which launches the config of the nearest key."
        )

    def _elsewhere(self, context: ContextIdentity) -> str:
        """Return for how many ranks there are results on disk for a kernel of that name, if not for these."""
        numbers = {entry.key.world_size for entry in self.disk.entries(context.source.short_name)}
        here = len(self.function.group.ranks)
        if not numbers or here in numbers:
            return ""
        *_, most = there = sorted(numbers)
        ranks = "rank" if most == 1 else "ranks"
        return f", but for {' or '.join(map(str, there))} {ranks}, not {here}"

    @property
    def _places(self) -> str:
        """Return where results are looked for, for messages."""
        directory = self.disk.directory
        if directory is None:
            return "in memory, and there is no cache"
        if self.function.is_alone:
            return f"in memory or in {directory}"
        return f"in memory or among what the ranks had in {directory} when their session opened"


def _found_with(old: EntryKey, new: EntryKey, is_same_source: bool) -> str:
    """Return the versions in which an old entry differs from a new one; empty: in none."""
    parts = [f"Triton {old.triton_version}"] if old.triton_version != new.triton_version else []
    parts += [f"driver {old.driver or 'unknown'}"] if old.driver != new.driver else []
    return " and ".join(parts if is_same_source else [*parts, "an earlier source"])


def _likeness(entry: Entry, key: EntryKey) -> tuple[bool, str, str]:
    """Return a sort key: greatest for the latest entry with the same configs."""
    configs = [each.kernel_digest.partition(".")[2] for each in (entry.key, key)]
    return configs[0] == configs[1], entry.created_at, entry.key.digest
