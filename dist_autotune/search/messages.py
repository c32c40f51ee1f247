"""What ranks report to the deciding rank, which merges the reports of all; JSON between processes."""

from __future__ import annotations

import functools
import json
import math
import operator
import typing
from collections.abc import Callable, Container
from typing import Annotated, Any, ClassVar, Self, TypeAlias, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import fields, force_setattr, replace

from ..errors import RankMismatch

MIXED = "*"  # launches of one run did not all use one candidate; messages were not all of one kind

T = TypeVar("T")
Merge: TypeAlias = Callable[[T, T], T]


def _by_key(merge: Merge[T]) -> Merge[dict[str, T]]:
    def merged(one: dict[str, T], other: dict[str, T]) -> dict[str, T]:
        if not (one and other):
            return one or other
        return {**one, **other, **{key: merge(one[key], other[key]) for key in one.keys() & other.keys()}}

    return merged


def _if_both(merge: Merge[T]) -> Merge[T | None]:
    def merged(one: T | None, other: T | None) -> T | None:
        if one is None or other is None:
            return other if one is None else one
        return merge(one, other)

    return merged


class Mergeable(Struct, frozen=True, omit_defaults=True):
    """What has fields that say in their types how they merge: `Annotated[float, max]`."""

    def __post_init__(self) -> None:
        for name, default in _objects(type(self)):
            if getattr(self, name) == default:
                force_setattr(self, name, default)  # an equal other object would be encoded

    def merged(self, other: Self) -> Self:
        return type(self)(*[merge(get(self), get(other)) for get, merge in _merges(type(self))])


@functools.cache
def _merges(kind: type[Mergeable]) -> list[tuple[Callable[[Mergeable], Any], Merge[Any]]]:
    """Return of each field what reads it and how it merges."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(operator.attrgetter(each.name), hints[each.name].__metadata__[0]) for each in fields(kind)]


@functools.cache
def _objects(kind: type[Mergeable]) -> list[tuple[str, Any]]:
    """Return name and default of each field whose default may be equal to another object."""
    return [(each.name, each.default) for each in fields(kind) if isinstance(each.default, float | Struct)]


Ban: TypeAlias = tuple[int, str]  # (rank, its reason)
Bans: TypeAlias = Annotated[dict[str, Ban], _by_key(min)]  # by the candidate's digest; the lowest rank's
CrashBans: TypeAlias = dict[str, dict[str, Ban]]  # by context; the rank is that whose process ended
Facts: TypeAlias = dict[str, dict[str, int]]  # name -> value -> lowest rank with it
Claim: TypeAlias = tuple[int, str, float | None]  # (rank, digest, ms)
# After an upgrade (rank, what the old result was found with, digests to race, the old winner first).
Upgrade: TypeAlias = tuple[int, str, tuple[str, ...]]


class Offer(Struct, frozen=True, order=True):
    """What a rank has on disk for one key of a kernel."""

    rank: int
    winner: str  # digest
    ms: float
    relatives: str  # the same for entries of other keys, see `EntryKey.relatives`
    key: str
    # By the config's text ms and `LaunchMs.fill`; of one rank alone, or the first.
    times: tuple[tuple[str, float, float], ...] = ()

    @property
    def claim(self) -> Claim:
        return self.rank, self.winner, self.ms


Offers: TypeAlias = Annotated[dict[str, Offer], _by_key(min)]  # by the digest of the entry; the lowest rank's


class Announcement(Struct, frozen=True, omit_defaults=True):
    """A context's first appearance on some ranks: the candidates they share, in the lowest rank's order.

    Logs and messages keep the names that two fields had first.
    """

    rank: int
    kernel: str
    key: str  # with `kernel_id` it makes the context's name
    order: tuple[tuple[str, str], ...]  # (digest, text) of each candidate
    shared: tuple[str, ...]  # digests, sorted
    is_choice: bool = False  # a `tunable`: options instead of configs
    kernel_id: str = ""  # tells Autotuners of one function apart by the configs they were given
    family: str = ""  # the same for all of them
    siblings: int = 1  # how many of the family a rank has launched, at most
    place: int = 0  # in the order in which `rank` has met its contexts
    claim: Claim | None = None  # a result it already has
    nearest_key: str = field(default="", name="like")  # whose winner stands first in `order`
    default: str = ""  # the candidate that `rank` launches untuned; "": the first
    upgrade: Upgrade | None = None  # the lowest rank's that has one
    # Of other keys, where they decide: ms by key and by place in `order`.
    ms_by_key: dict[str, dict[str, float]] = field(default_factory=dict, name="told")
    fills: tuple[float, ...] = ()  # how much of the SMs' time launches fill, as in `order`; then told ones do

    def raced_first(self) -> tuple[str, list[tuple[str, str]]]:
        """Return what an old result was found with, and all candidates, those that are raced again first.

        Where ranks share fewer than two of those: nothing, and the order as announced.
        """
        order = list(self.order)
        if self.upgrade is None:
            return "", order
        _, found_with, raced = self.upgrade
        texts = dict(order)
        if any(digest not in texts for digest in raced) or len(set(raced) & set(self.shared)) < 2:
            return "", order
        return found_with, [*((digest, texts.pop(digest)) for digest in raced), *texts.items()]

    def times_by_key(self) -> dict[str, dict[str, float]]:
        """Return the ms of other keys, by key and by the config's text."""
        texts = [text for _, text in self.order]
        return {
            key: {texts[int(place)]: ms for place, ms in times.items()}
            for key, times in self.ms_by_key.items()
        }

    def merged(self, other: Announcement) -> Announcement:
        first, second = sorted((self, other), key=lambda announcement: announcement.rank)
        return replace(
            first,
            shared=tuple(sorted(set(first.shared) & set(second.shared))),
            siblings=max(first.siblings, second.siblings),
            claim=_if_both(_first_claim)(first.claim, second.claim),
            upgrade=_if_both(min)(first.upgrade, second.upgrade),
        )


def _first_claim(one: Claim, other: Claim) -> Claim:
    # One rank may have two: one in memory, and one that its peers got from its disk.
    return min(one, other, key=lambda claim: (*claim[:2], claim[2] is None, claim[2] or 0.0))


def _same(one: str, other: str) -> str:
    return one if one == other else MIXED


def _sum_of_digests(one: str, other: str) -> str:
    return f"{(int(one, 16) + int(other, 16)) % (1 << 128):032x}"


class Part(Mergeable, frozen=True):
    """What ranks say of one context after a run."""

    ran: Annotated[str | None, _if_both(_same)] = None  # digest launched; MIXED; None: no launch
    worst_ms: Annotated[float, max] = -math.inf  # of the ranks' medians so far of the candidate on trial
    best_ms: Annotated[float, min] = math.inf
    measured: Annotated[int, operator.add] = 0  # ranks with a sample
    unmeasured: Annotated[int, operator.add] = 0  # ranks that launched it and have none
    pending: Annotated[int, operator.add] = 0  # ranks whose sample is not read yet (online)
    bans: Bans = {}
    announcement: Annotated[Announcement | None, _if_both(Announcement.merged)] = None
    gap_ms: Annotated[float, max] = 0.0  # how much of a rank's median may be its host's
    compiling: Annotated[int, max] = 0  # online: candidates that some rank has still to compile or load
    share: Annotated[int, max] = 0  # thousandths of the device that a launch of `ran` holds; 0: not known
    launches: Annotated[int, max] = 1  # in the run

    @property
    def agreed_ms(self) -> float | None:
        """Return the slowest rank's median; None where a rank that launched the candidate has no sample."""
        return None if self.unmeasured or not self.measured else self.worst_ms


class Bits(Mergeable, frozen=True):
    """What the outputs of a run were, bit for bit."""

    digest: Annotated[str, _sum_of_digests] = ""  # of every rank's outputs
    tensors: Annotated[int, operator.add] = 0  # among them
    differs: Annotated[Ban | None, _if_both(min)] = None  # the output unlike the session's first run; a rank


# Of a run in which a process ended: no more is known; a rank had raised, so others may have been killed; the
# launch in which it ended is known.
INEXACT, EXPLAINED, EXACT = range(3)
DEATHS_TO_BAN = 2  # one may be a scheduler's, or the user's


class Crash(Struct, frozen=True, omit_defaults=True):
    """A run that ended with its process killed, or with the exception that explains the kill."""

    rank: int
    run: int
    at: str  # when it was written
    kind: int  # INEXACT | EXPLAINED | EXACT
    suspects: dict[str, str] = {}  # context -> candidate, by digest

    def merged(self, other: Crash) -> Crash:
        """Return the crash of the latest run that is known most exactly."""
        return min(self, other, key=lambda each: (-each.run, -each.kind, each.rank, each.at))


class Message(Mergeable, frozen=True, tag_field="kind", tag=MIXED):
    """What ranks say at one exchange; of no kind where they sent different ones."""

    sent_at: ClassVar[str] = ""
    rank: Annotated[int, min] = 0
    facts: Annotated[Facts, _by_key(_by_key(min))] = {}  # equal on all ranks

    def merged(self, other: Message) -> Message:
        if type(self) is type(other):
            return super().merged(other)
        return Mergeable.merged(Message(self.rank, self.facts), Message(other.rank, other.facts))

    def encode(self) -> bytes:
        """Return the message as JSON."""
        return json.dumps(msgspec.to_builtins(self), separators=(",", ":"), sort_keys=True).encode()


class Opening(Message, frozen=True, tag="open"):
    """At the opening of a session: disk entries, and the crashes of earlier processes."""

    sent_at: ClassVar[str] = "the opening of a session"
    offers: Offers = {}
    crashes: Annotated[dict[str, Crash], _by_key(Crash.merged)] = {}  # by session


class RunReport(Message, frozen=True, tag="run"):
    """At the end of a run of a session."""

    sent_at: ClassVar[str] = "the end of a trial"
    offers: Offers = {}
    parts: Annotated[dict[str, Part], _by_key(Part.merged)] = {}  # by context
    run: Annotated[Part, Part.merged] = Part()  # time of the whole run
    bits: Annotated[Bits | None, _if_both(Bits.merged)] = None  # None: they are not compared
    elapsed_s: Annotated[float, max] = 0.0
    sent_ns: Annotated[int, max] = 0  # when the last rank sent this, where all read one clock
    lag_ns: Annotated[int, max] = 0  # how long after the exchange before the last rank came to this run
    wanted_ms: Annotated[float, max] = 0.0  # the filler that the slowest host wants before the next run
    host_ms: Annotated[float, max] = 0.0  # what the slowest host takes to enqueue a run; 0.0: not known
    late_ms: Annotated[float, max] = 0.0  # how much longer than usual some rank's host took for the trial

    def ran(self, name: str) -> str | None:
        """Return the candidate launched in a context, see `Part.ran`."""
        return self.parts[name].ran if name in self.parts else None

    @property
    def launched(self) -> frozenset[str]:
        """Return the contexts that some rank launched."""
        return frozenset(name for name, part in self.parts.items() if part.ran is not None)

    def in_order(self, known: Container[str]) -> list[str]:
        """Return the contexts of a run; new ones last, in the order of the lowest rank that has them."""
        places = {name: (-1, 0, name) for name in self.parts}
        for name, part in self.parts.items():
            if part.announcement is not None and name not in known:
                places[name] = part.announcement.rank, part.announcement.place, name
        return sorted(self.parts, key=places.__getitem__)

    def decisive(self) -> dict[str, Any]:
        """Return as data what the next plan follows from: all but facts and offers."""
        data: dict[str, Any] = msgspec.to_builtins(replace(self, facts={}, offers={}))
        return data


class InPlaceReport(Message, frozen=True, tag="in_place"):
    """Behind each of a call's first two runs: what is to be compared, then what the second changed."""

    sent_at: ClassVar[str] = "the comparison of a call's first two runs"
    found: Annotated[dict[str, int], _by_key(min)] = {}  # text -> rank; {}: nothing


M = TypeVar("M", bound=Message)
AnyMessage: TypeAlias = Message | Opening | RunReport | InPlaceReport


def decode(data: bytes) -> AnyMessage:
    """Return an encoded message."""
    return msgspec.convert(json.loads(data), AnyMessage)  # type: ignore[no-any-return]


def merge(first: bytes, *others: bytes) -> bytes:
    """Return encoded messages as one."""
    if not others:
        return first
    return functools.reduce(Message.merged, map(decode, (first, *others))).encode()


SAID_FIRST = ("the tuned function", "the source of the tuned function")  # of several facts that differ


def checked(merged: Message, kind: type[M], facts: Facts | None = None) -> M:
    """Return `merged` if all ranks sent a `kind`, with equal `facts` (None: its own); else RankMismatch."""
    facts = merged.facts if facts is None else facts
    for name in [*SAID_FIRST, *sorted(facts.keys() - set(SAID_FIRST))]:
        values = sorted(facts.get(name, {}).items(), key=lambda value: value[1])
        if len(values) > 1:
            raise RankMismatch(
                f"ranks differ in {name}: {'; '.join(f'rank {rank}: {value}' for value, rank in values)}. "
                "All ranks must run the same code with the same options, and call the tuned functions in the "
                "same order."
            )
    if not isinstance(merged, kind):
        raise RankMismatch(
            f"ranks are at different points of the program: not all of them are at {kind.sent_at}. "
            "All ranks must make the same calls of a tuned function, and of its retune(). The next call "
            "starts anew."
        )
    return merged


def bans_for_crashes(merged: Opening) -> CrashBans:
    """Return what all ranks ban for crashes of earlier processes: what was running in two of them."""
    deaths: dict[tuple[str, str], list[tuple[str, Crash]]] = {}
    for session, crash in sorted(merged.crashes.items(), key=lambda each: (each[1].at, each[0])):
        for suspect in crash.suspects.items():
            deaths.setdefault(suspect, []).append((session, crash))
    bans: CrashBans = {}
    for (context, candidate), ended in deaths.items():
        if len(ended) >= DEATHS_TO_BAN:
            runs = [f"run {crash.run} of session {session}, {crash.at}" for session, crash in ended]
            rank = ended[-1][1].rank
            reason = f"was running when rank {rank}'s process was killed ({'; '.join(runs)})"
            bans.setdefault(context, {})[candidate] = (rank, reason)
    return bans
