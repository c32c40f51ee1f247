"""What a session writes down: its state and what the ranks agreed, as records for the log."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time

import torch
import triton

from ..compilation.pool import Tally
from ..launch.rank_contexts import RankContext
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
from ..search.context_search import Outcome
from ..search.messages import RunReport
from ..search.rules import BY_LAUNCH
from ..timing.samples import Samples
from ..version import __version__
from .function_state import FunctionState


class Recorder:
    """Makes the records of one session on this rank, and writes them to its log."""

    def __init__(self, domain: FunctionState, log: SessionLog, run_watch: Samples) -> None:
        self.session = ""  # its name, agreed when it opens
        self._domain = domain
        self._log = log
        self._run_watch = run_watch
        self._began = time.monotonic()
        self._exchanges: list[Exchanged] = []  # written with the next record
        self._admitted: set[str] = set()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def close(self) -> None:
        self._log.close()

    def note(self, text: str) -> None:
        """Write down a remark; may be called on another thread."""
        rank = self._domain.agreement.rank
        self._log.write(Note(session=self.session, rank=rank, elapsed_s=self.elapsed_s, text=text))

    def write(self, record: Record) -> None:
        """Write `record`, stamped with session, rank and time, and the exchanges before it."""
        exchanges, self._exchanges = self._exchanges, []
        rank, elapsed_s = self._domain.agreement.rank, self.elapsed_s
        for each in [record, *exchanges] if isinstance(record, SessionOpened) else [*exchanges, record]:
            self._log.write(dataclasses.replace(each, session=self.session, rank=rank, elapsed_s=elapsed_s))

    def exchanged(self, exchange: Exchanged) -> None:
        """Keep the record of an exchange for the next write: the first comes before the session's name."""
        if len(self._domain.agreement.ranks) > 1:
            self._exchanges.append(exchange)

    def opened(self) -> SessionOpened:
        """Return the record that opens the session."""
        domain, options = self._domain, self._domain.options
        continues, domain.tuning.session = domain.tuning.session, self.session
        versions = {
            "dist_autotune": __version__,
            "triton": triton.__version__,
            "torch": str(torch.__version__),
        }
        return SessionOpened(
            thunk=domain.name,
            world_size=len(domain.agreement.ranks),
            ranks=domain.agreement.ranks,
            mode=options.mode,
            search=options.search_name,
            objective=options.objective,
            statistic=options.statistic,
            rank_reduce=options.rank_reduce,
            n_warmup=options.warmups,
            n_repeat=options.repeats,
            device=domain.device.text,
            versions=versions,
            pid=os.getpid(),
            started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            clock=type(domain.clock).__name__,
            continues=continues,
            own_search=callable(options.search),
            max_runs=options.max_runs,
            budget_s=options.budget_s,
            tunes=domain.tuning.rules.tunes,
        )

    def ban(self, local: RankContext, candidate: str, reason: str) -> None:
        """Write down that a candidate failed on this rank."""
        index = [digest for digest, _ in local.order].index(candidate)
        self.write(
            Banned(
                run=self._domain.tuning.runs,
                context=local.name,
                kernel=local.source.short_name,
                key=local.key_text,
                config_id=index,
                config=local.order[index][1],
                by_rank=self._domain.agreement.rank,
                reason=reason,
            )
        )

    def preflighted(self, local: RankContext, tally: Tally) -> None:
        """Write down how this rank compiled the candidates of a new context."""
        run, kernel, key = self._domain.tuning.runs, local.source.short_name, local.key_text
        self.write(Preflighted(run=run, kernel=kernel, key=key, **dataclasses.asdict(tally)))

    def step(self, run: int, merged: RunReport, outcomes: dict[str, Outcome], trials: list[Trial]) -> None:
        """Write down one run: what is new, what this rank launched, what the ranks agreed."""
        tuning = self._domain.tuning
        for name, context in tuning.contexts.items():
            if name in merged.parts and name not in self._admitted:
                self._admitted.add(name)
                is_local = name in self._domain.local_contexts.by_name
                self.write(decisions.admission(run, context, local=is_local))
        for trial in trials:
            self.write(trial)
        if len(self._domain.agreement.ranks) == 1:
            return
        rank = self._domain.agreement.rank
        for name, outcome in outcomes.items():
            context = tuning.contexts[name]
            for ban in decisions.bans(run, context, merged.parts[name]):
                if ban.by_rank != rank:
                    self.write(ban)
            if outcome.index is not None:
                self.write(decisions.agreed(run, context, outcome))

    def merged(self, run: int, merged: RunReport) -> None:
        """Write down what all ranks said of a run."""
        self.write(Merged(run=run, payload=merged.decisive()))

    def run_timed(self, run: int, *, waiting: bool, counts: bool) -> None:
        """Write down what a run took as a whole, if it was timed so and its clock is read everywhere."""
        report = self._run_watch.report
        if report is None or waiting:
            return
        sample = self._run_watch.sample
        self.write(
            RunTimed(
                run=run,
                judged=str(report.ran),
                counts=counts,
                ms=None if sample is None else sample.ms,
                statistic_ms=report.worst_ms if report.measured else None,
            )
        )

    def trial(self, run: int, local: RankContext, outcome: Outcome) -> Trial:
        """Return the record of this rank's launches of one context in one run."""
        context = self._domain.tuning.contexts[local.name]
        by_launch = outcome.judge == BY_LAUNCH
        told, sample = local.told, (local.samples if by_launch else self._run_watch).sample
        report = told if by_launch else self._run_watch.report
        assert told is not None
        assert report is not None
        ran = told.ran if told.ran in context.digests else None
        index = context.digests.index(ran) if ran is not None else -1
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
            launches=local.launches,
            ms=None if sample is None else sample.ms,
            statistic_ms=report.worst_ms if report.measured else None,
            gap_ms=sample.gap_ms if by_launch and sample is not None else 0.0,
            judge=outcome.judge,
        )
