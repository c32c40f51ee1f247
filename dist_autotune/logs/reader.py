"""Reads a log directory: the records of all ranks, put together by session and context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..codec import escaped, from_json, parse_json
from ..formatting import counted
from ..regular_files import open_regular
from .history import ContextHistory, History, SessionHistory, of_kind
from .records import (
    RECORD_TYPES,
    SCHEMA_VERSION,
    Agreed,
    ContextAdmitted,
    ContextRecord,
    ContextSettled,
    Record,
    SessionOpened,
    Trial,
)

LONGEST_LINE_BYTES = 64 << 20  # a longer one is read in parts, which are no records

_Contexts = dict[str, list[ContextRecord]]


def load(directory: Path) -> History:
    """Return the sessions in the `rank-N.jsonl` files of `directory`."""
    records: dict[str, list[Record]] = {}
    skipped: dict[str, Counter[str]] = {}
    for path in sorted(directory.glob("rank-*.jsonl"), key=lambda path: (len(path.name), path.name)):
        unreadable: Counter[str] = Counter()
        for record in read_records(path, unreadable):
            if record.session:  # the exchange that names a session is logged before it has its name
                records.setdefault(record.session, []).append(record)
        if unreadable:
            skipped[path.name] = unreadable
    known: dict[str, _Contexts] = {}
    sessions = []
    for own in records.values():
        if opened := of_kind(own, SessionOpened):
            sessions.append(_session(opened[0], own, known))
        else:
            for record in own:
                reasons = skipped.setdefault(f"rank-{record.rank}.jsonl", Counter())
                reasons["of a session whose opening is lost"] += 1
    return History(directory, tuple(sessions), skipped)


def _session(opened: SessionOpened, records: Sequence[Record], known: dict[str, _Contexts]) -> SessionHistory:
    """Return one session. known: the contexts of the sessions before it, to which it adds its own."""
    earlier = known.get(opened.continues, {})
    contexts: _Contexts = {}
    for record in of_kind(records, ContextRecord):
        contexts.setdefault(record.context, []).append(record)
    for context, own in contexts.items():
        before = earlier.get(context, [])
        if of_kind(before, ContextSettled) and not any(map(_is_of_search, own)):
            contexts[context] = [*before, *own]  # only launched here: shown as it was settled
    known[opened.session] = {**earlier, **contexts}
    is_alone = opened.world_size == 1
    shown = (ContextHistory(tuple(own), is_alone) for own in contexts.values() if _is_choice(own))
    return SessionHistory(opened, tuple(records), tuple(shown))


def _is_of_search(record: ContextRecord) -> bool:
    is_trial = isinstance(record, Trial) and record.kind != "incumbent"
    return is_trial or isinstance(record, ContextSettled | Agreed)


def _is_choice(records: Sequence[ContextRecord]) -> bool:
    """Return whether a context has several candidates, or may have: its admission is lost."""
    admitted = of_kind(records, ContextAdmitted)
    return not admitted or any(len(record.candidates) > 1 for record in admitted)


def read_records(path: Path, skipped: Counter[str]) -> Iterator[Record]:
    """Yield the records of a `rank-N.jsonl` file in order; count unusable lines by reason in `skipped`."""
    try:
        with open_regular(path) as file:
            while line := file.readline(LONGEST_LINE_BYTES):
                try:
                    if line.strip():
                        yield _record(line)
                except ValueError as error:
                    skipped[str(error)] += 1
    except ValueError as error:
        skipped[str(error)] += 1


def describe_skipped(reasons: Counter[str]) -> str:
    """Return `skipped 3 lines: 2 x damaged, 1 x schema 2, expected 1`."""
    listed = ", ".join(f"{n} x {reason}" for reason, n in reasons.items())
    return f"skipped {counted(reasons.total(), 'line')}: {listed}"


def _record(line: bytes) -> Record:
    """Return the record of one line; a ValueError says in a few words why there is none."""
    try:
        data: Any = parse_json(line)
        if b"\\ud" in line.lower():
            data = escaped(data)
        schema, event = data["schema"], str(data["event"])
    except (ValueError, TypeError, KeyError):
        raise ValueError("damaged") from None
    if schema != SCHEMA_VERSION:
        raise ValueError(f"schema {schema}, expected {SCHEMA_VERSION}")
    if event not in RECORD_TYPES:
        raise ValueError(f"unknown event {event!r}")
    try:
        return from_json(RECORD_TYPES[event], data)
    except ValueError as error:
        raise ValueError(f"damaged {event} ({error})") from None
