"""The shared state of a context: its candidates with agreed times and bans."""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Mapping
from typing import Final

from msgspec import Struct

from ..errors import NoValidConfig
from ..formatting import config_label, context_label
from .expectation.fields import LaunchMs
from .messages import Ban
from .reports import AgreedPart
from .rules import BY_LAUNCH
from .strategies import interval

HOST_SHARE = 0.03  # of an agreed time: a larger part of the host's counts


class Status(enum.StrEnum):
    """How far the search of a context is.

    A search under way is ended by `Context.settle`: by its own flow or the phase that runs, at the end of a
    run; by `SearchState` if no rank launches the context, or the session must end. No other code writes it.
    """

    UNDER_WAY = ""  # since its search began, or `SearchState` let it wait for its phase
    TUNED = "tuned"  # the search is over, or one candidate was left
    CACHED = "cached"  # at its admission: it has the result of some rank's claim
    STARVED = "starved"  # no rank launches it; online a launch begins the search again
    PARTIAL = "partial"  # the session ended first; the next one goes on


class ContextDefinition(Struct, frozen=True, array_like=True, gc=False):
    """The fields of a context that never change."""

    kernel: str
    key: str
    kernel_id: str
    digests: tuple[str, ...]  # of the candidates
    texts: tuple[str, ...]
    is_choice: bool
    nearest_key: str  # whose winner stands first
    default: int  # the candidate that is launched untuned
    final_judge: str  # of the result
    fills: dict[str, float]  # by the config's text: how much of the SMs' time a launch fills


class Outcome(Struct, frozen=True, array_like=True, gc=False):
    """The part of a run for a context: the k-th of n warm-ups or samples of candidate `index`."""

    kind: str = "incumbent"  # "warm-up" | "sample" | "incumbent": no trial, or one that did not count
    index: int | None = None
    k: int = 0
    n: int = 0
    judge: str = BY_LAUNCH


class AgreedTimes(Struct, gc=False):
    """Agreed milliseconds so far, by candidate."""

    ms: dict[int, float] = {}
    warmup_ms: dict[int, float] = {}  # of a warm-up run: no sample, but something known
    fastest_ms: dict[int, float] = {}  # the fastest rank's
    gap_ms: dict[int, float] = {}  # how much of the agreed ms may be a host's

    def record_sample(self, index: int, judged: AgreedPart) -> float:
        """Return the agreed time so far; nan unless each rank that launched the candidate has a sample."""
        ms = judged.ms
        if ms is None:
            self.ms.pop(index, None)
        else:
            self.ms[index], self.fastest_ms[index] = ms, judged.best_ms
            self.gap_ms[index] = judged.gap_ms
        return self._so_far(index)

    def record_warmup(self, index: int, judged: AgreedPart) -> float:
        """Return the agreed time so far; without samples that of the warm-up."""
        ms = judged.ms
        if ms is not None:
            self.warmup_ms[index] = interval(ms, judged.gap_ms)
        return self._so_far(index) if ms is None or index in self.ms else self.warmup_ms[index]

    def agreed_ms(self, index: int) -> float:
        """Return a candidate's time so far, of its warm-up where it has no sample; 0.0: it has neither."""
        return self._so_far(index) if index in self.ms else self.warmup_ms.get(index, 0.0)

    def _so_far(self, index: int) -> float:
        return interval(self.ms.get(index, math.nan), self.host_ms(index))

    def drop_samples(self) -> None:
        self.ms, self.warmup_ms, self.fastest_ms, self.gap_ms = {}, {}, {}, {}

    def fastest(self, banned: Container[int]) -> int | None:
        """Return the fastest candidate, the first of equal ones; None: none has one. Any thread may ask."""
        usable = [(ms, index) for index, ms in tuple(self.ms.items()) if index not in banned]
        return min(usable)[1] if usable else None

    def known(self, banned: Container[int]) -> list[tuple[int, float]]:
        """Return (index, ms) of each candidate that ran: of its warm-up where it has no sample."""
        known = {**self.warmup_ms, **self.ms}
        return sorted((index, float(ms)) for index, ms in known.items() if index not in banned)

    def ratio(self, index: int, other: int) -> float:
        """Return the agreed time of one candidate over another's; 1.0 where one has none."""
        return self.ms[index] / self.ms[other] if {index, other} <= self.ms.keys() else 1.0

    def host_ms(self, index: int) -> float:
        """Return how much of a candidate's agreed time may be a host's; 0.0: too little to count."""
        gap_ms = self.gap_ms.get(index, 0.0)
        return gap_ms if gap_ms > HOST_SHARE * self.ms.get(index, math.inf) else 0.0

    def is_launch_bound(self, index: int, banned: Container[int]) -> bool:
        """Return whether a host's part may be in a candidate's time, or in the fastest."""
        judges = (index, self.fastest(banned))
        return any(self.host_ms(each) > 0 for each in judges if each is not None)

    def are_equal(self, *indices: int) -> bool:
        """Return whether two candidates are equal, if the slower time alone held all of the host's."""
        (less, _), (more, slower) = sorted((self.ms.get(index, math.inf), index) for index in indices)
        return more - self.host_ms(slower) <= less


class SharedContext:
    """The base of a context on the deciding rank and on all ranks. Candidates are indices of `digests`."""

    def __init__(self, name: str, definition: ContextDefinition) -> None:
        self.name: Final = name
        self.definition: Final = definition
        self.banned: dict[int, Ban] = {}
        self.times = AgreedTimes()
        self.launch_ms: Mapping[int, float] = {}  # of a search by launches that is over

    status: Status
    judge: str  # of the candidates now

    @property
    def kernel(self) -> str:
        return self.definition.kernel

    @property
    def key(self) -> str:
        return self.definition.key

    @property
    def kernel_id(self) -> str:
        return self.definition.kernel_id

    @property
    def digests(self) -> tuple[str, ...]:
        return self.definition.digests

    @property
    def texts(self) -> tuple[str, ...]:
        return self.definition.texts

    @property
    def is_choice(self) -> bool:
        return self.definition.is_choice

    @property
    def title(self) -> str:
        return context_label(self.kernel, self.key)

    @property
    def settled(self) -> bool:
        return self.status is not Status.UNDER_WAY

    @property
    def provisional(self) -> bool:
        """Return whether a later session takes up the search."""
        return self.status in (Status.PARTIAL, Status.STARVED)

    @property
    def is_tuned_by_launches(self) -> bool:
        """Return whether its search by launches is under way."""
        return self.judge == BY_LAUNCH and not self.settled

    @property
    def is_spent(self) -> bool:
        """Return whether every candidate is banned."""
        return len(self.banned) == len(self.digests)

    @property
    def default(self) -> int:
        """Return the candidate that is launched untuned; the first that works if that one is banned."""
        default, banned = self.definition.default, self.banned
        if default not in banned or self.is_spent:
            return default
        return next(index for index in range(len(self.digests)) if index not in banned)

    def index_of(self, digest: str | None) -> int | None:
        """Return the index of a candidate's digest; None: not a candidate of this context."""
        return self.digests.index(digest) if digest in self.digests else None

    def ms_by_text(self) -> dict[str, LaunchMs]:
        """Return the times by launches, by the config's text."""
        known = {self.texts[index]: ms for index, ms in self.launch_ms.items() if ms > 0}
        return {text: LaunchMs(ms, self.definition.fills.get(text, 1.0)) for text, ms in known.items()}

    def nothing_works(self) -> NoValidConfig:
        """Return the error where every candidate is banned, with each one's reason."""
        failed = ((rank, self.texts[index], reason) for index, (rank, reason) in sorted(self.banned.items()))
        reasons = " ".join(f"Rank {rank}, {config_label(text)}: {reason}." for rank, text, reason in failed)
        return NoValidConfig(f"{self.title}: all {len(self.texts)} configs failed on some rank. {reasons}")
