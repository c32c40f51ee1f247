"""Runs another search on the samples that sessions recorded: what would it have picked, in how many runs?

Each run that the search asks for is a recorded run of the candidate on all ranks: in recorded order, then
drawn again at random.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

from ..errors import InvalidOption
from ..formatting import Table, config_label, format_ms
from ..logs.history import CandidateHistory, ContextHistory, SessionHistory, is_time, percent_over
from ..logs.records import SessionOpened
from ..search.budget import RUNS_ALLOWED
from ..search.running_flow import RunningFlow
from ..search.strategies import STRATEGIES, Winner
from ..timing.samples import STATISTICS
from .replay import rules_of
from .tables import format_percent

RankMs = dict[int, float]  # rank -> ms of one run
REDUCE: dict[str, Callable[[list[float]], float]] = {"max": max, "mean": fmean}
ALLOWED: dict[str, Collection[str]] = {"search": STRATEGIES, "statistic": STATISTICS, "rank_reduce": REDUCE}


@dataclass(frozen=True)
class Pick:
    """A config and how far it is from the best by all recorded samples."""

    config: str
    ms: float | None
    regret_percent: float | None


@dataclass(frozen=True)
class WhatIf:
    """What the search would have done for one context."""

    session: str
    thunk: str
    context: str
    judge: str
    candidates: int
    search: str
    runs: int
    recorded_runs: int
    resampled: int  # of `runs`: no recorded run of the candidate was left
    pick: Pick
    recorded: Pick | None  # None: the session did not settle it


def what_if(sessions: Iterable[SessionHistory], options: Mapping[str, Any], seed: int = 0) -> list[WhatIf]:
    """Return what the searches of each session would have found with `options` changed."""
    for option, value in options.items():
        _check(option, value)
    found = []
    for session in sessions:
        for context in session.contexts:
            for judge in ("launch", "run"):
                random = Random(f"{seed} {context.label} {judge}")
                decks = [_Deck(each, session.name, judge, random) for each in context.candidates]
                is_choice = sum(not each.banned for each in context.candidates) > 1
                if is_choice and any(deck.runs["sample"] for deck in decks):
                    found.append(_search(replace(session.opened, **options), context, judge, decks))
    return found


def _check(option: str, value: Any, where: str = "") -> None:
    allowed = ALLOWED.get(option, (value,))
    if value not in allowed:
        name, expected = option.replace("_", "-"), ", ".join(allowed)
        raise InvalidOption(f"--{name} {value}: expected one of {expected}{where}")


def _search(opened: SessionOpened, context: ContextHistory, judge: str, decks: Sequence[_Deck]) -> WhatIf:
    for option in ALLOWED:  # a search of the user's own cannot be run from its log
        _check(option, getattr(opened, option), f" (session {opened.session})")
    winner, runs = _run_flow(opened, decks)
    all_ms = [None if deck.banned else _agreed_ms(deck.runs["sample"], opened) for deck in decks]
    best_ms = min((ms for ms in all_ms if ms is not None), default=None)
    timed = zip(context.candidates, all_ms, strict=True)
    picks = [Pick(each.config, ms, percent_over(ms, best_ms)) for each, ms in timed]
    sampled = f" {opened.n_warmup}+{opened.n_repeat}" if opened.search == "exhaustive" else ""
    return WhatIf(
        session=opened.session,
        thunk=opened.thunk,
        context=context.label,
        judge=judge,
        candidates=len(decks),
        search=opened.search + sampled,
        runs=runs,
        recorded_runs=sum(len(own) for deck in decks for own in deck.runs.values()),
        resampled=sum(deck.resampled for deck in decks),
        pick=picks[winner],
        recorded=picks[context.candidates.index(context.winner)] if context.winner else None,
    )


def _run_flow(opened: SessionOpened, decks: Sequence[_Deck]) -> tuple[int, int]:
    """Return the winner's index, and after how many runs."""
    rules, runs = rules_of(opened), 0
    flow = RunningFlow(rules, len(decks))
    banned = {index for index, deck in enumerate(decks) if deck.banned}
    incumbent = min(set(range(len(decks))) - banned)
    winner = flow.resume(None, banned)
    while winner is None and runs < RUNS_ALLOWED * max(rules.planned_runs(len(decks)), 1):
        assert flow.index is not None
        runs += 1
        ms = _agreed_ms(decks[flow.index].deal("warm-up" if flow.is_warmup else "sample"), opened)
        winner = flow.resume(math.nan if ms is None else ms, banned)
    if winner is None:  # stopped: the best so far
        known = [(_agreed_ms(deck.dealt, opened) or math.inf, index) for index, deck in enumerate(decks)]
        winner = min(each for each in known if each[1] not in banned)[1]
    return incumbent if isinstance(winner, Winner) and incumbent in winner.tied else winner, runs


class _Deck:
    """The recorded runs of one candidate, dealt in their order, then at random."""

    def __init__(self, candidate: CandidateHistory, session: str, judge: str, random: Random) -> None:
        self.banned = bool(candidate.banned)
        self.runs: dict[str, list[RankMs]] = {}
        for kind in ("sample", "warm-up"):
            by_run: defaultdict[int, RankMs] = defaultdict(dict)
            for trial in candidate.trials:
                if (trial.session, trial.judge, trial.kind) == (session, judge, kind) and is_time(trial.ms):
                    by_run[trial.run][trial.rank] = trial.ms
            self.runs[kind] = [by_run[run] for run in sorted(by_run)]
        self.dealt: list[RankMs] = []  # samples
        self.resampled = 0
        self._left = {kind: iter(runs) for kind, runs in self.runs.items()}
        self._random = random

    def deal(self, kind: str) -> list[RankMs]:
        """Deal another run; return the samples so far, or a first warm-up."""
        run = next(self._left[kind], None)
        if run is None:
            self.resampled += 1
            run = self._random.choice(self.runs[kind] or self.runs["sample"] or self.runs["warm-up"] or [{}])
        if kind == "sample":
            self.dealt.append(run)
        return self.dealt or [run]


def _agreed_ms(runs: Iterable[RankMs], opened: SessionOpened) -> float | None:
    """Return each rank's statistic, reduced over the ranks; None without any run."""
    by_rank: defaultdict[int, list[float]] = defaultdict(list)
    for run in runs:
        for rank, ms in run.items():
            by_rank[rank].append(ms)
    times = [STATISTICS[opened.statistic](samples) for samples in by_rank.values()]
    return REDUCE[opened.rank_reduce](times) if times else None


def what_if_table(found: Iterable[WhatIf]) -> Table:
    """Return one row per context that was searched anew."""
    rows = []
    for each in found:
        runs = str(each.runs), str(each.resampled), str(each.recorded_runs)
        judged = each.context if each.judge == "launch" else f"{each.context} by the whole run"
        picks = [*_cells(each.pick), *_cells(each.recorded)]
        rows.append((each.session, judged, str(each.candidates), each.search, *runs, *picks))
    names = (
        "session", "context", ">candidates", "search", ">runs", ">resampled", ">recorded runs",
        "pick", ">ms", ">regret %", "recorded pick", ">ms", ">regret %",
    )  # fmt: skip
    note = "ms, regret: by all recorded samples of the config. resampled: runs that were drawn again."
    return Table("Another search on the recorded samples", names, rows, note)


def _cells(pick: Pick | None) -> tuple[str, ...]:
    if pick is None:
        return "-", "-", "-"
    return config_label(pick.config), format_ms(pick.ms), format_percent(pick.regret_percent)
