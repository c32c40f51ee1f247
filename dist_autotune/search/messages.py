"""What ranks tell each other: payloads that merge in any order, as JSON between processes."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Container
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

from ..errors import RankMismatch

WHERE = {"open": "the opening of a session", "run": "the end of a trial", "vote": "the end of a settled call"}
SAID_FIRST = ("the tuned function", "the source of the tuned function")  # of several facts that differ
FS_PER_MS = 10**12
MIXED = "*"  # launches of one run did not all use one candidate; payloads were not all of one kind


INEXACT, EXPLAINED, EXACT = range(3)
"""What is known of a run in which a process ended: that it did; that a rank had raised an exception, which is
why others may have been killed; inside which launch it did."""

CrashBans: TypeAlias = dict[str, dict[str, tuple[int, str]]]
"""Context -> candidate -> (rank whose process ended, reason)."""


def femtoseconds(ms: float) -> int:
    """Return a finite time in whole femtoseconds."""
    return round(Fraction(ms) * FS_PER_MS)


@dataclass(frozen=True)
class Announcement:
    """A context's first appearance on some ranks: the candidates they share, in the lowest rank's order."""

    rank: int
    kernel: str
    key: str
    order: tuple[tuple[str, str], ...]  # (digest, text) of each candidate
    shared: tuple[str, ...]  # digests, sorted
    ranks: int = 1
    is_choice: bool = False  # a `tunable`: options instead of configs
    kernel_id: str = ""  # tells Autotuners of one function apart by the configs they were given
    family: str = ""  # the same for all of them
    siblings: int = 1  # how many of the family a rank has launched, at most
    place: int = 0  # in the order in which `rank` has met its contexts
    slot: str = ""  # what makes the context's name of `kernel_id`
    claim: tuple[int, str, float | None] | None = None  # (rank, digest, ms) of a result it already has

    def merged(self, other: Announcement) -> Announcement:
        first, second = sorted((self, other), key=lambda announcement: announcement.rank)
        claims = [claim for claim in (first.claim, second.claim) if claim is not None]
        return dataclasses.replace(
            first,
            shared=tuple(sorted(set(first.shared) & set(second.shared))),
            ranks=first.ranks + second.ranks,
            siblings=max(first.siblings, second.siblings),
            claim=min(claims, key=_claim_order) if claims else None,
        )


def _claim_order(claim: tuple[int, str, float | None]) -> tuple[int, str, bool, float]:
    """Order claims: one rank may claim what it remembers, and its peers what they have from its disk."""
    rank, digest, ms = claim
    return rank, digest, ms is None, ms or 0.0


@dataclass(frozen=True)
class Part:
    """What ranks say of one context after a run."""

    ran: str | None = None  # digest of the candidate launched; MIXED; None: not launched
    worst_ms: float = -math.inf  # of the per-rank statistic so far of the candidate on trial
    best_ms: float = math.inf
    total_fs: int = 0  # their sum, whole so that it is the same in whatever order ranks are added
    measured: int = 0  # ranks with a statistic
    unmeasured: int = 0  # ranks that launched it and have none
    pending: int = 0  # ranks whose sample is not read yet (online)
    bans: dict[str, tuple[int, str]] = field(default_factory=dict)  # digest -> (lowest rank, its reason)
    announcement: Announcement | None = None
    gap_ms: float = 0.0  # how much of a rank's statistic may be its host's, on the rank where it is most

    def merged(self, other: Part) -> Part:
        bans = dict(self.bans)
        for candidate, ban in other.bans.items():
            bans[candidate] = min(bans.get(candidate, ban), ban)
        announcements = [a for a in (self.announcement, other.announcement) if a is not None]
        ran = {part.ran for part in (self, other)} - {None}
        return Part(
            ran=None if not ran else ran.pop() if len(ran) == 1 else MIXED,
            worst_ms=max(self.worst_ms, other.worst_ms),
            best_ms=min(self.best_ms, other.best_ms),
            total_fs=self.total_fs + other.total_fs,
            measured=self.measured + other.measured,
            unmeasured=self.unmeasured + other.unmeasured,
            pending=self.pending + other.pending,
            gap_ms=max(self.gap_ms, other.gap_ms),
            bans=bans,
            announcement=announcements[0].merged(announcements[1])
            if len(announcements) == 2
            else announcements[0]
            if announcements
            else None,
        )


@dataclass(frozen=True)
class Crash:
    """A run in the middle of which a process ended without a word, or of the exception that explains it."""

    rank: int
    run: int
    at: str  # when it was written
    kind: int  # INEXACT | EXPLAINED | EXACT
    suspects: dict[str, str] = field(default_factory=dict)  # context -> candidate, by digest

    @staticmethod
    def of_data(data: dict[str, Any]) -> Crash:
        suspects = {str(context): str(candidate) for context, candidate in data.get("suspects", {}).items()}
        return Crash(int(data["rank"]), int(data["run"]), str(data["at"]), int(data["kind"]), suspects)

    def merged(self, other: Crash) -> Crash:
        """Return what is known best of the latest run."""
        known = [(crash.run, crash.kind) for crash in (self, other)]
        if known[0] != known[1]:
            return self if known[0] > known[1] else other
        first, second = sorted((self, other), key=lambda crash: (crash.rank, crash.at))
        return dataclasses.replace(first, suspects={**second.suspects, **first.suspects})


@dataclass(frozen=True)
class Payload:
    """What ranks say at one exchange. `facts` must be equal on all ranks; `offers` are disk entries."""

    kind: str  # "open" | "run" | "vote"
    rank: int = 0
    facts: dict[str, dict[str, int]] = field(default_factory=dict)  # name -> value -> lowest rank with it
    offers: dict[str, tuple[int, str, float]] = field(default_factory=dict)  # entry -> (rank, winner, ms)
    parts: dict[str, Part] = field(default_factory=dict)
    run: Part = field(default_factory=Part)  # time of the whole run
    elapsed_s: float = 0.0
    told_ns: int = 0  # when the last rank told this, where all read one clock; see `synchronized_start`
    lag_ns: int = 0  # how long after the exchange before the last rank came to this run
    wanted_ms: float = 0.0  # the filler that the slowest host wants before the next run
    late_ms: float = 0.0  # how much longer than usual the host of some rank took for the trial that is told
    wants_session: bool = False
    crashes: dict[str, Crash] = field(default_factory=dict)  # of earlier processes, by session
    crash_bans: CrashBans = field(default_factory=dict)  # for crashes before those

    def merged(self, other: Payload) -> Payload:
        facts = {name: dict(values) for name, values in self.facts.items()}
        for name, values in other.facts.items():
            for value, rank in values.items():
                known = facts.setdefault(name, {})
                known[value] = min(known.get(value, rank), rank)
        offers = dict(self.offers)
        for entry, offer in other.offers.items():
            offers[entry] = min(offers.get(entry, offer), offer)
        parts = dict(self.parts)
        for context, part in other.parts.items():
            parts[context] = parts[context].merged(part) if context in parts else part
        return Payload(
            kind=min(self.kind, other.kind) if self.kind == other.kind else MIXED,
            rank=min(self.rank, other.rank),
            facts=facts,
            offers=offers,
            parts=parts,
            elapsed_s=max(self.elapsed_s, other.elapsed_s),
            told_ns=max(self.told_ns, other.told_ns),
            lag_ns=max(self.lag_ns, other.lag_ns),
            wanted_ms=max(self.wanted_ms, other.wanted_ms),
            late_ms=max(self.late_ms, other.late_ms),
            run=self.run.merged(other.run),
            wants_session=self.wants_session or other.wants_session,
            crashes=_merged_crashes(self.crashes, other.crashes),
            crash_bans=_merged_bans(self.crash_bans, other.crash_bans),
        )

    def in_order(self, known: Container[str]) -> list[str]:
        """Return the contexts of a run: those not `known` last, as the lowest rank that has them met them."""

        def place(name: str) -> tuple[int, int, str]:
            announced = self.parts[name].announcement
            if announced is None or name in known:
                return -1, 0, name
            return announced.rank, announced.place, name

        return sorted(self.parts, key=place)

    def decisive(self) -> dict[str, Any]:
        """Return, as data that `decode` reads, what the next plan follows from: all but facts and offers."""
        plain: dict[str, Any] = _plain(dataclasses.replace(self, facts={}, offers={}))
        return plain

    def encode(self) -> bytes:
        """Return the payload as JSON: the same bytes in whatever order payloads were merged."""
        return json.dumps(_plain(self), separators=(",", ":"), sort_keys=True).encode()

    @staticmethod
    def decode(data: bytes) -> Payload:
        return Payload.of_data(json.loads(data))

    @staticmethod
    def of_data(data: dict[str, Any]) -> Payload:
        """Return the payload that `decisive`, or its JSON, gave."""
        fields = dict(data)
        fields["offers"] = {entry: tuple(offer) for entry, offer in fields.get("offers", {}).items()}
        fields["parts"] = {context: _part(values) for context, values in fields.get("parts", {}).items()}
        fields["run"] = _part(fields.get("run", {}))
        crashes, bans = fields.get("crashes", {}), fields.get("crash_bans", {})
        fields["crashes"] = {session: Crash.of_data(values) for session, values in crashes.items()}
        fields["crash_bans"] = {
            context: {candidate: (ban[0], ban[1]) for candidate, ban in each.items()}
            for context, each in bans.items()
        }
        return Payload(**fields)


def _merged_crashes(one: dict[str, Crash], other: dict[str, Crash]) -> dict[str, Crash]:
    both = {session: one[session].merged(other[session]) for session in one.keys() & other.keys()}
    return {**one, **other, **both}


def _merged_bans(one: CrashBans, other: CrashBans) -> CrashBans:
    merged = {context: dict(bans) for context, bans in one.items()}
    for context, bans in other.items():
        known = merged.setdefault(context, {})
        for candidate, ban in bans.items():
            known[candidate] = min(known.get(candidate, ban), ban)
    return merged


def bans_for_crashes(merged: Payload) -> CrashBans:
    """Return what all ranks ban for crashes of earlier processes, from what they said at the opening."""
    bans: CrashBans = {}
    for session, crash in sorted(merged.crashes.items()):
        reason = (
            f"was running when rank {crash.rank}'s process ended without a word "
            f"(run {crash.run} of session {session}, {crash.at})"
        )
        for context, candidate in crash.suspects.items():
            bans.setdefault(context, {})[candidate] = (crash.rank, reason)
    return _merged_bans(bans, merged.crash_bans)


def merge(first: bytes, *others: bytes) -> bytes:
    """Merge encoded payloads: associative and commutative, so it can run as a tree."""
    if not others:
        return first
    return functools.reduce(Payload.merged, map(Payload.decode, (first, *others))).encode()


def check_facts(merged: Payload, expected_kind: str) -> None:
    """Raise RankMismatch where ranks differ in what must be equal."""
    for name in [*SAID_FIRST, *sorted(merged.facts.keys() - set(SAID_FIRST))]:
        values = merged.facts.get(name, {})
        if len(values) > 1:
            said = "; ".join(
                f"rank {rank}: {value}" for value, rank in sorted(values.items(), key=lambda v: v[1])
            )
            raise RankMismatch(
                f"ranks differ in {name}: {said}. All ranks must run the same code with the same options, "
                "and call the tuned functions in the same order."
            )
    if merged.kind != expected_kind:
        raise RankMismatch(
            f"ranks are at different points of the program: not all of them are at {WHERE[expected_kind]}. "
            "All ranks must make the same calls of a tuned function, and of its retune(). The next call "
            "starts anew.",
            starts_anew=True,
        )


def _plain(value: Any) -> Any:
    """Return `value` as JSON-representable data, fields at their defaults left out."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    kind: Any = type(value)  # of a dataclass, which mypy does not take for hashable
    fields = ((name, getattr(value, name), default) for name, default in _defaults(kind))
    return {name: _plain(item) for name, item, default in fields if item != default}


@functools.cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a dataclass with their defaults."""
    return tuple(
        (f.name, f.default if f.default_factory is dataclasses.MISSING else f.default_factory())
        for f in dataclasses.fields(kind)
    )


def _part(fields: dict[str, Any]) -> Part:
    fields = dict(fields)
    fields["bans"] = {candidate: (ban[0], ban[1]) for candidate, ban in fields.get("bans", {}).items()}
    announcement = fields.get("announcement")
    if announcement is not None:
        announcement["order"] = tuple((digest, text) for digest, text in announcement["order"])
        announcement["shared"] = tuple(announcement["shared"])
        if announcement.get("claim") is not None:
            announcement["claim"] = tuple(announcement["claim"])
        fields["announcement"] = Announcement(**announcement)
    return Part(**fields)
