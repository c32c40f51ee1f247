"""Runs another search on the samples that sessions recorded: what would it have picked, in how many runs?

The search is driven by `Context`, as in a session. A run that it asks for is one recorded run of the
candidate on all ranks together: in recorded order, and when there are no more of them, one drawn again at
random.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import InvalidOption
from ..formatting import Table, columns, config_label, context_label, format_ms, format_percent
from ..logs.analysis import percent_over
from ..logs.records import Banned, ContextAdmitted, ContextSettled, Record, SessionOpened, Trial
from ..search.budget import RUNS_ALLOWED
from ..search.context_search import Context
from ..search.messages import Announcement, Part, femtoseconds
from ..search.rules import Rules
from ..search.strategies import STRATEGIES

OneRun = dict[int, float]  # rank -> ms
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "min": min,
}


@dataclass(frozen=True)
class Plan:
    """The search to try. None: as the session did."""

    search: str | None = None
    n_warmup: int | None = None
    n_repeat: int | None = None
    statistic: str | None = None
    rank_reduce: str | None = None
    seed: int = 0


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


@dataclass
class Recorded:
    """What one session recorded of one context, as judged in one way."""

    title: str
    kernel: str
    key: str
    judge: str
    candidates: tuple[str, ...] = ()
    bans: dict[int, tuple[int, str]] = field(default_factory=dict)
    samples: dict[int, dict[int, OneRun]] = field(default_factory=dict)  # config id -> run -> rank -> ms
    warmups: dict[int, dict[int, OneRun]] = field(default_factory=dict)
    trials: set[int] = field(default_factory=set)  # runs
    winner: int | None = None


def what_if(sessions: Mapping[str, Sequence[Record]], plan: Plan) -> list[WhatIf]:
    """Return what `plan` would have done for each context of each session that tried something."""
    found = []
    for name, records in sessions.items():
        opened = next((record for record in records if isinstance(record, SessionOpened)), None)
        if opened is None:
            continue
        for recorded in _recorded(records):
            if recorded.samples and len(recorded.candidates) - len(recorded.bans) > 1:
                found.append(_Trial(name, opened, recorded, plan).result())
    return found


class _Trial:
    """One context, searched anew."""

    def __init__(self, session: str, opened: SessionOpened, recorded: Recorded, plan: Plan) -> None:
        self._session, self._opened, self._recorded = session, opened, recorded
        self._statistic = plan.statistic or opened.statistic
        search = plan.search or opened.search
        if search not in STRATEGIES:
            raise InvalidOption(
                f"session {session} used a search of the user's own, {search}, which its log does not hold: "
                f"give --search, one of {', '.join(STRATEGIES)}"
            )
        self._rules = Rules(
            strategy=STRATEGIES[search],
            search=search,
            n_warmup=opened.n_warmup if plan.n_warmup is None else plan.n_warmup,
            n_repeat=opened.n_repeat if plan.n_repeat is None else plan.n_repeat,
            rank_reduce=plan.rank_reduce or opened.rank_reduce,
        )
        self._deck = _Deck(recorded, random.Random(f"{plan.seed} {recorded.title} {recorded.judge}"))
        self._context = self._new_context()

    def result(self) -> WhatIf:
        context, recorded, rules = self._context, self._recorded, self._rules
        limit = RUNS_ALLOWED * max(rules.planned_runs(len(recorded.candidates)), 1)
        runs = 0
        samples: dict[tuple[str, int], list[float]] = {}  # by candidate and rank
        context.start()
        while not context.settled and runs < limit:
            runs += 1
            part = self._one_run(samples)
            context.advance(part, part)
        if not context.settled:
            context.settle("partial")
        best_ms = min((ms for i in range(len(recorded.candidates)) if (ms := self._all_ms(i))), default=None)
        sampled = f" {rules.n_warmup}+{rules.n_repeat}" if rules.search == "exhaustive" else ""
        return WhatIf(
            session=self._session,
            thunk=self._opened.thunk,
            context=recorded.title,
            judge=recorded.judge,
            candidates=len(recorded.candidates),
            search=rules.search + sampled,
            runs=runs,
            recorded_runs=len(recorded.trials),
            resampled=self._deck.resampled,
            pick=self._pick(context.incumbent, best_ms),
            recorded=None if recorded.winner is None else self._pick(recorded.winner, best_ms),
        )

    def _one_run(self, samples: dict[tuple[str, int], list[float]]) -> Part:
        """Return what the ranks would report on a run of the candidate on trial."""
        context = self._context
        assert context.trial is not None
        candidate, is_warmup = context.digests[context.trial], context.is_warmup
        parts = []
        for rank, ms in self._deck.draw(context.trial, is_warmup=is_warmup).items():
            known = samples.setdefault((candidate, rank), [])
            known += [] if is_warmup else [ms]
            parts.append(self._part(known or [ms]))
        merged = functools.reduce(Part.merged, parts, Part(unmeasured=int(not parts)))
        return replace(merged, ran=candidate)

    def _part(self, samples: Sequence[float]) -> Part:
        """Return one rank's report on its samples of a candidate."""
        ms = STATISTICS[self._statistic](samples)
        return Part(worst_ms=ms, best_ms=ms, total_fs=femtoseconds(ms), measured=1)

    def _pick(self, index: int, best_ms: float | None) -> Pick:
        ms = self._all_ms(index)
        return Pick(self._recorded.candidates[index], ms, percent_over(ms, best_ms))

    def _all_ms(self, index: int) -> float | None:
        """Return the agreed time of a candidate by all its samples; None: it has none, or is banned."""
        if index in self._recorded.bans:
            return None
        samples: dict[int, list[float]] = {}
        for one_run in self._deck.samples(index):
            for rank, ms in one_run.items():
                samples.setdefault(rank, []).append(ms)
        merged = functools.reduce(Part.merged, map(self._part, samples.values()), Part())
        return merged.agreed_ms(self._rules.rank_reduce)

    def _new_context(self) -> Context:
        recorded = self._recorded
        order = tuple((str(index), text) for index, text in enumerate(recorded.candidates))
        shared = tuple(digest for digest, _ in order)
        announcement = Announcement(0, recorded.kernel, recorded.key, order, shared)
        context = Context(recorded.title, announcement, self._rules, 0)
        for index, (rank, reason) in recorded.bans.items():
            context.ban(index, rank, reason)
        return context


class _Deck:
    """The recorded runs of each candidate, dealt in their order, then again at random."""

    def __init__(self, recorded: Recorded, random_numbers: random.Random) -> None:
        self.resampled = 0
        self._recorded = recorded
        self._random = random_numbers
        self._dealt: dict[tuple[int, bool], int] = {}

    def samples(self, index: int) -> list[OneRun]:
        return [one_run for _, one_run in sorted(self._recorded.samples.get(index, {}).items())]

    def draw(self, index: int, *, is_warmup: bool) -> OneRun:
        """Return rank -> ms of one run; empty when nothing was recorded of the candidate."""
        warmups = [one_run for _, one_run in sorted(self._recorded.warmups.get(index, {}).items())]
        wanted, other = (warmups, self.samples(index)) if is_warmup else (self.samples(index), warmups)
        dealt = self._dealt.get((index, is_warmup), 0)
        self._dealt[index, is_warmup] = dealt + 1
        if dealt < len(wanted):
            return wanted[dealt]
        self.resampled += 1
        return self._random.choice(wanted or other or [{}])


def _recorded(records: Sequence[Record]) -> Iterator[Recorded]:
    """Yield what was recorded of each context, for each way in which it was judged."""
    contexts: dict[tuple[str, str], Recorded] = {}
    candidates: dict[str, tuple[str, ...]] = {}
    bans: dict[str, dict[int, tuple[int, str]]] = {}
    winners: dict[str, int] = {}
    for record in records:
        if isinstance(record, ContextAdmitted):
            candidates[record.context] = record.candidates
        elif isinstance(record, Banned):
            bans.setdefault(record.context, {}).setdefault(record.config_id, (record.by_rank, record.reason))
        elif isinstance(record, ContextSettled):
            winners[record.context] = record.config_id
        elif isinstance(record, Trial):
            _take_trial(contexts, record)
    for (name, _), recorded in contexts.items():
        recorded.candidates = candidates.get(name, ())
        recorded.bans = {i: ban for i, ban in bans.get(name, {}).items() if i < len(recorded.candidates)}
        recorded.winner = winners.get(name)
        yield recorded


def _take_trial(contexts: dict[tuple[str, str], Recorded], trial: Trial) -> None:
    if trial.kind == "incumbent" or trial.config_id < 0:
        return
    title = context_label(trial.kernel, trial.key)
    recorded = contexts.setdefault(
        (trial.context, trial.judge), Recorded(title, trial.kernel, trial.key, trial.judge)
    )
    recorded.trials.add(trial.run)
    if trial.ms is None or not math.isfinite(trial.ms):
        return
    kept = recorded.samples if trial.kind == "sample" else recorded.warmups
    kept.setdefault(trial.config_id, {}).setdefault(trial.run, {})[trial.rank] = trial.ms


def what_if_table(found: Sequence[WhatIf]) -> Table:
    """Return one row per context that was searched anew."""
    rows = []
    for each in found:
        runs = str(each.runs), str(each.resampled), str(each.recorded_runs)
        judged = each.context if each.judge == "launch" else f"{each.context} by the whole run"
        picks = (*_cells(each.pick), *_cells(each.recorded))
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


def _cells(pick: Pick | None) -> tuple[str, str, str]:
    if pick is None:
        return "-", "-", "-"
    return config_label(pick.config), format_ms(pick.ms), format_percent(pick.regret_percent)
