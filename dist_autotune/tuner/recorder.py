"""Writes the records of a session; its report has contexts with the same figures."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msgspec import structs

from ..launch.rank_context import RankContext
from ..launch.registry import Registry
from ..logs import decisions
from ..logs.records import Exchanged, Note, Record, RunTimed, SessionClosed, SessionOpened, Trial
from ..logs.writer import SessionLog
from ..search.messages import Part
from ..search.orders import ContextOrder, Orders
from ..search.rules import BY_LAUNCH
from ..search.shared_context import Outcome
from ..timing.samples import Samples
from .function_state import FunctionSetup, FunctionState, versions
from .report import TunedContext, TuningReport, time_order

FIRST_FORECAST = 50  # runs of an online session until its log says what is left; then after twice as many


class Recorder:
    """Writes the records of one session on this rank."""

    def __init__(self, function: FunctionSetup, log: SessionLog) -> None:
        self.session = ""  # its name, agreed when it opens
        self._function, self._rank, self._ranks = function, function.group.rank, function.group.ranks
        self._log, self._began = log, time.monotonic()
        self._exchanges: list[Exchanged] = []  # written with the next record
        self._held: list[Record] | None = None  # records that are written together
        self._admitted: set[str] = set()
        self._next_forecast = FIRST_FORECAST

    def note(self, text: str) -> None:
        """Write a remark at once, before exchanges that are not written yet. Any thread may call it."""
        self._log.write(self._stamped(Note(text=text)))

    def write(self, record: Record) -> None:
        """Write the exchanges before `record`, then itself, stamped with session, rank and time."""
        exchanges, self._exchanges = self._exchanges, []
        records = [self._stamped(each) for each in (*exchanges, record)]
        if self._held is None:
            self._log.write(*records)
        else:
            self._held += records

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Write the records of the block in one piece at its end, also where it raises."""
        self._held = held = list[Record]()
        try:
            yield
        finally:
            self._held = None
            self._log.write(*held)

    def _stamped(self, record: Record) -> Record:
        elapsed_s = time.monotonic() - self._began
        return structs.replace(record, session=self.session, rank=self._rank, elapsed_s=elapsed_s)

    def record_opening(self, session: str) -> None:
        """Write that the session `session` is open."""
        self.session = session
        function, options = self._function, self._function.options
        opened = SessionOpened(
            **options.rules(),
            thunk=function.name,
            world_size=len(self._ranks),
            ranks=self._ranks,
            device=function.device.text,
            versions=versions(),
            pid=os.getpid(),
            started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            clock=type(function.clock).__name__,
            node=socket.gethostname(),
        )
        self._log.write(self._stamped(opened))

    def record_exchange(self, run: int, sent_bytes: int, received_bytes: int, ms: float) -> None:
        """Write an exchange with the next record: the first comes before the session's name."""
        if len(self._ranks) > 1:
            exchange = Exchanged(run=run, sent_bytes=sent_bytes, received_bytes=received_bytes, ms=ms)
            self._exchanges.append(exchange)

    def record_contexts(self, run: int, orders: Orders, here: Container[str]) -> None:
        """Write the new contexts of a run. here: the contexts that this rank launches."""
        for name in orders.run.outcomes:
            if name in orders.contexts and name not in self._admitted:
                self._admitted.add(name)
                self.write(decisions.admission(run, orders.contexts[name], local=name in here))

    def record_trial(
        self, run: int, context: ContextOrder, rank_context: RankContext, outcome: Outcome, whole: Samples
    ) -> None:
        """Write the time of this rank's launches of one context in one run. whole: samples of whole runs."""
        by_launch, report = outcome.judge == BY_LAUNCH, rank_context.run.report
        samples = rank_context.samples if by_launch else whole
        assert report is not None
        index = context.digests.index(report.ran) if report.ran in context.digests else None
        is_online = self._function.options.mode == "online"  # the time may be of an earlier run
        several = {"config_id": -1, "config": "several configs in one run"}
        self.write(
            Trial(
                **{**several, **decisions.fields_of(run, context, index)},
                **_times(samples, report if by_launch else None),
                kind=outcome.kind,
                k=outcome.k,
                n=outcome.n,
                launches=rank_context.launches_per_run if is_online else rank_context.run.count,
                gap_ms=samples.sample.gap_ms if by_launch and samples.sample is not None else 0.0,
                judge="launch" if by_launch else "run",
            )
        )

    def record_whole_run(self, run: int, whole: Samples, *, counts: bool) -> None:
        """Write the time of a whole run on this rank."""
        assert whole.report is not None
        self.write(RunTimed(run=run, judged=str(whole.report.ran), counts=counts, **_times(whole, None)))

    def record_outcomes(self, run: int, orders: Orders) -> None:
        """Write the bans of one run, the times that several ranks have agreed on, and a remark."""
        for name, index in orders.run.bans:
            self.write(decisions.banned(run, orders.contexts[name], index))
        for name, outcome in orders.run.outcomes.items():
            if outcome.index is not None and len(self._ranks) > 1:
                self.write(decisions.agreed(run, orders.contexts[name], outcome))
        if orders.run.remark:
            self.write(Note(text=orders.run.remark))

    def record_settled(
        self, run: int, contexts: Iterable[ContextOrder], here: Mapping[str, RankContext]
    ) -> None:
        """Write the results that a run has settled. here: the contexts that this rank launches."""
        for context in contexts:
            launches = here[context.name].launches_per_run if context.name in here else 0
            self.write(decisions.settled(run, context, launches=launches))

    def figures(self, state: FunctionState) -> dict[str, Any]:
        """Return the fields of a report on the function, its costs and its gain."""
        function, run = self._function, state.orders.run
        is_online = function.options.mode == "online" and function.tunes
        return {
            "function": function.name,
            "session": self.session,
            "world_size": len(self._ranks),
            "clock": type(function.clock).__name__,
            "spent": state.time_spent.seconds,
            "cost": run.cost if is_online else None,
            "gain": run.gain if is_online else None,
            "operations": tuple(state.dispatcher.announced),
        }

    def record_end(self, report: TuningReport, outcome: str) -> None:
        """Write how the session has ended, and close the log."""
        self.write(
            SessionClosed(
                outcome=outcome,
                runs=report.runs,
                contexts=len(report.contexts),
                warning=report.warning,
                seconds=report.seconds,
                cost=report.cost,
                gain=report.gain,
                operations=report.operations,
                **asdict(report.spent),
            )
        )
        self._log.close()

    def record_forecast(self, orders: Orders) -> None:
        """Write the trials left of an online session, after 50 runs and then after twice as many."""
        if orders.rules.mode == "online" and orders.run.has_work and orders.runs >= self._next_forecast:
            self._next_forecast *= 2
            self.write(Note(text=str(orders.forecast), is_outlook=True))


def outcome_of(launched: Sequence[ContextOrder], error: BaseException | None) -> str:
    """Return how a session has ended that has launched these contexts."""
    if error is not None:
        return type(error).__name__
    if not all(context.status for context in launched):
        return "unfinished"
    return "partial" if any(context.is_left for context in launched) else "settled"


def _times(samples: Samples, part: Part | None) -> dict[str, Any]:
    """Return the time of the run that is reported, and the median so far: of a part, or of whole runs."""
    ms, report = None if samples.sample is None else samples.sample.ms, part or samples.report
    return {"ms": ms, "median_ms": None if report is None else report.ms}


def tuned_contexts(orders: Orders, registry: Registry, names: Iterable[str]) -> tuple[TunedContext, ...]:
    """Return the contexts among `names` that have several candidates, as they stand."""
    contexts = []
    for name in sorted(names):
        context, rank_context = orders.contexts.get(name), registry.by_name.get(name)
        if context is None or rank_context is None or len(context.digests) == 1:
            continue
        best = None if context.is_spent else context.incumbent
        contexts.append(
            TunedContext(
                kernel=context.kernel,
                key=rank_context.identity.key,
                config=None if best is None else rank_context.config_of(context.digests[best]),
                launches=rank_context.launches_per_run,
                key_text=context.key,
                **decisions.result(context),
            )
        )
    return tuple(sorted(contexts, key=time_order))


def contexts_from_cache(registry: Registry) -> tuple[TunedContext, ...]:
    """Return the contexts that settled calls launch with a result from memory or disk, without a session."""
    unshared = [each for each in registry.contexts if each.order is None and len(each.texts) > 1]
    return tuple(
        TunedContext(
            kernel=context.identity.source.short_name,
            key=context.identity.key,
            config=context.config_of(claim[1]),
            ms=claim[2],
            status="cached",
            key_text=context.identity.key_text,
        )
        for context in unshared
        if (claim := context.claim) is not None
    )
