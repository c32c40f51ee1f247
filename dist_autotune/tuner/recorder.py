"""What a session writes to its log: what this rank did and what the ranks agreed, as records."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Iterable

import torch
import triton

from ..compilation.pool import Tally
from ..launch.rank_context import RankContext
from ..logs import decisions
from ..logs.records import (
    Banned,
    Exchanged,
    Merged,
    Note,
    Preflighted,
    Record,
    RunTimed,
    SessionOpened,
    Trial,
)
from ..logs.writer import SessionLog
from ..search.context import Context, Outcome
from ..search.messages import RunReport
from ..search.rules import BY_LAUNCH
from ..timing.samples import Samples
from ..version import __version__
from .function import TunedFunction


class Recorder:
    """Writes the records of one session on this rank."""

    def __init__(self, function: TunedFunction, log: SessionLog) -> None:
        self.session = ""  # its name, agreed when it opens
        self._function = function
        self._rank, self._ranks = function.group.rank, function.group.ranks
        self._log = log
        self._began = time.monotonic()
        self._exchanges: list[Exchanged] = []  # written with the next record
        self._admitted: set[str] = set()

    def close(self) -> None:
        self._log.close()

    def note(self, text: str) -> None:
        """Write a remark, and nothing that waits to be written; may be called on another thread."""
        self._log.write(self._stamped(Note(text=text)))

    def write(self, record: Record) -> None:
        """Write `record`, stamped with session, rank and time, and the exchanges before it."""
        exchanges, self._exchanges = self._exchanges, []
        opens = isinstance(record, SessionOpened)
        for each in [record, *exchanges] if opens else [*exchanges, record]:
            self._log.write(self._stamped(each))

    def _stamped(self, record: Record) -> Record:
        elapsed_s = time.monotonic() - self._began
        return dataclasses.replace(record, session=self.session, rank=self._rank, elapsed_s=elapsed_s)

    def record_opening(self, session: str, *, continues: str) -> None:
        """Write that the session `session` is open; continues: the one before it."""
        self.session = session
        function, options = self._function, self._function.options
        versions = {
            "dist_autotune": __version__,
            "triton": triton.__version__,
            "torch": str(torch.__version__),
        }
        self.write(
            SessionOpened(
                thunk=function.name,
                world_size=len(self._ranks),
                ranks=self._ranks,
                mode=options.mode,
                search=options.search_name,
                objective=options.objective,
                statistic=options.statistic,
                rank_reduce=options.rank_reduce,
                n_warmup=options.warmups,
                n_repeat=options.repeats,
                device=function.device.text,
                versions=versions,
                pid=os.getpid(),
                started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                clock=type(function.clock).__name__,
                continues=continues,
                own_search=callable(options.search),
                max_runs=options.max_runs,
                budget_s=options.budget_s,
                tunes=function.tunes,
            )
        )

    def record_exchange(self, exchange: Exchanged) -> None:
        """Keep the record of an exchange for the next write: the first comes before the session's name."""
        if len(self._ranks) > 1:
            self._exchanges.append(exchange)

    def record_ban(self, run: int, rank_context: RankContext, candidate: str, reason: str) -> None:
        """Write that a candidate failed on this rank."""
        self.write(
            Banned(
                run=run,
                context=rank_context.name,
                kernel=rank_context.source.short_name,
                key=rank_context.key_text,
                config_id=list(rank_context.texts).index(candidate),
                config=rank_context.texts[candidate],
                by_rank=self._rank,
                reason=reason,
            )
        )

    def record_preflight(self, run: int, rank_context: RankContext, tally: Tally) -> None:
        """Write how this rank compiled the candidates of a new context."""
        kernel, key = rank_context.source.short_name, rank_context.key_text
        self.write(Preflighted(run=run, kernel=kernel, key=key, **dataclasses.asdict(tally)))

    def record_reports(self, run: int, merged: RunReport) -> None:
        """Write what all ranks reported of a run."""
        self.write(Merged(run=run, payload=merged.decisive()))

    def record_contexts(self, run: int, contexts: Iterable[Context], launched_here: Iterable[str]) -> None:
        """Write which contexts are new."""
        here = set(launched_here)
        for context in contexts:
            if context.name not in self._admitted:
                self._admitted.add(context.name)
                self.write(decisions.admission(run, context, local=context.name in here))

    def record_outcome(self, run: int, context: Context, merged: RunReport, outcome: Outcome) -> None:
        """Write what the ranks agreed of a context in one run; alone, the trial's record says it."""
        if len(self._ranks) == 1:
            return
        for ban in decisions.bans(run, context, merged.parts[context.name]):
            if ban.by_rank != self._rank:  # else it is written already
                self.write(ban)
        if outcome.index is not None:
            self.write(decisions.agreed(run, context, outcome))


def run_timed(run: int, whole: Samples, *, counts: bool) -> RunTimed:
    """Return the record of what a run took as a whole on this rank."""
    report = whole.report
    assert report is not None
    return RunTimed(
        run=run,
        judged=str(report.ran),
        counts=counts,
        ms=None if whole.sample is None else whole.sample.ms,
        statistic_ms=report.worst_ms if report.measured else None,
    )


def trial(run: int, context: Context, rank_context: RankContext, outcome: Outcome, whole: Samples) -> Trial:
    """Return the record of this rank's launches of one context in one run; whole: the run's samples."""
    by_launch = outcome.judge == BY_LAUNCH
    sample, told = (rank_context.samples if by_launch else whole).sample, rank_context.report
    report = told if by_launch else whole.report
    assert told is not None
    assert report is not None
    index = context.digests.index(told.ran) if told.ran in context.digests else -1
    return Trial(
        run=run,
        context=context.name,
        kernel=context.kernel,
        key=context.key,
        config_id=index,
        config=context.texts[index] if index >= 0 else "several configs in one run",
        kind=outcome.kind,
        k=outcome.k,
        n=outcome.n,
        launches=rank_context.launches,
        ms=None if sample is None else sample.ms,
        statistic_ms=report.worst_ms if report.measured else None,
        gap_ms=sample.gap_ms if by_launch and sample is not None else 0.0,
        judge=outcome.judge,
    )
