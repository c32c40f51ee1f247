"""Checks that logged decisions follow from what the ranks said: `SearchState` gets each payload again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from ..codec import from_json
from ..errors import TuningError
from ..formatting import Table, context_label, counted, one_line
from ..logs import decisions
from ..logs.history import SessionHistory, of_kind
from ..logs.records import ContextSettled, Merged, Record, RunFailed, RunStarted, SessionClosed, SessionOpened
from ..search.messages import RunReport
from ..search.rules import Rules
from ..search.state import SearchState
from ..search.strategies import STRATEGIES
from ..version import __version__

LONGEST = 160  # characters of a value that differs: the rest of a payload is in the log
# What a payload raises that somebody has changed.
UNUSABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Difference:
    """Something that was recorded and does not follow from what was recorded before it."""

    run: int | None
    about: str  # a context, a rank, or "session"
    what: str
    recorded: str
    recomputed: str


@dataclass
class Verdict:
    """What recomputing one session found."""

    session: str
    thunk: str
    search: str
    runs: int = 0
    compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def compare(self, run: int | None, about: str, what: str, recorded: object, recomputed: object) -> None:
        self.compared += 1
        if recorded != recomputed:
            self.differences.append(Difference(run, about, what, str(recorded), str(recomputed)))


def verify(sessions: Iterable[SessionHistory]) -> list[Verdict]:
    """Recompute every session of a log directory, in the order in which they opened."""
    states: dict[str, SearchState] = {}
    return [_verdict(session, states) for session in sessions]


def rules_of(opened: SessionOpened) -> Rules:
    """Return the rules that a session searched by."""
    values = {each.name: getattr(opened, each.name) for each in fields(Rules) if each.name != "strategy"}
    return Rules(strategy=STRATEGIES[opened.search], **values)


def _verdict(session: SessionHistory, states: dict[str, SearchState]) -> Verdict:
    """Recompute one session. states: of the sessions before it, by name; a session may continue one."""
    opened = session.opened
    verdict = Verdict(session.name, opened.thunk, opened.search)
    for rank in session.missing_ranks:
        verdict.compare(None, f"rank {rank}", "records", "none", f"rank-{rank}.jsonl")
    written_by = opened.versions.get("dist_autotune")
    if written_by != __version__:
        verdict.notes.append(f"written by version {written_by}, recomputed by {__version__}")
    if opened.own_search or opened.search not in STRATEGIES:
        verdict.notes.append(f"not recomputed: its search, {opened.search}, is none of {sorted(STRATEGIES)}")
    else:
        state = states[session.name] = states.get(opened.continues) or SearchState(rules_of(opened))
        state.open()
        _recompute(verdict, session, opened.mode, state)
    return verdict


def _recompute(verdict: Verdict, session: SessionHistory, mode: str, state: SearchState) -> None:
    """Make the session's runs again; compare plans, results and that nothing was left to try at the end."""
    records: defaultdict[int, list[Record]] = defaultdict(list)
    for record in session.records:
        if isinstance(record, RunStarted | Merged | ContextSettled):
            records[record.run].append(record)
    closed = session.of_kind(SessionClosed)
    verdict.runs = max((merged.run for merged in session.of_kind(Merged)), default=-1) + 1
    if records and not verdict.runs:
        verdict.compare(None, "session", "merged", "nothing", "the merged reports of each run")
        return
    for run in range(verdict.runs):
        plan, merged = decisions.plan_of(state), of_kind(records[run], Merged)
        for started in of_kind(records[run], RunStarted):
            verdict.compare(run, f"rank {started.rank}", "run_started: plan", started.plan, plan)
        for other in merged[1:]:
            verdict.compare(run, f"rank {other.rank}", "merged", other.payload, merged[0].payload)
        try:
            report = from_json(RunReport, merged[0].payload)
            state.step(state.kernels.unite(report, state.contexts)[0])
        except TuningError as error:
            for each in closed:
                what, outcome = "session_closed: outcome", type(error).__name__
                verdict.compare(run, "session", what, each.outcome, outcome)
        except UNUSABLE as error:
            recorded = f"cannot be used ({error!r})" if merged else "nothing"
            verdict.compare(run, "session", "merged", recorded, "the merged reports of this run")
            return
        _compare_results(verdict, run, of_kind(records[run], ContextSettled), state)
    if any(each.outcome not in ("settled", "partial") for each in closed):
        state.drop_unsettled()  # as all ranks did
    elif closed and verdict.runs and mode == "replay" and not session.of_kind(RunFailed):
        verdict.compare(None, "session", "session_closed: nothing left to try", True, state.done)


def _compare_results(
    verdict: Verdict, run: int, recorded: Sequence[ContextSettled], state: SearchState
) -> None:
    results = {context.name: decisions.settled(run, context) for context in state.newly_final()}
    for record in recorded:
        about, what = context_label(record.kernel, record.key), f"context_settled of rank {record.rank}"
        for name in ("status", "config_id", "config", "ms", "timings"):
            recomputed = getattr(results.get(record.context), name, "nothing")
            verdict.compare(run, about, f"{what}: {name}", getattr(record, name), recomputed)


def verdicts_table(verdicts: Iterable[Verdict]) -> Table:
    """Return one row per session."""
    rows = []
    for each in verdicts:
        found = "as recorded" if each.compared else "nothing to recompute"
        if each.differences:
            found = counted(len(each.differences), "difference")
        rows.append((each.session, each.thunk, each.search, str(each.runs), str(each.compared), found))
    names = ("session", "function", "search", ">runs", ">compared", "recomputed")
    return Table("Replay", names, rows, "compared: plans and values of results, over all ranks.")


def differences_table(verdicts: Iterable[Verdict]) -> Table:
    """Return one row per difference."""
    names = ("session", ">run", "context", "what", "recorded", "recomputed")
    rows = []
    for verdict in verdicts:
        for each in verdict.differences:
            run = "-" if each.run is None else str(each.run)
            values = (one_line(value)[:LONGEST] for value in (each.recorded, each.recomputed))
            rows.append((verdict.session, run, each.about, each.what, *values))
    return Table("Differences", names, rows)
