"""Histories read from a log directory, session by session."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..logs.records import (
    ContextAdmitted,
    ContextRecord,
    ContextSettled,
    Note,
    Record,
    RunFailed,
    RunStarted,
    SessionClosed,
    SessionOpened,
    Trial,
    describe_skipped,
    read_records,
)
from ..timing.time_spent import SecondsSpent
from ..tuner.report import TuningReport, percent_over, time_order
from .contexts import ContextHistory, is_sample, of_kind


@dataclass(frozen=True)
class Straggler:
    """How often a rank was the slowest in a sample that several took, and its usual lag."""

    rank: int
    slowest_samples: int
    compared_samples: int
    behind_percent: float  # median over the compared samples, against the fastest rank of each


@dataclass(frozen=True)
class SessionHistory:
    """One session as its ranks logged it."""

    opened: SessionOpened
    records: tuple[Record, ...]  # rank by rank
    contexts: tuple[ContextHistory, ...]  # those with a choice, in the order of the report

    @cached_property
    def report(self) -> TuningReport:
        """Return the report that the program could ask for."""
        opened, closed = self.opened, self.closed
        return TuningReport(
            runs=closed.runs,
            contexts=tuple(context.tuned for context in self.contexts),
            world_size=opened.world_size,
            seconds=closed.seconds or max(record.elapsed_s for record in self.records),
            clock=opened.clock,
            warning=closed.warning,
            spent=SecondsSpent(closed.compiling_s, closed.runs_s, closed.exchanges_s),
            function=opened.thunk,
            session=opened.session,
            operations=closed.operations,
            cost=closed.cost,
            gain=closed.gain,
        )

    def of_kernels(self, part: str) -> SessionHistory:
        """Return the session with the contexts of kernels that have this in their name."""
        return replace(self, contexts=tuple(each for each in self.contexts if part in each.tuned.kernel))

    @cached_property
    def closed(self) -> SessionClosed:
        """Return the record of its end; `unfinished`: there is none."""
        runs = max((record.run for record in of_kind(self.records, RunStarted)), default=-1) + 1
        unfinished = SessionClosed(runs=runs, contexts=0, outcome="unfinished")
        return next(iter(of_kind(self.records, SessionClosed)), unfinished)

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that have logs here."""
        return sorted({record.rank for record in self.records})

    @property
    def has_samples(self) -> bool:
        return any(candidate.samples for context in self.contexts for candidate in context.candidates)

    @property
    def hosts(self) -> list[str]:
        """Return the hosts of the ranks, each once; empty in a log of an older version."""
        opened = of_kind(self.records, SessionOpened)
        return list(dict.fromkeys(each.node for each in opened if each.node))

    def remarks(self) -> list[str]:
        """Return failed runs and notes, each text once: most notes are written by all ranks.

        Of notes on remaining work only the last one, and only while the session is under way.
        """
        outlooks = [each for each in of_kind(self.records, Note) if each.is_outlook]
        last = outlooks[-1].text if outlooks and self.closed.outcome == "unfinished" else None
        texts: dict[str, None] = {}
        for record in self.records:
            if isinstance(record, RunFailed):
                texts[f"Run {record.run} failed on rank {record.by_rank}: {record.error}"] = None
            elif isinstance(record, Note) and (not record.is_outlook or record.text == last):
                texts[record.text] = None
        return list(texts)

    def stragglers(self) -> list[Straggler]:
        """Compare the ranks within each sample: the same context, run and config."""
        samples: defaultdict[tuple[str, int, int], dict[int, float]] = defaultdict(dict)
        for trial in filter(is_sample, of_kind(self.records, Trial)):
            samples[trial.context, trial.run, trial.config_id][trial.rank] = trial.ms or 0.0
        behind: defaultdict[int, list[float]] = defaultdict(list)
        slowest: Counter[int] = Counter()
        for by_rank in samples.values():
            fastest_ms, slowest_ms = min(by_rank.values()), max(by_rank.values())
            for rank, ms in by_rank.items() if len(by_rank) > 1 else ():
                behind[rank].append(percent_over(ms, fastest_ms) or 0.0)
                slowest[rank] += ms == slowest_ms > fastest_ms
        return [
            Straggler(rank, slowest[rank], len(lags), statistics.median(lags))
            for rank, lags in sorted(behind.items())
        ]


@dataclass(frozen=True)
class History:
    """All sessions of a log directory, oldest first."""

    directory: Path
    sessions: tuple[SessionHistory, ...]
    skipped: Mapping[str, str]  # file name -> how many of its lines cannot be read, and why

    def newest(self) -> tuple[SessionHistory, ...]:
        """Return the newest session of each function, if possible one that timed something."""
        in_order = sorted(self.sessions, key=lambda session: session.has_samples)
        return tuple({session.opened.thunk: session for session in in_order}.values())


def load_history(directory: Path) -> History:
    """Return the sessions in the `rank-N.jsonl` files of `directory`."""
    records: dict[str, list[Record]] = {}
    skipped: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(directory.glob("rank-*.jsonl"), key=_in_order):
        for record in read_records(path, skipped[path.name]):
            if record.session:  # the exchange that names a session is logged before it has its name
                records.setdefault(record.session, []).append(record)
    sessions = []
    for own in records.values():
        if opened := of_kind(own, SessionOpened):
            sessions.append(_session(opened[0], own))
        else:
            for record in own:
                skipped[f"rank-{record.rank}.jsonl"]["of a session whose opening is lost"] += 1
    unread = {name: describe_skipped(reasons) for name, reasons in skipped.items() if reasons}
    return History(directory, tuple(sessions), unread)


def _in_order(path: Path) -> tuple[bool, int, str]:
    """Return the key that sorts logs by rank, older ones first."""
    return ".older." not in path.name, len(path.name), path.name


def _session(opened: SessionOpened, records: Sequence[Record]) -> SessionHistory:
    """Return one session, with the contexts that it has tried or settled, where there was a choice."""
    contexts: defaultdict[str, list[ContextRecord]] = defaultdict(list)
    for record in of_kind(records, ContextRecord):
        contexts[record.context].append(record)
    shown = []
    for own in contexts.values():
        counts = [len(record.candidates) for record in of_kind(own, ContextAdmitted)]
        is_choice = max(counts, default=2) > 1  # as is one whose admission is lost
        is_tried = any(trial.kind != "incumbent" for trial in of_kind(own, Trial))
        if is_choice and (is_tried or of_kind(own, ContextSettled)):
            shown.append(ContextHistory(tuple(own), opened.world_size == 1))
    shown.sort(key=lambda context: time_order(context.tuned))
    return SessionHistory(opened, tuple(records), tuple(shown))
