"""Replays logs: recomputes decisions from the ranks' messages, or tries another search on the samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from random import Random
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from ..codec import from_json
from ..errors import InvalidOption, TuningError
from ..formatting import Table, config_label, context_label, counted, format_ms, format_percent
from ..logs import decisions
from ..logs.records import (
    ContextSettled,
    Merged,
    Record,
    RunFailed,
    RunStarted,
    SessionClosed,
    SessionOpened,
    Trial,
)
from ..options import Options
from ..reports.history import ContextHistory, SessionHistory, is_sample, is_time, of_kind, percent_over
from ..search.messages import RunReport
from ..search.rules import Rules
from ..search.state import SearchState
from ..search.strategies import STRATEGIES, Winner, interval
from ..timing.samples import STATISTICS

LONGEST = 160  # characters of a value that differs: the rest of a payload is in the log
RankTimes = dict[int, float]  # rank -> ms of one run


@dataclass(frozen=True)
class Difference:
    """A recorded value that does not follow from the records before it."""

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

    def compare(self, run: int | None, about: str, what: str, recorded: object, recomputed: object) -> None:
        self.compared += 1
        if recorded != recomputed:
            self.differences.append(Difference(run, about, what, str(recorded), str(recomputed)))


def verify(sessions: Iterable[SessionHistory]) -> list[Verdict]:
    """Recompute every session of a log directory, in the order in which they opened."""
    states: dict[str, SearchState] = {}  # by session: a later one may continue it
    verdicts = []
    for session in sessions:
        opened = session.opened
        verdicts.append(verdict := Verdict(opened.session, opened.thunk, opened.search))
        for rank in session.missing_ranks:
            verdict.compare(None, f"rank {rank}", "records", "none", f"rank-{rank}.jsonl")
        if opened.search in STRATEGIES and not opened.own_search:
            state = states[opened.session] = states.get(opened.continues) or SearchState(rules_of(opened))
            _recompute(verdict, session, state)
    return verdicts


def rules_of(opened: SessionOpened) -> Rules:
    """Return the rules that a session searched by."""
    values = {each.name: getattr(opened, each.name) for each in fields(Rules) if each.name != "strategy"}
    return Rules(strategy=STRATEGIES[opened.search], **values)


def _recompute(verdict: Verdict, session: SessionHistory, state: SearchState) -> None:
    """Make the session's runs again; compare plans, results and that nothing was left to try at the end."""
    records = defaultdict[int, list[Record]](list)
    for record in session.records:
        if isinstance(record, RunStarted | Merged | ContextSettled):
            records[record.run].append(record)
    closed = of_kind(session.records, SessionClosed)
    followed = (each.run for each in session.records if isinstance(each, Merged | Trial | ContextSettled))
    verdict.runs = max(followed, default=-1) + 1  # one that was started and raised has no reports
    state.open()
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
                verdict.compare(run, "session", "session_closed: outcome", each.outcome, type(error).__name__)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # changed
            recorded = f"cannot be used ({error!r})" if merged else "nothing"
            verdict.compare(run, "session", "merged", recorded, "the merged reports of this run")
            return
        results = {context.name: decisions.settled(run, context) for context in state.newly_final()}
        for settled in of_kind(records[run], ContextSettled):
            about, found = context_label(settled.kernel, settled.key), results.get(settled.context)
            for name in ("status", "config_id", "config", "ms", "timings"):
                what = f"context_settled of rank {settled.rank}: {name}"
                verdict.compare(run, about, what, getattr(settled, name), getattr(found, name, "nothing"))
    if any(each.outcome not in ("settled", "partial") for each in closed):
        state.drop_unsettled()  # as all ranks did
    elif closed and verdict.runs and state.rules.mode == "replay" and not of_kind(session.records, RunFailed):
        verdict.compare(None, "session", "session_closed: nothing left to try", True, state.done)


def verdicts_tables(verdicts: Iterable[Verdict]) -> list[Table]:
    """Return a table with one row per session, and one with a row per difference."""
    sessions, differences = [], []
    for each in verdicts:
        found = "as recorded" if each.compared else "nothing to recompute"
        if each.differences:
            found = counted(len(each.differences), "difference")
        sessions.append((each.session, each.thunk, each.search, str(each.runs), str(each.compared), found))
        for one in each.differences:
            values = (value[:LONGEST] for value in (one.recorded, one.recomputed))
            run = "-" if one.run is None else str(one.run)
            differences.append((each.session, run, one.about, one.what, *values))
    names = ("session", "function", "search", ">runs", ">compared", "recomputed")
    note = "compared: plans and values of results, over all ranks; none of a search of the user's."
    about = ("session", ">run", "context", "what", "recorded", "recomputed")
    return [Table("Replay", names, sessions, note), Table("Differences", about, differences)]


@dataclass(frozen=True)
class Pick:
    """A config and how far it is from the best by all recorded samples."""

    config: str = "-"
    ms: float | None = None
    regret_percent: float | None = None


@dataclass(frozen=True)
class WhatIf:
    """What the search would have done for one context."""

    session: str
    context: str
    candidates: int
    search: str
    runs: int
    recorded_runs: int
    resampled: int  # of `runs`: no recorded sample of the candidate was left
    pick: Pick
    recorded: Pick  # `-`: the session did not settle it


def what_if(sessions: Iterable[SessionHistory], options: Mapping[str, Any], seed: int = 0) -> list[WhatIf]:
    """Search each session's contexts again with `options` changed, on the recorded samples."""
    changed = Options(**options)
    named = {"search": changed.search_name} if "search" in options else {}
    found = []
    for session in sessions:
        opened = replace(session.opened, **{**options, **named})
        if opened.search not in STRATEGIES:
            raise InvalidOption(f"{opened.search} of session {opened.session} is in no log: give --search")
        for context in session.contexts:
            usable = [each for each in context.candidates if not each.banned]
            if len(usable) > 1 and any(each.samples for each in usable):
                found.append(_search(opened, context, Random(f"{seed} {context.label}")))
    return found


def _search(opened: SessionOpened, context: ContextHistory, random: Random) -> WhatIf:
    recorded, dealt = _samples(context), defaultdict[int, list[RankTimes]](list)
    banned = {index for index, each in enumerate(context.candidates) if each.banned}
    incumbent = min(set(range(len(recorded))) - banned)
    flow, runs = rules_of(opened).flow_of(len(recorded)), 0
    winner = flow.resume(None, banned)
    while winner is None:
        assert flow.index is not None
        samples, own = recorded[flow.index] or [{}], dealt[flow.index]
        if not flow.is_warmup:
            own.append(samples[len(own)] if len(own) < len(samples) else random.choice(samples))
        ms = _agreed_ms(samples[:1] if flow.is_warmup else own, opened)
        answer = math.nan if ms is None else interval(ms, 0.0, opened.statistic)
        winner, runs = flow.resume(answer, banned), runs + 1
    if isinstance(winner, Winner) and incumbent in winner.tied:
        winner = incumbent
    all_ms = [None if i in banned else _agreed_ms(each, opened) for i, each in enumerate(recorded)]
    best_ms = min((ms for ms in all_ms if ms is not None), default=None)
    timed = zip(context.candidates, all_ms, strict=True)
    picks = [Pick(each.config, ms, percent_over(ms, best_ms)) for each, ms in timed]
    planned = f" {opened.n_warmup}+{opened.n_repeat}" if opened.search == "exhaustive" else ""
    return WhatIf(
        session=opened.session,
        context=context.label,
        candidates=len(recorded),
        search=opened.search + planned,
        runs=runs,
        recorded_runs=sum(map(len, recorded)),
        resampled=sum(max(len(own) - len(recorded[index]), 0) for index, own in dealt.items()),
        pick=picks[winner],
        recorded=picks[context.candidates.index(context.winner)] if context.winner else Pick(),
    )


def _samples(context: ContextHistory) -> list[list[RankTimes]]:
    """Return each candidate's samples in recorded order, all of one judge; warm-ups where it has none."""
    trials = []
    for each in context.candidates:
        warm_ups = [trial for trial in each.trials if trial.kind == "warm-up" and is_time(trial.ms)]
        trials.extend(list(filter(is_sample, each.trials)) or warm_ups)
    judge = min(trial.judge for trial in trials)  # "launch" before "run"
    by_run = defaultdict[tuple[int, int], RankTimes](dict)
    for trial in trials:
        if trial.judge == judge:
            by_run[trial.config_id, trial.run][trial.rank] = trial.ms or 0.0
    order = sorted(by_run)
    return [[by_run[key] for key in order if key[0] == each.config_id] for each in context.candidates]


def _agreed_ms(samples: Sequence[RankTimes], opened: SessionOpened) -> float | None:
    """Return each rank's statistic, reduced over the ranks; None without any sample."""
    ranks, statistic = {rank for sample in samples for rank in sample}, STATISTICS[opened.statistic]
    times = [statistic([sample[rank] for sample in samples if rank in sample]) for rank in sorted(ranks)]
    return (max if opened.rank_reduce == "max" else fmean)(times) if times else None


def what_if_table(found: Iterable[WhatIf]) -> Table:
    """Return one row per context that was searched anew."""
    names = (
        "session", "context", ">candidates", "search", ">runs", ">resampled", ">recorded runs",
        "pick", ">ms", ">regret %", "recorded pick", ">ms", ">regret %",
    )  # fmt: skip
    rows = []
    for each in found:
        counts = str(each.runs), str(each.resampled), str(each.recorded_runs)
        row = [each.session, each.context, str(each.candidates), each.search, *counts]
        for pick in (each.pick, each.recorded):
            row += config_label(pick.config), format_ms(pick.ms), format_percent(pick.regret_percent)
        rows.append(tuple(row))
    note = "ms, regret: by all recorded samples of the config. resampled: runs that were drawn again."
    return Table("Another search on the recorded samples", names, rows, note)
