"""The messages of a rank to the deciding rank: one per exchange."""

from __future__ import annotations

from typing import ClassVar, Final, TypeAlias

from msgspec import Struct, field, msgpack

from ..codec import builtin

MIXED = "*"  # launches of one run did not all use one candidate

Ban: TypeAlias = tuple[int, str]  # (rank, its reason)
CrashBans: TypeAlias = dict[str, dict[str, Ban]]  # by context; the rank is that whose process ended
Facts: TypeAlias = dict[str, str]  # by name; most are the same on all ranks
Claim: TypeAlias = tuple[int, str, float | None]  # (rank, digest, ms)
# After an upgrade (rank, what the old result was found with, digests to race, the old winner first).
Upgrade: TypeAlias = tuple[int, str, tuple[str, ...]]


class Offer(Struct, frozen=True, order=True):
    """A rank's result on disk for one key of a kernel."""

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


Offers: TypeAlias = dict[str, Offer]  # by the digest of the entry


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
        """Return the versions of an old result, and all candidates, first those that are raced again.

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


class LaunchReport(Struct, frozen=True, omit_defaults=True):
    """A report on one context after a run, or on the run as a whole; of one rank, or of all."""

    ran: str | None = None  # digest launched; MIXED; None: no launch
    ms: float | None = None  # the slowest rank's median so far of the candidate on trial; None: no sample
    gap_ms: float = 0.0  # how much of it may be the host's
    is_pending: bool = False  # online: the sample is not read yet
    announcement: Announcement | None = None
    compiling: int = 0  # online: candidates still to be compiled or loaded
    share: int = 0  # thousandths of the device that a launch of `ran` holds; 0: not known
    launches: int = 1  # in the run


class Part(LaunchReport, frozen=True, omit_defaults=True):
    """One rank's report on a context after a run."""

    is_unmeasured: bool = False  # the launches were timed, and there is no sample
    bans: dict[str, str] = field(default_factory=dict)  # candidates that failed, with reasons


class Bits(Struct, frozen=True, omit_defaults=True):
    """The digest of a run's outputs."""

    digest: str = ""
    tensors: int = 0  # among them
    differs: Ban | None = None  # the output unlike the session's first run; a rank


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


_encode: Final = msgpack.Encoder(enc_hook=builtin).encode


class Message(Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    """A rank's message at one exchange."""

    sent_at: ClassVar[str] = ""
    facts: Facts = {}

    def encode(self) -> bytes:
        return _encode(self)


class Opening(Message, frozen=True, tag="open"):
    """At the opening of a session: disk entries, and the crashes of earlier processes."""

    sent_at: ClassVar[str] = "the opening of a session"
    offers: Offers = {}
    crashes: dict[str, Crash] = {}  # by session


class HostTimes(Struct, frozen=True, omit_defaults=True):
    """How late a rank's host came to a run, and how long it took for it; of all ranks, the most of each."""

    sent_ns: int = 0  # when its report was sent, where all ranks read one clock
    lag_ns: int = 0  # how long after the exchange before it came to this run
    wanted_ms: float = 0.0  # the filler that it wants before the next run
    enqueue_ms: float = 0.0  # what it takes to enqueue a run; 0.0: not known
    late_ms: float = 0.0  # how much longer than usual it took for the trial


class RunReport(Message, frozen=True, tag="run"):
    """At the end of a run of a session."""

    sent_at: ClassVar[str] = "the end of a trial"
    parts: dict[str, Part] = {}  # by context
    run: Part = Part()  # time of the whole run
    bits: Bits | None = None  # None: they are not compared
    elapsed_s: float = 0.0
    host: HostTimes = HostTimes()
    step_s: float = 0.0  # since the run before, or the exchange after that, has ended
    apart: int = 0  # runs since the last exchange, before this one
    apart_s: float = 0.0  # of one of them
    exchange_s: float = 0.0  # that the last exchange took between two runs
    retunes: bool = False  # this rank asks for a new session, see `retune`


class InPlaceReport(Message, frozen=True, tag="in_place"):
    """After each of a call's first two runs: the tensors to compare, then those that the second changed."""

    sent_at: ClassVar[str] = "the comparison of a call's first two runs"
    found: str = ""  # "": nothing


class Captured(Message, frozen=True, tag="captured"):
    """Once this rank can replay a run."""

    sent_at: ClassVar[str] = "the capture of a run"


AnyMessage: TypeAlias = Opening | RunReport | InPlaceReport | Captured
decode: Final = msgpack.Decoder(AnyMessage).decode
