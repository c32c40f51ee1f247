"""This rank's side of all its contexts: what it tells its peers of a run, and takes in of their answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from triton.runtime.autotuner import Autotuner

from ..errors import NoValidConfig
from ..formatting import context_label
from ..search.context_search import Context, Outcome
from ..search.messages import MIXED, Announcement, Part
from ..search.rules import BY_LAUNCH
from ..timing.samples import Samples
from ..triton_api.identity import KernelSource
from ..triton_api.interception import Key
from .kernel_ids import KernelNames


class RankContexts:
    """The contexts that this rank has launched, by name."""

    def __init__(
        self, names: KernelNames, agree: str, rank: int, on_ban: Callable[[RankContext, str, str], None]
    ) -> None:
        self.by_name: dict[str, RankContext] = {}
        self.has_news = False  # the ranks have agreed on something since the last run began
        self._names = names
        self._agree = agree
        self._rank = rank
        self._on_ban = on_ban

    def find(self, kernel: str, key_text: str) -> tuple[RankContext | None, str]:
        """Return the context of a kernel's key, if there is one, and what tells it from others of the kernel.

        That is the key, or with `agree="ordinal"` its order among those launched here.
        """
        own = [local for local in self.by_name.values() if local.kernel == kernel]
        for local in own:
            if local.key_text == key_text:
                return local, local.slot
        if self._agree == "key":
            return None, key_text
        taken = {local.slot for local in own}
        return None, next(slot for n in range(len(own) + 1) if (slot := f"@{n}") not in taken)

    def ban(self, local: RankContext, candidate: str, reason: str) -> None:
        """Keep that a candidate failed here; the peers are told at the end of the run."""
        local.bans[candidate] = reason
        self._on_ban(local, candidate, reason)

    def rename(self, names: Mapping[str, str]) -> None:
        """Call contexts as the peers do: their kernels are one, though their candidates differ."""
        for old, new in names.items():
            local = self.by_name.pop(old, None)
            if local is not None:
                local.name = new
                self.by_name[new] = local

    def forget(self, names: Iterable[str]) -> None:
        gone = set(names)
        self.has_news = True
        self.by_name = {name: local for name, local in self.by_name.items() if name not in gone}

    # -- one run -------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Forget the last run."""
        self.has_news = False
        for local in self.by_name.values():
            local.begin_run()

    def abandon_run(self) -> None:
        """Drop what the run under way has measured: it raised."""
        for local in self.by_name.values():
            local.samples.abandon_run()
            local.begin_run()

    def launched(self) -> list[str]:
        """Return what this run has launched, as `kernel[key] with config`; any thread may ask.

        Only what runs on the device at this moment, or is being launched, where the clock can tell; else only
        what is on trial, if anything is.
        """
        chosen = []
        for local in list(self.by_name.values()):
            told = local.samples.report  # of the run that is waited for, which may be an earlier one
            candidate = told.ran if told is not None and told.pending else local.choice
            if candidate is not None:
                chosen.append((local, dict(local.order).get(candidate, "several configs")))
        running = [(local, text) for local, text in chosen if local.samples.is_running]
        trials = [
            (local, text) for local, text in chosen if local.context is None or local.context.is_on_trial
        ]
        return [f"{local.title} with {text}" for local, text in running or trials or chosen]

    def tell(self, *, waits: bool) -> dict[str, Part]:
        """Return what is to be told the peers of this run.

        `waits`: read every clock now; otherwise those whose device work is done, or due.
        """
        return {local.name: self._tell(local, waits) for local in list(self._to_tell())}

    def new_sources(self) -> dict[str, str]:
        """Return the source digests of the functions in the kernels that this run announces, by name."""
        locals_ = self.by_name.values()
        new = {
            local.source
            for local in locals_
            if local.told is not None and local.told.announcement is not None
        }
        told = {name for source in new for name, _ in source.texts}
        texts: dict[str, set[str]] = {}
        for name, text in (pair for local in locals_ for pair in local.source.texts):
            if name in told:
                texts.setdefault(name, set()).add(text)
        return {name: " ".join(sorted(digests)) for name, digests in texts.items()}

    def take(
        self, contexts: Mapping[str, Context], outcomes: Mapping[str, Outcome], *, late_ms: float
    ) -> None:
        """Take in what the ranks agreed of the run that was told; `late_ms`: see `Samples.apply_outcome`."""
        self.has_news = True
        for local in self.by_name.values():
            if local.told is None:
                # Met in a settled call and not launched since: peers may have announced it meanwhile.
                local.context = local.context or contexts.get(local.name)
                continue
            context = local.context = contexts[local.name]
            local.announced = True
            local.told_bans.update(local.told.bans)
            by_launch = outcomes[local.name].judge == BY_LAUNCH
            counts = outcomes[local.name].kind == "sample" and by_launch
            local.samples.apply_outcome(waiting=context.waiting, counts=counts, late_ms=late_ms)

    def _to_tell(self) -> Iterator[RankContext]:
        for local in self.by_name.values():
            has_run = local.ran or local.samples.report is not None
            if has_run or local.bans.keys() - local.told_bans or local.retold() is not None:
                yield local

    def _tell(self, local: RankContext, waits: bool) -> Part:
        ran = None if not local.ran else next(iter(local.ran)) if len(local.ran) == 1 else MIXED
        is_trial = bool(local.ran) and not local.is_waiting  # else the run told is an earlier one
        if is_trial or local.samples.report is not None:
            report = local.samples.report_run(ran, waits=waits)
        else:
            report = local.retold() or Part()
        untold = {c: (self._rank, reason) for c, reason in local.bans.items() if c not in local.told_bans}
        kernel_id = self._names.alias(local.kernel) if local.family else ""
        siblings = self._names.siblings(local.kernel)
        announcement = None
        if not local.announced:
            place = list(self.by_name).index(local.name)
            announcement = local.announcement(kernel_id, siblings, place)
        local.told = replace(report, bans=untold, announcement=announcement)
        return local.told


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
    local: RankContext
    loaded: set[tuple[str, int]] = field(default_factory=set)  # (candidate, device)


@dataclass(eq=False)
class RankContext:
    """What this rank knows of one context."""

    name: str
    kernel: str  # identity of the kernel
    source: KernelSource
    key: Key
    key_text: str
    constants: str
    samples: Samples
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
        return self.samples.report_earlier_runs(self.context.digests[self.context.trial])

    def begin_run(self) -> None:
        """Forget the last run; the first launch chooses anew."""
        self.choice, self.launches, self.told = None, 0, None
        self.ran.clear()
        self.samples.begin_run()

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
