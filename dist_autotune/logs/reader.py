"""Reads a log directory: the records of all ranks, put together by session, context and candidate."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .analysis import (
    CandidateHistory,
    Compiling,
    ContextHistory,
    History,
    RankTimes,
    SessionHistory,
    Step,
    Straggler,
    percent_over,
)
from .records import (
    Agreed,
    Banned,
    ContextAdmitted,
    ContextRecord,
    ContextSettled,
    Note,
    Preflighted,
    Record,
    RunFailed,
    RunStarted,
    SessionClosed,
    SessionOpened,
    Trial,
)
from .writer import read_records


def load(directory: Path) -> History:
    """Return the sessions that the `rank-N.jsonl` files of `directory` tell of, if there are any."""
    return of_sessions(directory, *read_sessions(directory))


def of_sessions(
    directory: Path, sessions: Mapping[str, Sequence[Record]], skipped: Mapping[str, Counter[str]]
) -> History:
    """Return the history of sessions that `read_sessions` has read."""
    known: dict[str, dict[str, list[ContextRecord]]] = {}
    histories = tuple(_session(name, records, known) for name, records in sessions.items())
    return History(directory, histories, skipped)


def read_sessions(directory: Path) -> tuple[dict[str, list[Record]], dict[str, Counter[str]]]:
    """Return the records of each session, rank by rank; and file -> why how many lines were left out."""
    sessions: dict[str, list[Record]] = {}
    skipped: dict[str, Counter[str]] = {}
    for path in sorted(directory.glob("rank-*.jsonl"), key=_rank_of):
        unreadable: Counter[str] = Counter()
        for record in read_records(path, unreadable):
            if record.session:  # the exchange that names a session is logged before it has its name
                sessions.setdefault(record.session, []).append(record)
        if unreadable:
            skipped[path.name] = unreadable
    return sessions, skipped


def _rank_of(path: Path) -> tuple[int, str]:
    digits = re.search(r"\d+", path.name)
    return (int(digits[0]) if digits else -1), path.name


def _session(
    name: str, records: Sequence[Record], known: dict[str, dict[str, list[ContextRecord]]]
) -> SessionHistory:
    """Return one session. known: the records of contexts, by the sessions before it; it adds its own.

    What an earlier session of the same process has settled, and this one only launches, is told as it was
    settled.
    """
    contexts: dict[str, list[ContextRecord]] = {}
    for record in records:
        if isinstance(record, ContextRecord):
            contexts.setdefault(record.context, []).append(record)
    opened = next((record for record in records if isinstance(record, SessionOpened)), None)
    earlier = known.get(opened.continues, {}) if opened else {}
    for context, own in contexts.items():
        is_searched = any(isinstance(record, ContextSettled | Agreed) or _is_trial(record) for record in own)
        if not is_searched and any(isinstance(record, ContextSettled) for record in earlier.get(context, ())):
            contexts[context] = [*earlier[context], *own]
    known[name] = {**earlier, **contexts}
    closed = next((record for record in records if isinstance(record, SessionClosed)), None)
    started = [record.run for record in records if isinstance(record, RunStarted)]
    return SessionHistory(
        name=name,
        opened=opened,
        ranks=tuple(sorted({record.rank for record in records})),
        runs=closed.runs if closed else max(started, default=-1) + 1,
        outcome=closed.outcome if closed else "unfinished",
        warning=closed.warning if closed else "",
        contexts=tuple(
            _context(digest, of_context, is_alone=opened is not None and opened.world_size == 1)
            for digest, of_context in contexts.items()
            if _is_choice(of_context)
        ),
        stragglers=_stragglers(record for record in records if isinstance(record, Trial)),
        remarks=_remarks(records),
        compiling=_compiling(record for record in records if isinstance(record, Preflighted)),
    )


def _context(digest: str, records: Sequence[ContextRecord], *, is_alone: bool) -> ContextHistory:
    settled = next((record for record in reversed(records) if isinstance(record, ContextSettled)), None)
    agreed = [record for record in records if isinstance(record, Agreed)]
    return ContextHistory(
        digest=digest,
        kernel=records[0].kernel,
        key=records[0].key,
        status=settled.status if settled else "unfinished",
        winner=settled.config_id if settled else None,
        ms=settled.ms if settled else None,
        candidates=_candidates(
            records, _agreed_ms(agreed, settled) or (_alone_ms(records) if is_alone else {})
        ),
        convergence=_convergence(agreed),
        launch_bound=settled is not None and settled.launch_bound,
    )


def _agreed_ms(agreed: Iterable[Agreed], settled: ContextSettled | None) -> dict[str, float]:
    """Return candidate's text -> agreed ms: as settled, or the latest known of a session that did not end."""
    if settled:
        return settled.timings
    return {record.config: record.ms for record in sorted(agreed, key=_run) if _counts(record) and record.ms}


def _alone_ms(records: Iterable[ContextRecord]) -> dict[str, float]:
    """Return candidate's text -> ms where there was nobody to agree with."""
    samples = [record for record in records if isinstance(record, Trial) and _is_sample(record)]
    return {sample.config: sample.statistic_ms for sample in samples if sample.statistic_ms is not None}


def _candidates(
    records: Sequence[ContextRecord], agreed_ms: Mapping[str, float]
) -> tuple[CandidateHistory, ...]:
    texts: dict[int, str] = {}
    banned: dict[int, str] = {}
    trials: defaultdict[int, list[Trial]] = defaultdict(list)
    for record in records:
        if isinstance(record, ContextAdmitted):
            texts.update(enumerate(record.candidates))
        elif isinstance(record, Banned):
            texts[record.config_id] = record.config
            banned[record.config_id] = f"rank {record.by_rank}: {record.reason}"
        elif isinstance(record, Trial | Agreed | ContextSettled) and record.config_id >= 0:
            texts[record.config_id] = record.config
            if isinstance(record, Trial):
                trials[record.config_id].append(record)
    return tuple(
        CandidateHistory(
            config_id=config_id,
            config=text,
            agreed_ms=agreed_ms.get(text),
            banned=banned.get(config_id, ""),
            by_rank=_rank_times(trials[config_id]),
        )
        for config_id, text in sorted(texts.items())
    )


def _rank_times(trials: Iterable[Trial]) -> tuple[RankTimes, ...]:
    by_rank: defaultdict[int, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_rank[trial.rank].append(trial)
    return tuple(
        RankTimes(
            rank=rank,
            samples_ms=tuple(trial.ms for trial in own if trial.ms is not None and _is_sample(trial)),
            statistic_ms=next((t.statistic_ms for t in reversed(own) if _is_time(t.statistic_ms)), None),
        )
        for rank, own in sorted(by_rank.items())
    )


def _convergence(agreed: Iterable[Agreed]) -> tuple[Step, ...]:
    """Return the best of the latest agreed times after each run. It can rise: first samples may be lucky."""
    latest_ms: dict[int, float] = {}
    best: dict[int, float] = {}
    for record in sorted(agreed, key=_run):
        if record.ms is not None and _counts(record):
            latest_ms[record.config_id] = record.ms
            best[record.run] = min(latest_ms.values())
    return tuple(Step(run, ms) for run, ms in best.items())


def _stragglers(trials: Iterable[Trial]) -> tuple[Straggler, ...]:
    """Compare the ranks within each sample: the same context, run and config."""
    together: defaultdict[tuple[str, int, int], dict[int, float]] = defaultdict(dict)
    for trial in trials:
        if trial.ms is not None and _is_sample(trial):
            together[trial.context, trial.run, trial.config_id][trial.rank] = trial.ms
    behind: defaultdict[int, list[float]] = defaultdict(list)
    slowest: Counter[int] = Counter()
    for by_rank in together.values():
        fastest_ms, slowest_ms = min(by_rank.values()), max(by_rank.values())
        if len(by_rank) < 2:
            continue
        for rank, ms in by_rank.items():
            behind[rank].append(percent_over(ms, fastest_ms) or 0.0)
            slowest[rank] += ms == slowest_ms > fastest_ms
    return tuple(
        Straggler(rank, slowest[rank], len(lags), statistics.median(lags))
        for rank, lags in sorted(behind.items())
    )


def _compiling(records: Iterable[Preflighted]) -> tuple[Compiling, ...]:
    by_rank: defaultdict[int, list[Preflighted]] = defaultdict(list)
    for record in records:
        by_rank[record.rank].append(record)
    return tuple(
        Compiling(
            rank=rank,
            compiled=sum(record.compiled for record in own),
            from_peers=sum(record.from_peers for record in own),
            cached=sum(record.cached for record in own),
            failed=sum(record.failed for record in own),
            seconds=sum(record.seconds for record in own),
        )
        for rank, own in sorted(by_rank.items())
    )


def _remarks(records: Iterable[Record]) -> tuple[str, ...]:
    """Return what the ranks noted, each text once: most notes are written by all of them."""
    texts: dict[str, None] = {}
    for record in records:
        if isinstance(record, RunFailed):
            texts[f"Run {record.run} failed on rank {record.by_rank}: {record.error}"] = None
        elif isinstance(record, Note):
            texts[record.text] = None
    return tuple(texts)


def _run(record: ContextRecord) -> int:
    return record.run


def _is_time(ms: float | None) -> bool:
    return ms is not None and math.isfinite(ms) and ms > 0


def _counts(record: Agreed) -> bool:
    return record.counted and _is_time(record.ms)


def _is_choice(records: Iterable[ContextRecord]) -> bool:
    """Return whether a context has several candidates; or may have, where its admission is lost."""
    admitted = [record for record in records if isinstance(record, ContextAdmitted)]
    return not admitted or any(len(record.candidates) > 1 for record in admitted)


def _is_trial(record: ContextRecord) -> bool:
    return isinstance(record, Trial) and record.kind != "incumbent"


def _is_sample(trial: Trial) -> bool:
    return trial.kind == "sample" and trial.config_id >= 0 and _is_time(trial.ms)
