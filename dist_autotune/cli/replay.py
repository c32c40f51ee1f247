"""Recomputes what sessions decided from their logs, by the code that decides in a session.

`Tuning` is fed the recorded words of all ranks (`records.Merged`), run by run, and must yield every plan,
elimination and winner that the ranks wrote down. Those words in turn must follow from the ranks' recorded
samples: the statistic of each rank is taken by its `Stopwatch`, and ranks are merged by `Part.merged`.
No torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..codec import to_json
from ..errors import TuningError
from ..formatting import context_label
from ..logs.logged_session import CLOSED_WELL, LoggedSession
from ..logs.records import Agreed, Banned, ContextRecord, Record, SessionOpened
from ..search import resume
from ..search.context_search import Outcome
from ..search.messages import Payload
from ..search.rules import Rules
from ..search.state import Tuning
from ..search.strategies import STRATEGIES
from ..tuner import decisions
from ..version import __version__
from .replay_comparison import Comparison, Difference
from .replay_recount import Recount

# What words that were changed may raise.
_UNUSABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Verdict:
    """What recomputing one session found."""

    session: str
    thunk: str
    search: str
    runs: int
    compared: int  # recorded decisions, over all ranks
    recounted: int  # agreed times that were made anew from samples
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


def verify(sessions: Mapping[str, Sequence[Record]]) -> list[Verdict]:
    """Recompute every session of a log directory, in the order in which they opened."""
    left: dict[str, _State] = {}
    return [_Replay(LoggedSession(name, records), left).verdict() for name, records in sessions.items()]


@dataclass
class _State:
    """What one session leaves to the next of the same function."""

    tuning: Tuning
    recount: Recount


class _Replay:
    """One session being recomputed."""

    def __init__(self, logged: LoggedSession, left: dict[str, _State]) -> None:
        self._logged = logged
        self._left = left
        self._found = Comparison()
        self._notes: list[str] = []
        self._recounted = 0
        self._admitted: set[str] = set()

    def verdict(self) -> Verdict:
        logged, opened = self._logged, self._logged.opened
        if opened is None:
            self._found.differ(
                None, "session", "session_opened", "nothing", "the record that opens a session"
            )
        else:
            for rank in sorted(set(opened.ranks) - logged.by_rank.keys()):
                self._found.differ(None, f"rank {rank}", "records", "none", f"rank-{rank}.jsonl")
            if opened.versions.get("dist_autotune") != __version__:
                by = opened.versions.get("dist_autotune")
                self._notes.append(f"written by version {by}, recomputed by {__version__}")
            self._recompute(opened)
        return Verdict(
            logged.name,
            opened.thunk if opened else "?",
            opened.search if opened else "?",
            logged.runs,
            self._found.compared,
            self._recounted,
            tuple(self._found.differences),
            tuple(dict.fromkeys(self._notes)),
        )

    # -- the session ---------------------------------------------------------------------------------------

    def _recompute(self, opened: SessionOpened) -> None:
        if opened.own_search or opened.search not in STRATEGIES:
            self._notes.append(
                f"not recomputed: its search, {opened.search}, is none of {sorted(STRATEGIES)}"
            )
            return
        if self._logged.has_trials and not self._logged.said:
            self._found.differ(None, "session", "merged", "nothing", "what all ranks said of each run")
            return
        state = self._begin(opened)
        if state is None:
            return
        is_over = False
        for run in range(state.tuning.runs, self._logged.runs):
            if is_over:
                self._found.differ(run, "session", "merged", "another run", "the session is over")
                break
            payload = self._payload(run)
            if payload is None:
                return
            try:
                self._run(state, opened, run, payload)
            except TuningError as error:
                is_over = True
                self._expect_outcome(run, type(error).__name__)
                continue
            except _UNUSABLE as error:
                self._found.differ(
                    run, "session", "merged", f"cannot be used ({error!r})", "words of all ranks"
                )
                return
            is_over = _is_over(state.tuning, opened)
        else:
            self._close(state, opened, is_over=is_over)
        self._left[self._logged.name] = state

    def _begin(self, opened: SessionOpened) -> _State | None:
        resumed = self._logged.resumed
        if resumed is not None:
            self._notes.append("took up a session that a crash ended: times are not made anew from samples")
            state = _State(Tuning(_rules(opened)), Recount(opened.statistic, ranks=()))
            resume.relive(state.tuning, resumed.events)
            state.tuning.await_confirmation()
            return state
        if opened.continues:
            left = self._left.get(opened.continues)
            if left is None:
                self._notes.append(f"not recomputed: it continues session {opened.continues}")
                self._found.differ(
                    None, "session", "continues", opened.continues, "a session recomputed before it"
                )
                return None
            left.tuning.open()
            return left
        state = _State(Tuning(_rules(opened)), Recount(opened.statistic, opened.ranks))
        state.tuning.open()
        return state

    def _close(self, state: _State, opened: SessionOpened, *, is_over: bool) -> None:
        """Check how the session ended, and leave what the next one finds."""
        logged = self._logged
        ended_well = [record for record in logged.closed if record.outcome in CLOSED_WELL]
        if ended_well and not is_over and not logged.has_failed and opened.mode == "replay":
            self._found.differ(
                ended_well[0].runs, "session", "session_closed", ended_well[0].outcome, "more runs to make"
            )
        for record in ended_well:
            started = len(logged.started(record.rank))
            self._found.field(None, f"rank {record.rank}", "session_closed: runs", record.runs, started)
        if len(logged.closed) > len(ended_well):  # an error dropped the searches under way, on all ranks
            state.recount.forget(state.tuning.contexts.drop_unsettled())

    def _expect_outcome(self, run: int, error: str) -> None:
        for record in self._logged.closed:
            self._found.field(run, "session", "session_closed: outcome", record.outcome, error)

    # -- one run -------------------------------------------------------------------------------------------

    def _payload(self, run: int) -> Payload | None:
        """Return what all ranks said of a run; they must have written down the same."""
        said = self._logged.said.get(run)
        if not said:
            self._found.differ(run, "session", "merged", "nothing", "what all ranks said of this run")
            return None
        first = said[0]
        for other in said[1:]:
            if other.payload != first.payload:
                about = f"rank {other.rank}"
                self._found.differ(run, about, "merged", to_json(other.payload), to_json(first.payload))
        try:
            return Payload.decode(to_json(first.payload).encode())
        except _UNUSABLE as error:
            self._found.differ(run, f"rank {first.rank}", "merged", f"unreadable ({error!r})", "a payload")
            return None

    def _run(self, state: _State, opened: SessionOpened, run: int, payload: Payload) -> None:
        """Feed one run to the tuning, and compare what follows with what the ranks wrote down."""
        tuning = state.tuning
        plan = decisions.plan_of(tuning)
        for rank in self._logged.by_rank:
            for record in self._logged.started(rank):
                if record.run == run:
                    self._found.field(run, f"rank {rank}", "run_started: plan", record.plan, plan)
        waiting = {context.name for context in tuning.contexts.unsettled if context.waiting}
        merged, _ = tuning.kernels.unite(payload, tuning.contexts)
        outcomes = tuning.step(merged)
        counts = tuning.has_counted_run
        expected = list(self._expected(tuning, run, merged, outcomes))
        if len(opened.ranks) == 1:  # alone, what was agreed is what was measured
            expected = [record for record in expected if not isinstance(record, Agreed | Banned)]
        complete = self._logged.complete(run)
        for rank, records in complete.items():
            self._found.records(run, rank, records, expected, tuning)
            self._found.trials(run, records, outcomes)
        for differs in state.recount.run(complete, merged, outcomes, waiting, counts=counts):
            about = context_label(*_title(tuning, differs.context)) if differs.context else "whole run"
            self._found.differ(run, about, differs.what, differs.recorded, differs.recomputed)
        self._recounted = state.recount.total

    def _expected(
        self, tuning: Tuning, run: int, merged: Payload, outcomes: Mapping[str, Outcome]
    ) -> Iterator[ContextRecord]:
        """Yield the decisions that every rank must have written down."""
        for name, context in tuning.contexts.items():
            if name in merged.parts and name not in self._admitted:
                self._admitted.add(name)
                yield decisions.admission(run, context)
        for name, outcome in outcomes.items():
            if name in tuning.contexts:
                yield from decisions.bans(run, tuning.contexts[name], merged.parts[name])
                if outcome.index is not None:
                    yield decisions.agreed(run, tuning.contexts[name], outcome)
        for context in tuning.contexts.newly_final():
            yield decisions.settled(run, context)


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
        online_share=opened.online_share,
    )


def _is_over(tuning: Tuning, opened: SessionOpened) -> bool:
    if opened.mode == "online":
        return not any(tuning.contexts.unsettled) and tuning.plan_trial is None
    return tuning.done


def _title(tuning: Tuning, name: str) -> tuple[str, str]:
    context = tuning.contexts[name]
    return context.kernel, context.key
