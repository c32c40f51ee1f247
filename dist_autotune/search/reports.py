"""Merges the reports of all ranks on the deciding rank, which has them by rank, the lowest first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import astuple, replace

from ..codec import digest
from ..errors import RankMismatch
from .messages import (
    DEATHS_TO_BAN,
    MIXED,
    Announcement,
    Ban,
    Bits,
    Crash,
    CrashBans,
    HostTimes,
    LaunchReport,
    Message,
    Offers,
    Opening,
    Part,
    RunReport,
    decode,
)

M = TypeVar("M", bound=Message)
Reports: TypeAlias = Mapping[int, bytes]  # by rank

SOURCE_OF = "the source of kernel "  # and its name: a fact that runs report
# Of a run the largest of all ranks counts.
_OF_SLOWEST = ("elapsed_s", "step_s", "apart", "apart_s", "retunes")
SAID_FIRST = "the source of the tuned function"  # of several facts that differ


class AgreedPart(LaunchReport, frozen=True, omit_defaults=True):
    """All ranks' report on a context; `ms` is None, too, where a rank that launched it has no sample."""

    best_ms: float = math.inf  # the fastest rank's
    ranks: int = 0  # that have a sample, or should have one
    bans: dict[str, Ban] = field(default_factory=dict)  # by the candidate's digest; the lowest rank's


class AgreedRun(Struct, frozen=True, omit_defaults=True):
    """All ranks' report on a run. The deciding rank's log keeps it."""

    parts: dict[str, AgreedPart] = {}  # by context; new ones last, as the lowest rank has met them
    run: AgreedPart = AgreedPart()  # the run as a whole
    bits: Bits | None = None
    elapsed_s: float = 0.0
    host: HostTimes = HostTimes()
    step_s: float = 0.0
    apart: int = 0
    apart_s: float = 0.0
    exchange_s: float = 0.0  # on the rank that waited least
    retunes: bool = False  # some rank asks for a new session

    def ran(self, name: str) -> str | None:
        """Return the candidate launched in a context, see `AgreedPart.ran`."""
        return self.parts[name].ran if name in self.parts else None

    @property
    def launched(self) -> frozenset[str]:
        """Return the contexts that some rank launched."""
        return frozenset(name for name, part in self.parts.items() if part.ran is not None)

    def as_data(self) -> dict[str, Any]:
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


def agreed_run(
    reports: Mapping[int, RunReport], names: Mapping[str, str], known: Container[str]
) -> AgreedRun:
    """Merge the ranks' reports on a run. names: new names of contexts; known: contexts that are not new."""
    each = reports.values()
    by_context: dict[str, dict[int, Part]] = {}
    for rank, report in reports.items():
        for name, part in report.parts.items():
            by_context.setdefault(names.get(name, name), {})[rank] = part
    parts = {name: agreed_part(of_ranks) for name, of_ranks in by_context.items()}

    def place(name: str) -> tuple[int, int, str]:
        new = None if name in known else parts[name].announcement
        return (-1, 0, name) if new is None else (new.rank, new.place, name)

    most = {name: max(getattr(report, name) for report in each) for name in _OF_SLOWEST}
    host = HostTimes(*map(max, zip(*(astuple(report.host) for report in each), strict=True)))
    return AgreedRun(
        parts={name: _with_late_host(parts[name], host.late_ms) for name in sorted(parts, key=place)},
        run=_with_late_host(agreed_part({r: report.run for r, report in reports.items()}), host.late_ms),
        host=host,
        bits=_agreed_bits([report.bits for report in each if report.bits is not None]),
        exchange_s=min(report.exchange_s for report in each),
        **most,
    )


def agreed_part(of_ranks: Mapping[int, Part]) -> AgreedPart:
    """Merge the ranks' reports on one context: the slowest one's time, all bans."""
    each = [*of_ranks.values()]
    ran = {part.ran for part in each if part.ran is not None}
    times = [part.ms for part in each if part.ms is not None]
    bans: dict[str, Ban] = {}
    for rank, part in of_ranks.items():
        for candidate, reason in part.bans.items():
            bans.setdefault(candidate, (rank, reason))
    unmeasured = sum([part.is_unmeasured for part in each])
    return AgreedPart(
        ran=MIXED if len(ran) > 1 else next(iter(ran), None),
        ms=max(times) if times and not unmeasured else None,
        best_ms=min(times, default=math.inf),
        gap_ms=max([part.gap_ms for part in each]),
        ranks=len(times) + unmeasured,
        is_pending=any(part.is_pending for part in each),
        bans=bans,
        announcement=_announced([p.announcement for p in each if p.announcement is not None]),
        compiling=max([part.compiling for part in each]),
        share=max([part.share for part in each]),
        launches=max([part.launches for part in each]),
    )


def announced_in(reports: Mapping[int, RunReport]) -> dict[str, Announcement]:
    """Return the ranks' announcements, by the names that they give contexts."""
    found: dict[str, list[Announcement]] = {}
    for report in reports.values():
        for name, part in report.parts.items():
            if part.announcement is not None:
                found.setdefault(name, []).append(part.announcement)
    return {name: each for name in sorted(found) if (each := _announced(found[name])) is not None}


def _announced(of_ranks: Sequence[Announcement]) -> Announcement | None:
    """Return the lowest rank's announcement of a context, with the candidates that all ranks share."""
    if len(of_ranks) < 2:
        return of_ranks[0] if of_ranks else None
    shared = set(of_ranks[0].shared).intersection(*(each.shared for each in of_ranks))
    return replace(
        of_ranks[0],
        shared=tuple(sorted(shared)),
        siblings=max(each.siblings for each in of_ranks),
        claim=next((each.claim for each in of_ranks if each.claim is not None), None),
        upgrade=min((each.upgrade for each in of_ranks if each.upgrade is not None), default=None),
    )


def _agreed_bits(of_ranks: Sequence[Bits]) -> Bits | None:
    if not of_ranks:
        return None
    return Bits(
        digest(" ".join(bits.digest for bits in of_ranks)),
        sum(bits.tensors for bits in of_ranks),
        next((bits.differs for bits in of_ranks if bits.differs is not None), None),
    )


def _with_late_host(part: AgreedPart, late_ms: float) -> AgreedPart:
    """Return the part with a late host's time in its sample: peers may have waited for its data."""
    if not late_ms or part.ms is None:
        return part
    return replace(part, gap_ms=max(part.gap_ms, min(late_ms, part.ms)))


# -- facts -------------------------------------------------------------------------------------------------


def read_reports(
    reports: Reports, kind: type[M], *, may_differ: Collection[str] = (), sources: Sources | None = None
) -> dict[int, M]:
    """Return the messages by rank; raises RankMismatch where some are of another kind, or ranks differ.

    may_differ: facts that ranks need not share. sources: of kernels, as reported before.
    """
    read: dict[int, Message] = {rank: decode(data) for rank, data in reports.items()}
    names = sorted({name for message in read.values() for name in message.facts} - {SAID_FIRST, *may_differ})
    for name in (SAID_FIRST, *names):
        values = values_of(read, name)
        if sources is not None and name.startswith(SOURCE_OF):
            values = sources.differing(name, values)
        if len(values) > 1:
            said = "; ".join(
                f"rank {rank}: {value}" for value, rank in sorted(values.items(), key=lambda each: each[1])
            )
            raise RankMismatch(
                f"ranks differ in {name}: {said}. All ranks must run the same code with the same options."
            )
    found = {rank: message for rank, message in read.items() if isinstance(message, kind)}
    if len(found) < len(read):
        raise RankMismatch(
            f"ranks are at different points of the program: not all of them are at {kind.sent_at}. "
            "All ranks must make the same calls of a tuned function, and of its retune(). The next call "
            "starts anew."
        )
    return found


def values_of(messages: Mapping[int, Message], name: str) -> dict[str, int]:
    """Return the values of a fact, each with the lowest rank that has it."""
    values: dict[str, int] = {}
    for rank, message in messages.items():
        if name in message.facts:
            values.setdefault(message.facts[name], rank)
    return values


class Sources:
    """The source texts of kernels, as ranks have reported them."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, int]] = {}  # by fact: value -> lowest rank

    def differing(self, name: str, values: dict[str, int]) -> dict[str, int]:
        """Return the values by which ranks differ in a kernel, each with a rank; empty: in none.

        A name may stand for several texts (functions made by functions), of which ranks may launch different
        ones: they differ where they have none in common.
        """
        known = self._known[name] = {**values, **self._known.get(name, {})}
        pairs = itertools.combinations([set(value.split()) for value in known], 2)
        return {} if all(one & other for one, other in pairs) else known


# -- disk entries and crashes ------------------------------------------------------------------------------


def offered(reports: Mapping[int, Opening]) -> Offers:
    """Return all disk entries that ranks offer; of one that several have, the lowest rank's."""
    offers: Offers = {}
    for report in reports.values():
        for entry, offer in report.offers.items():
            offers[entry] = min(offer, offers.get(entry, offer))
    return offers


def crashes_of(reports: Mapping[int, Opening]) -> dict[str, Crash]:
    """Return by session the crash of its latest run that is known most exactly."""
    crashes: dict[str, Crash] = {}
    for report in reports.values():
        for session, crash in report.crashes.items():
            known = crashes.get(session, crash)
            crashes[session] = min(known, crash, key=lambda each: (-each.run, -each.kind, each.rank, each.at))
    return crashes


def bans_for_crashes(crashes: Mapping[str, Crash]) -> CrashBans:
    """Return the bans for crashes of earlier processes: candidates that were running in two of them."""
    deaths: dict[tuple[str, str], list[tuple[str, Crash]]] = {}
    for session, crash in sorted(crashes.items(), key=lambda each: (each[1].at, each[0])):
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
