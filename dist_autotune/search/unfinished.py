"""What ranks say, when a session opens, of one that their processes did not live to end.

Like everything in a payload it merges in any order, and its size does not grow with the ranks: of all
journals one is used, the longest, and of each crashed session what is known best.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
"""A step of the state that all ranks share: `{"open": session}`; `{"merged": payload}`, of a run;
`{"bans": bans}`, for a crash; `{"again": session}`, where another process took it up."""


@dataclass(frozen=True)
class Past:
    """The events of a journal, from an empty state on."""

    session: str  # the last one among them
    rank: int  # whose journal it is
    devices: str  # of all ranks
    runs: int  # how many of the events are runs
    packed: str

    @classmethod
    def of(cls, session: str, rank: int, devices: str, events: list[Event]) -> Past:
        text = json.dumps(events, separators=(",", ":"), sort_keys=True)
        packed = base64.b85encode(zlib.compress(text.encode())).decode()
        return cls(session, rank, devices, sum("merged" in event for event in events), packed)

    @property
    def events(self) -> list[Event]:
        unpacked: list[Event] = json.loads(zlib.decompress(base64.b85decode(self.packed)))
        return unpacked

    def merged(self, other: Past) -> Past:
        """Return the one that knows most; of equals that of the lowest rank."""
        return max(self, other, key=lambda past: (past.runs, past.session, -past.rank, past.packed))


INEXACT, EXPLAINED, EXACT = range(3)
"""What is known of a run in which a process ended: that it did; that a rank had raised an exception, which is
why others may have been killed; inside which launch it did."""


@dataclass(frozen=True)
class Crash:
    """A run in the middle of which a process ended without a word, or of the exception that explains it."""

    rank: int
    run: int
    at: str  # when the run began
    kind: int
    suspects: dict[str, str] = field(default_factory=dict)  # context -> candidate, by digest

    def merged(self, other: Crash) -> Crash:
        """Return what is known best of the latest run."""
        known = [(crash.run, crash.kind) for crash in (self, other)]
        if known[0] != known[1]:
            return self if known[0] > known[1] else other
        first, second = sorted((self, other), key=lambda crash: (crash.rank, crash.at))
        return dataclasses.replace(first, suspects={**second.suspects, **first.suspects})


def merged_crashes(one: dict[str, Crash], other: dict[str, Crash]) -> dict[str, Crash]:
    """Return the crashes of both, by session."""
    both = {session: one[session].merged(other[session]) for session in one.keys() & other.keys()}
    return {**one, **other, **both}
