"""Sessions as a trace in Chrome's JSON format: a process per rank, a row per context. Perfetto reads it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..codec import to_json
from .history import SessionHistory
from .timeline import BEHIND, COMPILING, EXCHANGE, TRIAL, Span, spans_of

Event = dict[str, Any]
SESSION = "session"


def write_trace(path: Path, sessions: Iterable[SessionHistory]) -> None:
    """Write one trace of the sessions, one after the other as they were started."""
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
        whole = Span(SESSION, session.opened.thunk, 0.0, max((s.end_s for s in own), default=0.0), facts)
        for span in (whole, *own):
            place = rank, _row(span)
            if place not in rows:
                rows[place] = len(rows)
                yield _named(rank, "thread_name", place[1], rows[place])
            yield _event(span, rank, rows[place], offset_s)


def _row(span: Span) -> str:
    """Return the row of a span; spans of one row nest."""
    if span.kind == TRIAL:
        return f"trials {span.name.rpartition(' #')[0]}"
    if span.kind in (COMPILING, BEHIND):
        return f"compiling {span.name}"
    return "session" if span.kind == SESSION else "runs and exchanges"


def _named(rank: int, what: str, name: str, row: int = 0) -> Event:
    return {"ph": "M", "pid": rank, "tid": row, "name": what, "args": {"name": name}}


def _event(span: Span, rank: int, row: int, offset_s: float) -> Event:
    begin_us, end_us = ((offset_s + s) * 1e6 for s in (span.begin_s, span.end_s))
    return {
        "ph": "X", "pid": rank, "tid": row, "name": span.name, "cat": span.kind, "ts": begin_us,
        "dur": end_us - begin_us, "args": span.facts,
    }  # fmt: skip
