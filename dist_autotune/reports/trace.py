"""Sessions as a trace in Chrome's JSON format: a process per rank, a row per context. Perfetto reads it."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..codec import to_json
from ..formatting import config_label, context_label
from ..logs.records import Exchanged, Preflighted, Record, RunStarted, RunTimed, Trial
from ..regular_files import require_directory_of
from .history import SessionHistory, of_kind

Event = dict[str, Any]
SESSION = "session"
RUN, TRIAL, EXCHANGE, COMPILING = "run", "trial", "exchange", "compiling"
BEHIND = "compiling behind"  # while runs went on


def write_trace(path: Path, sessions: Iterable[SessionHistory]) -> None:
    """Write one trace of the sessions, one after the other as they were started."""
    require_directory_of(path)
    events: list[Event] = []
    rows: dict[tuple[int, str], int] = {}  # of (rank, name): the same in every session
    origin, end_s = None, 0.0
    for session in sessions:
        started = _started_s(session)
        origin = started if origin is None else origin
        begin_s = max(started - origin, end_s)
        events += (own := list(_session_events(session, begin_s, rows)))
        end_s = max((event["ts"] + event["dur"] for event in own if event["ph"] == "X"), default=0.0) / 1e6
    path.write_text(to_json({"displayTimeUnit": "ms", "traceEvents": events}), "utf-8")


def _started_s(session: SessionHistory) -> float:
    try:
        return datetime.datetime.fromisoformat(session.opened.started_at).timestamp()
    except ValueError:  # for people; a log may hold anything
        return 0.0


def _session_events(
    session: SessionHistory, begin_s: float, rows: dict[tuple[int, str], int]
) -> Iterator[Event]:
    """Yield the events of all ranks; their clocks meet at the end of the exchange that opens the session."""
    spans = spans_of(session)
    opened_s = {rank: next((s.end_s for s in own if s.kind == EXCHANGE), 0.0) for rank, own in spans.items()}
    latest_s = max(opened_s.values(), default=0.0)
    for rank, own in spans.items():
        offset_s = begin_s + latest_s - opened_s[rank]
        yield _named(rank, "process_name", f"rank {rank}")
        closed = session.closed
        facts = {"session": session.opened.session, "outcome": closed.outcome, "runs": closed.runs}
        end_s = max((s.end_s for s in own), default=0.0)
        whole = Span(SESSION, session.opened.thunk, 0.0, end_s, facts, row="session")
        for span in (whole, *own):
            place = rank, span.row
            if place not in rows:
                rows[place] = len(rows)
                yield _named(rank, "thread_name", span.row, rows[place])
            yield _event(span, rank, rows[place], offset_s)


def _named(rank: int, what: str, name: str, row: int = 0) -> Event:
    return {"ph": "M", "pid": rank, "tid": row, "name": what, "args": {"name": name}}


def _event(span: Span, rank: int, row: int, offset_s: float) -> Event:
    begin_us, end_us = ((offset_s + s) * 1e6 for s in (span.begin_s, span.end_s))
    return {
        "ph": "X", "pid": rank, "tid": row, "name": span.name, "cat": span.kind, "ts": begin_us,
        "dur": end_us - begin_us, "args": span.facts,
    }  # fmt: skip


# -- when runs, trials, compilations and exchanges began and ended on each rank ---------------------------


@dataclass(frozen=True)
class Span:
    """An interval on one rank, in seconds since the session opened there."""

    kind: str
    name: str
    begin_s: float
    end_s: float
    facts: dict[str, Any]
    row: str = "runs and exchanges"  # on which spans nest


def spans_of(session: SessionHistory) -> dict[int, list[Span]]:
    """Return rank -> spans; spans within a run lie within the run's span.

    A run ends with the last record that it leaves. A trial fills its run up to compilations and the exchange:
    the log does not say when in the run its launches were; their time is in the facts.
    """
    records: dict[int, list[Record]] = {rank: [] for rank in session.ranks}
    for record in session.records:
        if 0 <= record.elapsed_s < math.inf:
            records[record.rank].append(record)
    return {rank: _rank_spans(own) for rank, own in records.items()}


def _rank_spans(own: Sequence[Record]) -> list[Span]:
    starts = [place for place, record in enumerate(own) if isinstance(record, RunStarted)]
    spans = [_exchange(record, 0.0) for record in of_kind(own[: starts[0] if starts else None], Exchanged)]
    for start, end in pairwise([*starts, len(own)]):
        spans += _run_spans(own[start:end])
    return spans


def _run_spans(records: Sequence[Record]) -> Iterator[Span]:
    """Yield the spans of one run, the run itself first."""
    started = records[0]
    assert isinstance(started, RunStarted)
    of_run = [record for record in records if getattr(record, "run", None) == started.run]
    begin_s, end_s = started.elapsed_s, max(record.elapsed_s for record in of_run)
    inner = []
    for record in of_run:
        if isinstance(record, Preflighted):
            inner.append(_compiling(record, begin_s))
        elif isinstance(record, Exchanged):
            inner.append(_exchange(record, begin_s))
    trials = [trial for trial in of_kind(of_run, Trial) if trial.kind != "incumbent"]
    plans = [] if trials else of_kind(of_run, RunTimed)
    yield Span(RUN, f"run {started.run}", begin_s, end_s, {"trials": len(trials) or len(plans)})
    worked_s = min((span.begin_s for span in inner if span.kind != BEHIND), default=end_s)
    for trial in trials:
        label = context_label(trial.kernel, trial.key)
        facts = {
            "config": config_label(trial.config), "kind": trial.kind, "ms": trial.ms,
            "launches": trial.launches, "judge": trial.judge, "run": trial.run,
        }  # fmt: skip
        yield Span(TRIAL, f"{label} #{trial.config_id}", begin_s, worked_s, facts, f"trials {label}")
    for plan in plans:
        facts = {"counts": plan.counts, "ms": plan.ms, "judge": "run", "run": plan.run}
        yield Span(TRIAL, f"whole run #{plan.judged}", begin_s, worked_s, facts, "trials whole run")
    yield from inner


def _compiling(record: Preflighted, begin_s: float) -> Span:
    facts = {
        name: getattr(record, name) for name in ("compiled", "from_peers", "cached", "failed", "workers")
    }
    began_s = max(record.elapsed_s - record.seconds, 0.0)
    kind = BEHIND if began_s < begin_s else COMPILING
    label = context_label(record.kernel, record.key)
    return Span(kind, label, began_s, record.elapsed_s, facts, f"compiling {label}")


def _exchange(record: Exchanged, begin_s: float) -> Span:
    began_s = max(begin_s, record.elapsed_s - record.ms / 1e3)
    facts = {"sent_bytes": record.sent_bytes, "received_bytes": record.received_bytes}
    return Span(EXCHANGE, "exchange", began_s, max(began_s, record.elapsed_s), facts)
