"""This rank's side of one context: its configs, what it launches in a run, what it found wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from triton.runtime.autotuner import Autotuner

from ..errors import NoValidConfig
from ..formatting import context_label
from ..search.context_search import Context
from ..search.messages import Announcement, Part
from ..search.rules import BY_LAUNCH
from ..timing.samples import Stopwatch
from ..triton_api.identity import KernelSource
from ..triton_api.interception import Key


@dataclass(frozen=True)
class Claim:
    """A result that a context already has when this rank first launches it."""

    rank: int
    candidate: str  # digest
    ms: float | None = None


@dataclass(eq=False)
class Binding:
    """One context as launched through one Autotuner object: its configs by candidate digest."""

    tuner: Callable[[], Autotuner | None]  # a weak reference; of a `tunable` to nothing
    key: Key
    configs: dict[str, Any]  # or the options of a `tunable`
    local: Local
    loaded: set[tuple[str, int]] = field(default_factory=set)  # (candidate, device)


@dataclass(eq=False)
class Local:
    """What this rank knows of one context."""

    name: str
    kernel: str  # identity of the kernel
    source: KernelSource
    key: Key
    key_text: str
    constants: str
    stopwatch: Stopwatch
    order: tuple[tuple[str, str], ...]  # (digest, text)
    rank: int
    family: str = ""  # of Autotuners of the same function and keys
    slot: str = ""
    is_choice: bool = False  # of a `tunable`
    claim: Claim | None = None
    context: Context | None = None  # the state all ranks share, once one of them has announced it
    announced: bool = False  # by this rank
    bindings: list[Binding] = field(default_factory=list)
    bans: dict[str, str] = field(default_factory=dict)  # digest -> reason, found here
    told_bans: set[str] = field(default_factory=set)
    choice: str | None = None  # of the run under way
    ran: set[str] = field(default_factory=set)  # in the run under way
    launches: int = 0
    is_published: bool = False  # its result, to where launches outside the function find it
    told: Part | None = None  # of the run under way, when the peers have been told

    @property
    def title(self) -> str:
        return context_label(self.source.short_name, self.key_text)

    @property
    def is_settled(self) -> bool:
        """Return whether its result stands in this process."""
        return self.context is not None and self.context.stands

    @property
    def measures(self) -> bool:
        """Return whether launches of this run are samples."""
        if self.context is None:
            return self.claim is None and not self.is_choice
        return self.context.judge == BY_LAUNCH and self.context.is_on_trial

    @property
    def is_waiting(self) -> bool:
        """Return whether a peer has not read its sample yet: this run's launches are no part of the trial."""
        return self.context is not None and self.context.waiting

    def tries(self, candidate: str) -> bool:
        """Return whether a launch of this candidate, now, is a trial."""
        if len(self.order) == 1 or candidate not in dict(self.order):
            return False
        if self.context is None:
            return self.claim is None
        trial = self.context.trial
        return trial is not None and self.context.is_on_trial and self.context.digests[trial] == candidate

    def retold(self) -> Part | None:
        """Return the statistic so far of the candidate on trial, if only other runs launched it here."""
        if self.context is None or self.context.trial is None or self.context.judge != BY_LAUNCH:
            return None
        if not self.measures and not self.is_waiting:
            return None
        return self.stopwatch.retell(self.context.digests[self.context.trial])

    def begin_run(self) -> None:
        """Forget the last run; the first launch chooses anew."""
        self.choice, self.launches, self.told = None, 0, None
        self.ran.clear()
        self.stopwatch.begin_run()

    def chosen(self, binding: Binding) -> str:
        """Return the candidate of this run; what stands in for it where an Autotuner has pruned it away."""
        if self.choice is None:
            self.choice = self._choose()
        return self.choice if self.choice in binding.configs else self.stand_in(binding.configs)

    def _choose(self) -> str:
        """Return the candidate for all launches of this run."""
        if self.context is not None:
            planned = self.context.digests[self.context.planned]
            if planned not in self.bans and planned in dict(self.order):
                return planned
        return self.stand_in()

    def stand_in(self, among: Collection[str] | None = None) -> str:
        """Return the incumbent, or the first candidate that has not failed; raises NoValidConfig.

        among: the candidates that an Autotuner has left; None: all that this rank has met the context with.
        """
        order = dict(self.order)
        known = order if among is None else among
        banned = set(self.bans)
        if self.context is not None:
            incumbent = self.context.digests[self.context.incumbent]
            banned |= {self.context.digests[index] for index in self.context.banned}
        else:
            incumbent = self.claim.candidate if self.claim is not None else self.order[0][0]
        for candidate in (incumbent, *order, *known):
            if candidate not in banned and candidate in known:
                return candidate
        raise NoValidConfig(
            f"{self.title}: all {len(self.order)} configs failed on some rank. {' '.join(self._reasons())}"
        )

    def _reasons(self) -> Iterator[str]:
        for candidate, text in self.order:
            if candidate in self.bans:
                yield f"Rank {self.rank}, {text}: {self.bans[candidate]}."
            elif self.context is not None and candidate in self.context.digests:
                index = self.context.digests.index(candidate)
                rank, reason = self.context.banned.get(index, (self.rank, "pruned away"))
                yield f"Rank {rank}, {text}: {reason}."

    def config_of(self, candidate: str) -> Any:
        """Return the config of a candidate, or the option of a `tunable`; None where this rank has none."""
        holders = (binding.configs for binding in self.bindings if candidate in binding.configs)
        return next(holders, {}).get(candidate)

    def announcement(self, kernel_id: str, siblings: int, place: int) -> Announcement:
        claim = self.claim
        return Announcement(
            rank=self.rank,
            kernel=self.source.short_name,
            key=self.key_text,
            order=self.order,
            shared=tuple(sorted(candidate for candidate, _ in self.order)),
            is_choice=self.is_choice,
            kernel_id=kernel_id,
            family=self.family,
            siblings=siblings,
            place=place,
            slot=self.slot,
            claim=None if claim is None else (claim.rank, claim.candidate, claim.ms),
        )
