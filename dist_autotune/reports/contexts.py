"""Contexts of a session as its ranks logged them: agreed times, spread, the choice of each rank alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ..logs.records import (
    Agreed,
    Banned,
    ConfigRecord,
    ContextAdmitted,
    ContextRecord,
    ContextSettled,
    Record,
    Trial,
)
from ..tuner.report import TunedContext, percent_over

R = TypeVar("R", bound=Record)
FIGURES = (  # that a record of a result and the program's report have alike
    *("status", "ms", "fastest_rank_ms", "default_ms", "judge", "launches", "timings", "banned"),
    *("launch_bound", "same_bits", "again", "untried", "not_fastest"),
)


def of_kind(records: Iterable[Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def is_sample(trial: Trial) -> bool:
    return trial.kind == "sample" and trial.config_id >= 0 and trial.ms is not None


@dataclass(frozen=True)
class CandidateHistory:
    """One config of a context."""

    config_id: int
    config: str
    agreed_ms: float | None
    banned: str  # rank and reason; empty: not banned
    trials: tuple[Trial, ...]  # of all ranks

    @cached_property
    def rank_ms(self) -> dict[int, float]:
        """Return each rank's own median, of the ranks that have one."""
        return {trial.rank: trial.median_ms for trial in self.trials if trial.median_ms is not None}

    @property
    def samples(self) -> int:
        return sum(map(is_sample, self.trials))

    @property
    def spread_percent(self) -> float | None:
        """Return by how many percent the slowest rank is above the fastest; None below two timed ranks."""
        times = self.rank_ms.values()
        return percent_over(max(times), min(times)) if len(times) > 1 else None


@dataclass(frozen=True)
class ContextHistory:
    """One (kernel, key) in one session."""

    records: tuple[ContextRecord, ...]
    is_alone: bool  # one rank: it agrees with nobody

    @cached_property
    def tuned(self) -> TunedContext:
        """Return the context as the program's report has it, or `unfinished` with the times there were."""
        first, found = self.records[0], of_kind(self.records, ContextSettled)
        if not found:
            agreed = sorted(of_kind(self.records, Agreed), key=lambda record: record.run)
            timings = {each.config: each.ms for each in agreed if each.counted and each.ms is not None}
            return TunedContext(first.kernel, first.key, None, status="unfinished", timings=timings)
        # The last one, as the lowest rank that launches it wrote it.
        settled = max(found, key=lambda each: (each.run, each.launches > 0, -each.rank))
        figures = {name: getattr(settled, name) for name in FIGURES}
        return TunedContext(first.kernel, first.key, settled.config, **figures)

    @property
    def winner(self) -> CandidateHistory | None:
        return next((each for each in self.candidates if each.config == self.tuned.config), None)

    @cached_property
    def candidates(self) -> tuple[CandidateHistory, ...]:
        texts: dict[int, str] = {}
        banned: dict[int, str] = {}
        trials: defaultdict[int, list[Trial]] = defaultdict(list)
        for record in self.records:
            if isinstance(record, ContextAdmitted):
                texts.update(enumerate(record.candidates))
            elif isinstance(record, Banned):
                banned[record.config_id] = f"rank {record.by_rank}: {record.reason}"
            elif isinstance(record, Trial):
                trials[record.config_id].append(record)
            if isinstance(record, ConfigRecord) and record.config_id >= 0:
                texts[record.config_id] = record.config
        agreed_ms = self._agreed_ms()
        return tuple(
            CandidateHistory(index, text, agreed_ms.get(text), banned.get(index, ""), tuple(trials[index]))
            for index, text in sorted(texts.items())
        )

    def choices_alone(self) -> dict[int, CandidateHistory]:
        """Return, for each rank, the candidate that is fastest by this rank's own median."""
        timed: defaultdict[int, list[CandidateHistory]] = defaultdict(list)
        for candidate in self.candidates:
            for rank in candidate.rank_ms:
                timed[rank].append(candidate)
        return {rank: min(timed[rank], key=lambda each: each.rank_ms[rank]) for rank in sorted(timed)}

    @property
    def cost_alone_percent(self) -> float | None:
        """Return by how many percent the worst choice of one rank alone is slower for all; None: unknown."""
        costs = [percent_over(each.agreed_ms, self.tuned.ms) for each in self.choices_alone().values()]
        return max((cost for cost in costs if cost is not None), default=None)

    def _agreed_ms(self) -> Mapping[str, float]:
        """Return config -> agreed ms; of a rank alone that has settled nothing, its own."""
        if self.tuned.timings or not self.is_alone:
            return self.tuned.timings
        samples = filter(is_sample, of_kind(self.records, Trial))
        return {trial.config: trial.median_ms for trial in samples if trial.median_ms is not None}
