"""When runs, trials, compilations and exchanges began and ended on each rank, from their records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..formatting import config_label, context_label
from ..logs.records import Exchanged, Preflighted, Record, RunStarted, RunTimed, Trial
from .history import SessionHistory, of_kind

RUN, TRIAL, EXCHANGE, COMPILING = "run", "trial", "exchange", "compiling"
BEHIND = "compiling behind"  # while runs went on


@dataclass(frozen=True)
class Span:
    """An interval on one rank, in seconds since the session opened there."""

    kind: str
    name: str
    begin_s: float
    end_s: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


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
        name = f"{context_label(trial.kernel, trial.key)} #{trial.config_id}"
        facts = {
            "config": config_label(trial.config), "kind": trial.kind, "ms": trial.ms,
            "launches": trial.launches, "judge": trial.judge, "run": trial.run,
        }  # fmt: skip
        yield Span(TRIAL, name, begin_s, worked_s, facts)
    for plan in plans:
        facts = {"counts": plan.counts, "ms": plan.ms, "judge": "run", "run": plan.run}
        yield Span(TRIAL, f"whole run #{plan.judged}", begin_s, worked_s, facts)
    yield from inner


def _compiling(record: Preflighted, begin_s: float) -> Span:
    facts = {
        name: getattr(record, name) for name in ("compiled", "from_peers", "cached", "failed", "workers")
    }
    began_s = max(record.elapsed_s - record.seconds, 0.0)
    kind = BEHIND if began_s < begin_s else COMPILING
    return Span(kind, context_label(record.kernel, record.key), began_s, record.elapsed_s, facts)


def _exchange(record: Exchanged, begin_s: float) -> Span:
    began_s = max(begin_s, record.elapsed_s - record.ms / 1e3)
    facts = {"sent_bytes": record.sent_bytes, "received_bytes": record.received_bytes}
    return Span(EXCHANGE, "exchange", began_s, max(began_s, record.elapsed_s), facts)
