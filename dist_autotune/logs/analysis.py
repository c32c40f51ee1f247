"""What the times of several ranks say: how far apart they are, who lags, what each alone would have chosen.

These are the values; `history.load` makes them from the logs of a directory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..formatting import WALL_CLOCK, context_label
from .records import SessionOpened


def percent_over(ms: float | None, reference_ms: float | None) -> float | None:
    """Return by how many percent `ms` is above `reference_ms`; None where either is unknown."""
    return None if ms is None or not reference_ms else (ms / reference_ms - 1) * 100


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured of one candidate."""

    rank: int
    samples_ms: tuple[float, ...]
    statistic_ms: float | None  # the rank's own, as it was sent to the others; None: no usable sample


@dataclass(frozen=True)
class Spread:
    """The fastest and the slowest rank of one candidate."""

    fastest_ms: float
    fastest_rank: int
    slowest_ms: float
    slowest_rank: int

    @property
    def percent(self) -> float | None:
        return percent_over(self.slowest_ms, self.fastest_ms)


@dataclass(frozen=True)
class CandidateHistory:
    """One config of a context: what each rank measured and what was agreed."""

    config_id: int
    config: str
    agreed_ms: float | None
    banned: str  # why, with the rank; empty: it was not
    by_rank: tuple[RankTimes, ...]

    @property
    def spread(self) -> Spread | None:
        """Return how far the ranks are apart; None with fewer than two of them timed."""
        timed = [(times.statistic_ms, times.rank) for times in self.by_rank if times.statistic_ms is not None]
        return Spread(*min(timed), *max(timed)) if len(timed) > 1 else None


@dataclass(frozen=True)
class RankChoice:
    """The candidate that one rank would have chosen by its own times, and what all ranks pay for it."""

    rank: int
    config_id: int
    config: str
    own_ms: float
    agreed_ms: float | None
    cost_percent: float | None  # over the agreed winner's agreed time


@dataclass(frozen=True)
class Step:
    """The best agreed time known after a run."""

    run: int
    best_ms: float


@dataclass(frozen=True)
class ContextHistory:
    """One (kernel, key) in one session."""

    digest: str
    kernel: str
    key: str
    status: str  # of its settlement; "unfinished" without one
    winner: int | None  # config id
    ms: float | None  # of the winner, agreed
    candidates: tuple[CandidateHistory, ...]
    convergence: tuple[Step, ...]
    launch_bound: bool = False  # its times hold the host's part

    @property
    def label(self) -> str:
        return context_label(self.kernel, self.key)

    def candidate(self, config_id: int | None) -> CandidateHistory | None:
        return next((each for each in self.candidates if each.config_id == config_id), None)

    def choices_alone(self) -> tuple[RankChoice, ...]:
        """Return, for each rank, the candidate that is fastest by this rank's own statistic."""
        best: dict[int, tuple[float, CandidateHistory]] = {}
        for candidate in self.candidates:
            for times in candidate.by_rank:
                own_ms = times.statistic_ms
                if own_ms is not None and (times.rank not in best or own_ms < best[times.rank][0]):
                    best[times.rank] = own_ms, candidate
        return tuple(
            RankChoice(
                rank=rank,
                config_id=choice.config_id,
                config=choice.config,
                own_ms=own_ms,
                agreed_ms=choice.agreed_ms,
                cost_percent=percent_over(choice.agreed_ms, self.ms),
            )
            for rank, (own_ms, choice) in sorted(best.items())
        )


@dataclass(frozen=True)
class Straggler:
    """How often a rank was the slowest of those that took the same sample, and how far it lags in general."""

    rank: int
    slowest_samples: int
    compared_samples: int
    behind_percent: float  # median over the compared samples, against the fastest rank of each


@dataclass(frozen=True)
class Compiling:
    """What a rank compiled before trials, over all contexts."""

    rank: int
    compiled: int  # by this rank
    from_peers: int  # by another process of its host meanwhile
    cached: int
    failed: int
    seconds: float


@dataclass(frozen=True)
class SessionHistory:
    """One session as its ranks logged it."""

    name: str
    opened: SessionOpened | None  # None: that line is lost
    ranks: tuple[int, ...]  # those whose logs are here
    runs: int
    outcome: str  # "unfinished": the session, or its process, ended without closing it
    warning: str
    contexts: tuple[ContextHistory, ...]
    stragglers: tuple[Straggler, ...]
    remarks: tuple[str, ...]  # failed runs and notes
    compiling: tuple[Compiling, ...] = ()  # of the ranks that compiled

    @property
    def thunk(self) -> str:
        return self.opened.thunk if self.opened else "?"

    @property
    def is_wall_clock(self) -> bool:
        """True where times come from the host: the interpreter, or no GPU."""
        return self.opened is not None and self.opened.clock == WALL_CLOCK

    @property
    def has_samples(self) -> bool:
        candidates = (candidate for context in self.contexts for candidate in context.candidates)
        return any(times.samples_ms for candidate in candidates for times in candidate.by_rank)


@dataclass(frozen=True)
class History:
    """All sessions of a log directory, oldest first."""

    directory: Path
    sessions: tuple[SessionHistory, ...]
    skipped: Mapping[str, Counter[str]]  # file name -> reason -> lines that could not be read

    def newest(self) -> tuple[SessionHistory, ...]:
        """Return the newest session of each function, of those that tried something if there are any."""
        chosen: dict[str, SessionHistory] = {}
        for session in self.sessions:
            if session.has_samples or session.thunk not in chosen or not chosen[session.thunk].has_samples:
                chosen[session.thunk] = session
        return tuple(chosen.values())
