"""Checks that the decisions which sessions logged follow from what their ranks said.

`SearchState` is fed the recorded reports of all ranks (`records.Merged`), run by run, and must yield every
plan and every result in the logs. No torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..codec import to_json
from ..errors import TuningError
from ..formatting import Table, columns, context_label, counted, one_line
from ..logs import decisions
from ..logs.records import ContextSettled, Merged, Record, RunFailed, RunStarted, SessionClosed, SessionOpened
from ..search.messages import RunReport, decode
from ..search.rules import Rules
from ..search.state import SearchState
from ..search.strategies import STRATEGIES
from ..version import __version__

CLOSED_WELL = ("settled", "partial")
_UNUSABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)  # of words that were changed
_LONGEST = 160  # characters of a value that differs: the rest of a payload is in the log


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
    thunk: str = "?"
    search: str = "?"
    runs: int = 0
    compared: int = 0  # recorded plans and results, over all ranks
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def compare(self, run: int | None, about: str, what: str, recorded: object, recomputed: object) -> None:
        if recorded != recomputed:
            self.differences.append(Difference(run, about, what, str(recorded), str(recomputed)))


def verify(sessions: Mapping[str, Sequence[Record]]) -> list[Verdict]:
    """Recompute every session of a log directory, in the order in which they opened."""
    states: dict[str, SearchState] = {}
    return [_verdict(name, records, states) for name, records in sessions.items()]


def _verdict(name: str, records: Sequence[Record], states: dict[str, SearchState]) -> Verdict:
    """Recompute one session. states: of the sessions before it, by name; a session may continue one."""
    verdict = Verdict(name)
    opened = next((record for record in records if isinstance(record, SessionOpened)), None)
    if opened is None:
        verdict.compare(None, "session", "session_opened", "nothing", "the record that opens a session")
        return verdict
    verdict.thunk, verdict.search = opened.thunk, opened.search
    for rank in sorted(set(opened.ranks) - {record.rank for record in records}):
        verdict.compare(None, f"rank {rank}", "records", "none", f"rank-{rank}.jsonl")
    written_by = opened.versions.get("dist_autotune")
    if written_by != __version__:
        verdict.notes.append(f"written by version {written_by}, recomputed by {__version__}")
    if opened.own_search or opened.search not in STRATEGIES:
        verdict.notes.append(f"not recomputed: its search, {opened.search}, is none of {sorted(STRATEGIES)}")
    elif opened.continues and opened.continues not in states:
        verdict.compare(None, "session", "continues", opened.continues, "a session recomputed before it")
    else:
        tuning = states.get(opened.continues) if opened.continues else None
        states[name] = tuning = SearchState(_rules(opened)) if tuning is None else tuning
        tuning.open()
        _recompute(verdict, records, opened, tuning)
    return verdict


def _recompute(
    verdict: Verdict, records: Sequence[Record], opened: SessionOpened, tuning: SearchState
) -> None:
    """Feed `tuning` the session's runs; compare plans and results."""
    said: dict[int, list[Merged]] = {}
    for record in records:
        if isinstance(record, Merged):
            said.setdefault(record.run, []).append(record)
    closed = [record for record in records if isinstance(record, SessionClosed)]
    ended_well = [record for record in closed if record.outcome in CLOSED_WELL]
    started = [record for record in records if isinstance(record, RunStarted)]
    verdict.runs = max(said, default=-1) + 1
    if started and not said:
        verdict.compare(None, "session", "merged", "nothing", "what all ranks said of each run")
        return
    results: dict[tuple[int, str], ContextSettled] = {}
    is_over = False
    for run in range(verdict.runs):
        for record in started:
            if record.run == run:
                verdict.compared += 1
                plan = decisions.plan_of(tuning)
                verdict.compare(run, f"rank {record.rank}", "run_started: plan", record.plan, plan)
        payload = _agreed_payload(verdict, run, said.get(run, []))
        if payload is None:
            return
        if is_over:
            verdict.compare(run, "session", "merged", "another run", "the session is over")
            return
        try:
            merged, _ = tuning.kernels.unite(payload, tuning.contexts)
            tuning.step(merged)
        except TuningError as error:
            is_over = True
            for each in closed:
                outcome = type(error).__name__
                verdict.compare(run, "session", "session_closed: outcome", each.outcome, outcome)
            continue
        except _UNUSABLE as error:
            verdict.compare(run, "session", "merged", f"cannot be used ({error!r})", "words of all ranks")
            return
        results |= {(run, each.name): decisions.settled(run, each) for each in tuning.contexts.newly_final()}
        is_over = tuning.done if opened.mode == "replay" else not tuning.has_work
    _compare_results(verdict, records, results, {record.rank for record in ended_well})
    has_failed = any(isinstance(record, RunFailed) for record in records)
    if ended_well and not is_over and not has_failed and opened.mode == "replay":
        verdict.compare(None, "session", "session_closed", ended_well[0].outcome, "more runs to make")
    if len(closed) > len(ended_well):  # an error dropped the searches under way, on all ranks
        tuning.contexts.drop_unsettled()


def _agreed_payload(verdict: Verdict, run: int, said: Sequence[Merged]) -> RunReport | None:
    """Return what all ranks said of a run; they must have written down the same."""
    if not said:
        verdict.compare(run, "session", "merged", "nothing", "what all ranks said of this run")
        return None
    first = said[0]
    for other in said[1:]:
        verdict.compare(run, f"rank {other.rank}", "merged", to_json(other.payload), to_json(first.payload))
    try:
        report = decode(to_json(first.payload).encode())
        if not isinstance(report, RunReport):
            raise ValueError(f"of kind {report.kind}")
        return report
    except _UNUSABLE as error:
        verdict.compare(run, f"rank {first.rank}", "merged", f"unreadable ({error!r})", "a payload")
        return None


def _compare_results(
    verdict: Verdict,
    records: Iterable[Record],
    results: Mapping[tuple[int, str], ContextSettled],
    complete: set[int],
) -> None:
    """Compare the results that ranks wrote down; the ranks in `complete` wrote down all of them."""
    missing = {(rank, *result) for rank in complete for result in results}
    for record in records:
        if isinstance(record, ContextSettled):
            verdict.compared += 1
            about, what = context_label(record.kernel, record.key), f"context_settled of rank {record.rank}"
            expected = results.get((record.run, record.context))
            missing.discard((record.rank, record.run, record.context))
            if expected is None:
                verdict.compare(record.run, about, what, record.config, "nothing")
                continue
            for name in ("status", "config_id", "config", "ms", "timings"):
                values = getattr(record, name), getattr(expected, name)
                verdict.compare(record.run, about, f"{what}: {name}", *values)
    for rank, run, context in sorted(missing):
        result = results[run, context]
        about = context_label(result.kernel, result.key)
        verdict.compare(run, about, f"context_settled of rank {rank}", "nothing", result.config)


def _rules(opened: SessionOpened) -> Rules:
    return Rules(
        strategy=STRATEGIES[opened.search],
        search=opened.search,
        n_warmup=opened.n_warmup,
        n_repeat=opened.n_repeat,
        rank_reduce=opened.rank_reduce,
        objective=opened.objective,
        mode=opened.mode,
        max_runs=opened.max_runs,
        budget_s=opened.budget_s,
        tunes=opened.tunes,
    )


def verdicts_table(verdicts: Sequence[Verdict]) -> Table:
    """Return one row per session."""
    rows = []
    for each in verdicts:
        found = counted(len(each.differences), "difference") if each.differences else "as recorded"
        if not each.compared and not each.differences:
            found = "nothing to recompute"
        rows.append((each.session, each.thunk, each.search, str(each.runs), str(each.compared), found))
    names = columns("session", "function", "search", ">runs", ">decisions", "recomputed")
    return Table("Replay", names, tuple(rows), "decisions: plans and results compared, over all ranks.")


def differences_table(verdicts: Sequence[Verdict]) -> Table:
    """Return one row per difference."""
    rows = []
    for verdict in verdicts:
        for each in verdict.differences:
            run = "-" if each.run is None else str(each.run)
            values = (_shortened(each.recorded), _shortened(each.recomputed))
            rows.append((verdict.session, run, each.about, each.what, *values))
    names = columns("session", ">run", "context", "what", "recorded", "recomputed")
    return Table("Differences", names, tuple(rows))


def _shortened(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
