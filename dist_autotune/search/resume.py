"""Takes up a session where a process that is gone has left it. No torch, no I/O, no clock.

The state that ranks share follows from what they said of each run and from nothing else (`protocol`), so it
is made again by saying the same once more. What was being tried when a process ended without a word is then
banned, as if it had failed in that run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from .messages import Payload
from .state import Tuning
from .unfinished import Crash, Event, Past

Bans: TypeAlias = dict[str, dict[str, tuple[int, str]]]
"""Context -> candidate -> (rank, reason)."""


@dataclass
class Resumed:
    """What an earlier session has left."""

    events: list[Event]  # that make the state, the last crash's bans included
    bans: Bans = field(default_factory=dict)  # for the last crash
    runs: int = 0


def resume(tuning: Tuning, past: Past, crashes: dict[str, Crash], devices: str) -> Resumed:
    """Bring `tuning`, an empty state, to where the past ends; then ban what was running in the crashes.

    On other devices it begins anew, with the bans. The same on all ranks. Raises NoValidConfig where
    nothing is left to launch.
    """
    is_same = past.devices == devices
    resumed = Resumed(past.events if is_same else [{"open": past.session}], runs=past.runs if is_same else 0)
    ran = relive(tuning, resumed.events)
    if tuning.closing or tuning.done:
        resumed.events.append({"open": past.session})
        relive(tuning, resumed.events[-1:])
    resumed.bans = bans_for(crashes, ran)
    if resumed.bans:
        resumed.events.append({"bans": resumed.bans})
        relive(tuning, resumed.events[-1:])
    resumed.events.append({"again": past.session})
    relive(tuning, resumed.events[-1:])
    return resumed


def relive(tuning: Tuning, events: Iterable[Event]) -> set[tuple[str, str]]:
    """Let `tuning` live through the events; return what completed a run, as (context, candidate)."""
    ran: set[tuple[str, str]] = set()
    for event in events:
        if "open" in event:
            tuning.open()
            tuning.session = event["open"]
        elif "merged" in event:
            said = Payload.of_data(event["merged"])
            merged, _ = tuning.kernels.unite(said, tuning.contexts)
            tuning.step(merged)
            tuning.elapsed_before_s = merged.elapsed_s
            tuning.remark = ""
            ran |= {(name, part.ran) for name, part in merged.parts.items() if part.ran is not None}
        elif "again" in event:
            tuning.await_confirmation()
        elif "bans" in event:
            tuning.rule_out(
                {
                    context: {candidate: (ban[0], ban[1]) for candidate, ban in bans.items()}
                    for context, bans in event["bans"].items()
                }
            )
    return ran


def bans_for(crashes: dict[str, Crash], ran: set[tuple[str, str]]) -> Bans:
    """Return whom to suspect: of the candidates on trial those that had never completed a run, else all."""
    bans: Bans = {}
    for session, crash in sorted(crashes.items()):
        new = {context: c for context, c in crash.suspects.items() if (context, c) not in ran}
        reason = (
            f"was running when rank {crash.rank}'s process ended without a word "
            f"(run {crash.run} of session {session}, {crash.at})"
        )
        for context, candidate in (new or crash.suspects).items():
            bans.setdefault(context, {})[candidate] = (crash.rank, reason)
    return bans
