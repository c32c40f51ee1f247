"""Compares what ranks wrote down of their decisions with the same decisions made again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..formatting import context_label
from ..logs.records import Agreed, Banned, ContextAdmitted, ContextRecord, ContextSettled, Record, Trial
from ..search.context_search import Outcome
from ..search.rules import BY_RUN
from ..search.state import Tuning

_OF_THE_RANK = ("session", "rank", "elapsed_s", "local")  # fields in which the ranks' records may differ
_OF_DECISIONS = (ContextAdmitted, Agreed, Banned, ContextSettled)


@dataclass(frozen=True)
class Difference:
    """Something that was recorded and does not follow from what was recorded before it."""

    run: int | None
    about: str  # a context, a rank, or "session"
    what: str
    recorded: str
    recomputed: str


class Comparison:
    """The differences of one session."""

    def __init__(self) -> None:
        self.compared = 0  # records
        self.differences: list[Difference] = []

    def differ(self, run: int | None, about: str, what: str, recorded: str, recomputed: str) -> None:
        self.differences.append(Difference(run, about, what, recorded, recomputed))

    def field(self, run: int | None, about: str, what: str, recorded: Any, recomputed: Any) -> None:
        """Compare two values."""
        if recorded != recomputed:
            self.differ(run, about, what, str(recorded), str(recomputed))

    def records(
        self,
        run: int,
        rank: int,
        records: Sequence[Record],
        expected: Sequence[ContextRecord],
        tuning: Tuning,
    ) -> None:
        """Compare the decisions of one run as `rank` wrote them down with the `expected` ones."""
        recorded = {_identity(r): r for r in records if isinstance(r, _OF_DECISIONS) and not _is_own_ban(r)}
        for record in expected:
            if isinstance(record, Banned) and record.by_rank == rank:
                continue  # written down when it was found
            about, other = context_label(record.kernel, record.key), recorded.pop(_identity(record), None)
            if other is None:
                self.differ(run, about, f"{record.event} of rank {rank}", "nothing", _summary(record))
                continue
            self.compared += 1
            for field in dataclasses.fields(record):
                if field.name not in _OF_THE_RANK:
                    values = getattr(other, field.name), getattr(record, field.name)
                    self.field(run, about, f"{record.event} of rank {rank}: {field.name}", *values)
        for record in recorded.values():
            if not _is_standing_ban(record, tuning):
                about = context_label(record.kernel, record.key)
                self.differ(run, about, f"{record.event} of rank {rank}", _summary(record), "nothing")

    def trials(self, run: int, records: Sequence[Record], outcomes: Mapping[str, Outcome]) -> None:
        """Compare what a rank took its launches of one run for with what they were."""
        for trial in records:
            if not isinstance(trial, Trial):
                continue
            about, what = context_label(trial.kernel, trial.key), f"trial of rank {trial.rank}"
            outcome = outcomes.get(trial.context)
            if outcome is None:
                self.differ(run, about, what, "launched", "no rank said so")
                continue
            self.compared += 1
            kind = f"{trial.kind} {trial.k} by {trial.judge}"
            self.field(run, about, what, kind, f"{outcome.kind} {outcome.k} by {outcome.judge}")
            if outcome.kind != "incumbent" and outcome.judge != BY_RUN:
                self.field(run, about, f"{what}: config_id", trial.config_id, outcome.index)


def _is_own_ban(record: Record) -> bool:
    return isinstance(record, Banned) and record.by_rank == record.rank


def _is_standing_ban(record: ContextRecord, tuning: Tuning) -> bool:
    """Return whether `record` tells of a ban that the session opened with."""
    context = tuning.contexts.get(record.context)
    if not isinstance(record, Banned) or context is None:
        return False
    return context.banned.get(record.config_id) == (record.by_rank, record.reason)


def _identity(record: ContextRecord) -> tuple[str, str, int]:
    return record.event, record.context, record.config_id if isinstance(record, Banned) else -1


def _summary(record: ContextRecord) -> str:
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    shown = ("status", "config", "ms", "counted", "reason", "incumbent")
    return ", ".join(f"{name} {values[name]}" for name in shown if name in values)
