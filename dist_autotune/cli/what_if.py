"""Runs another search on the samples that sessions recorded: what would it have picked, in how many runs?

Each run that the search asks for is a recorded run of the candidate on all ranks: in recorded order, then
drawn again at random.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

from ..errors import InvalidOption
from ..formatting import Table, columns, config_label, format_ms, format_percent
from ..logs.history import ContextHistory, SessionHistory, of_kind, percent_over
from ..logs.records import SessionOpened, Trial
from ..search.budget import RUNS_ALLOWED
from ..search.running_flow import RunningFlow
from ..search.strategies import STRATEGIES, Winner
from ..timing.samples import STATISTICS
from .replay import rules_of

RankMs = dict[int, float]  # rank -> ms of one run


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
    found = []
    for session in sessions:
        for context in session.contexts:
            for judge in ("launch", "run"):
                trials = [
                    trial
                    for trial in of_kind(context.records, Trial)
                    if (trial.session, trial.judge) == (session.name, judge) and trial.kind != "incumbent"
                ]
                is_choice = sum(not candidate.banned for candidate in context.candidates) > 1
                if session.opened and is_choice and any(trial.kind == "sample" for trial in trials):
                    found.append(_search(replace(session.opened, **options), context, trials, seed))
    return found


def _search(opened: SessionOpened, context: ContextHistory, trials: Sequence[Trial], seed: int) -> WhatIf:
    """Search a context anew on its recorded `trials`."""
    if opened.search not in STRATEGIES:
        raise InvalidOption(
            f"session {opened.session} used a search of the user's own, {opened.search}, which its log "
            f"does not hold: give --search, one of {', '.join(STRATEGIES)}"
        )
    random = Random(f"{seed} {context.label} {trials[0].judge}")
    decks = [
        _Deck([trial for trial in trials if trial.config_id == candidate.config_id], opened, random)
        for candidate in context.candidates
    ]
    banned = {index for index, candidate in enumerate(context.candidates) if candidate.banned}
    all_ms = [None if index in banned else deck.agreed_ms() for index, deck in enumerate(decks)]
    best_ms = min((ms for ms in all_ms if ms is not None), default=None)
    picks = [
        Pick(candidate.config, ms, percent_over(ms, best_ms))
        for candidate, ms in zip(context.candidates, all_ms, strict=True)
    ]
    winner, runs = _run_flow(opened, decks, banned)
    sampled = f" {opened.n_warmup}+{opened.n_repeat}" if opened.search == "exhaustive" else ""
    return WhatIf(
        session=opened.session,
        thunk=opened.thunk,
        context=context.label,
        judge=trials[0].judge,
        candidates=len(decks),
        search=opened.search + sampled,
        runs=runs,
        recorded_runs=len({trial.run for trial in trials}),
        resampled=sum(deck.resampled for deck in decks),
        pick=picks[winner],
        recorded=picks[context.candidates.index(context.winner)] if context.winner else None,
    )


def _run_flow(opened: SessionOpened, decks: Sequence[_Deck], banned: set[int]) -> tuple[int, int]:
    """Return the winner's index, and after how many runs."""
    rules, runs = rules_of(opened), 0
    flow = RunningFlow(rules, len(decks))
    incumbent = min(set(range(len(decks))) - banned)
    known_ms = {incumbent: math.inf}
    winner = flow.resume(None, banned)
    while winner is None and runs < RUNS_ALLOWED * max(rules.planned_runs(len(decks)), 1):
        assert flow.index is not None
        runs += 1
        ms = decks[flow.index].deal(is_warmup=flow.is_warmup)
        if ms is not None:
            known_ms[flow.index] = ms
        winner = flow.resume(math.nan if ms is None else ms, banned)
    if winner is None:
        winner = min(known_ms, key=lambda index: known_ms[index])
    return incumbent if isinstance(winner, Winner) and incumbent in winner.tied else winner, runs


class _Deck:
    """The recorded runs of one candidate, dealt in their order, then again at random."""

    def __init__(self, trials: Iterable[Trial], opened: SessionOpened, random: Random) -> None:
        self.resampled = 0
        self._opened, self._random = opened, random
        by_run: defaultdict[tuple[int, str], RankMs] = defaultdict(dict)
        for trial in trials:
            if trial.ms is not None and math.isfinite(trial.ms):
                by_run[trial.run, trial.kind][trial.rank] = trial.ms
        runs = sorted(by_run.items(), key=lambda item: item[0])
        self._warmups = [ms for (_, kind), ms in runs if kind == "warm-up"]
        self._samples = [ms for (_, kind), ms in runs if kind == "sample"]
        self._left = {True: self._warmups[::-1], False: self._samples[::-1]}  # by whether it is a warm-up
        self._dealt: list[RankMs] = []  # samples

    def deal(self, *, is_warmup: bool) -> float | None:
        """Return the agreed time after one more run; None: nothing is recorded."""
        recorded = (self._warmups or self._samples) if is_warmup else (self._samples or self._warmups)
        if self._left[is_warmup]:
            ms = self._left[is_warmup].pop()
        else:
            self.resampled += 1
            ms = self._random.choice(recorded or [{}])
        self._dealt += [] if is_warmup else [ms]
        return self._agreed_ms(self._dealt or [ms])

    def agreed_ms(self) -> float | None:
        """Return the agreed time by all samples; None: there is none."""
        return self._agreed_ms(self._samples)

    def _agreed_ms(self, runs: Iterable[RankMs]) -> float | None:
        by_rank: defaultdict[int, list[float]] = defaultdict(list)
        for run in runs:
            for rank, ms in run.items():
                by_rank[rank].append(ms)
        times = [STATISTICS[self._opened.statistic](samples) for samples in by_rank.values()]
        reduce = max if self._opened.rank_reduce == "max" else fmean
        return reduce(times) if times else None


def what_if_table(found: Iterable[WhatIf]) -> Table:
    """Return one row per context that was searched anew."""
    rows = []
    for each in found:
        runs = str(each.runs), str(each.resampled), str(each.recorded_runs)
        judged = each.context if each.judge == "launch" else f"{each.context} by the whole run"
        picks = [*_cells(each.pick), *_cells(each.recorded)]
        rows.append((each.session, judged, str(each.candidates), each.search, *runs, *picks))
    names = columns(
        "session", "context", ">candidates", "search", ">runs", ">resampled", ">recorded runs",
        "pick", ">ms", ">regret %", "recorded pick", ">ms", ">regret %",
    )  # fmt: skip
    note = (
        "ms and regret: by all recorded samples of the config. resampled: runs for which the log holds no "
        "further run of that config; one of those it holds was drawn again."
    )
    return Table("Another search on the recorded samples", names, tuple(rows), note)


def _cells(pick: Pick | None) -> tuple[str, ...]:
    if pick is None:
        return "-", "-", "-"
    return config_label(pick.config), format_ms(pick.ms), format_percent(pick.regret_percent)
