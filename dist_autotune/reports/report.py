"""Sessions of a log directory as the reports that the program can ask for, and more by rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from msgspec.structs import replace

from ..logs.records import ContextAdmitted, Trial
from ..search.rules import BY_LAUNCH, BY_RUN
from ..timing.time_spent import SecondsSpent
from ..tuner.report import TunedContext, TuningReport, time_order
from .history import (
    NOT_SETTLED,
    CandidateHistory,
    ContextHistory,
    History,
    SessionHistory,
    is_time,
    of_kind,
    percent_over,
)

# Fields of the opening that a reader of the figures needs.
ABOUT = ("started_at", "device", "versions", "mode", "search", "objective")
# Fields that a result has alike in the log and in the program's report.
AS_SETTLED = (
    *("status", "timings", "banned", "launch_bound", "same_bits", "again", "untried", "not_fastest"),
)


@dataclass(frozen=True)
class SessionReport:
    """One session with its report; `contexts` are in the order of `report.contexts`."""

    session: SessionHistory
    report: TuningReport
    contexts: tuple[ContextHistory, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return `TuningReport.to_dict()` under "report", and beside it figures from all ranks' logs."""
        opened = self.session.opened
        return {
            **{name: getattr(opened, name) for name in ABOUT},
            "outcome": self.session.closed.outcome,
            "missing_ranks": self.session.missing_ranks,
            "remarks": self.session.remarks(),
            "stragglers": [asdict(each) for each in self.session.stragglers()],
            "report": self.report.to_dict(),
            "candidates": [[_candidate(each) for each in context.candidates] for context in self.contexts],
            "alone": [
                {str(rank): choice.config_id for rank, choice in context.choices_alone().items()}
                for context in self.contexts
            ],
        }


def _candidate(candidate: CandidateHistory) -> dict[str, Any]:
    """Return the figures of one candidate; ranks as text, as JSON has no other names."""
    return {
        "id": candidate.config_id,
        "config": candidate.config,
        "ms": candidate.agreed_ms,
        "rank_ms": {str(rank): ms for rank, ms in sorted(candidate.rank_ms.items())},
        "spread_percent": candidate.spread_percent,
        "samples": candidate.samples,
        "banned": candidate.banned,
    }


def reports_of(history: History, shown: Iterable[SessionHistory], kernel: str = "") -> list[SessionReport]:
    """Return the reports of sessions. kernel: only of contexts with this in their kernel's name."""
    found = [_report_of(each, str(history.directory.absolute()), kernel) for each in shown]
    return [each for each in found if each.contexts or not kernel]


def _report_of(session: SessionHistory, log_dir: str, kernel: str) -> SessionReport:
    chosen = [context for context in session.contexts if kernel in context.records[0].kernel]
    pairs = [(_tuned_context(context), context) for context in chosen]
    pairs.sort(key=lambda pair: time_order(pair[0]))
    closed = session.closed
    report = TuningReport(
        runs=closed.runs,
        contexts=tuple(tuned for tuned, _ in pairs),
        world_size=session.opened.world_size,
        seconds=closed.seconds or max((record.elapsed_s for record in session.records), default=0.0),
        clock=session.opened.clock,
        log_dir=log_dir,
        warning=closed.warning,
        spent=SecondsSpent(closed.compiling_s, closed.runs_s, closed.exchanges_s),
        function=session.opened.thunk,
        session=session.opened.session,
        operations=closed.operations,
        cost=closed.cost,
        gain=closed.gain,
    )
    return SessionReport(session, report, tuple(context for _, context in pairs))


def _tuned_context(context: ContextHistory) -> TunedContext:
    """Return a context as it was settled, or what was known when its log ended."""
    settled, first = context.settled, context.records[0]
    config = None if settled is NOT_SETTLED else settled.config
    if config is None:
        candidates = context.candidates
        launches = [trial.launches for trial in of_kind(context.records, Trial)]
        settled = replace(
            settled,
            timings={each.config: each.agreed_ms for each in candidates if each.agreed_ms is not None},
            banned={each.config: each.banned for each in candidates if each.banned},
            launches=launches[-1] if launches else 0,
            default_ms=_default_ms(context),
        )
    return TunedContext(
        kernel=first.kernel,
        key=first.key,
        config=config,
        ms=_time(settled.ms),
        fastest_rank_ms=_time(settled.fastest_rank_ms),
        default_ms=_time(settled.default_ms),
        judge=BY_RUN if settled.judge == BY_RUN else BY_LAUNCH,
        launches=max(settled.launches, 0),
        key_text=first.key,
        config_text=config or "",
        **{name: getattr(settled, name) for name in AS_SETTLED},
    )


def _default_ms(context: ContextHistory) -> float | None:
    """Return the time of the default candidate; if it is banned, of the first that works."""
    default = next((each.default for each in of_kind(context.records, ContextAdmitted)), 0)
    usable = [each for each in context.candidates if not each.banned]
    usable.sort(key=lambda each: each.config_id != default)
    return usable[0].agreed_ms if usable else None


def _time(ms: float | None) -> float | None:
    return ms if is_time(ms) else None  # a log may hold anything


def cost_alone_percent(context: ContextHistory) -> float | None:
    """Return by how many percent the worst choice of one rank alone is slower for all; None: unknown."""
    settled_ms = context.settled.ms
    costs = [percent_over(choice.agreed_ms, settled_ms) for choice in context.choices_alone().values()]
    return max((cost for cost in costs if cost is not None), default=None)
