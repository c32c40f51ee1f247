"""One context on this rank: its configs, its failures, and its launches in the run under way."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from triton.runtime.autotuner import Autotuner

from ..compilation.compiler import CompileState
from ..errors import NoValidConfig
from ..formatting import config_label
from ..search.expectation.fields import UNKNOWN, Fills, TimesByKey
from ..search.expectation.keys import by_distance
from ..search.expectation.order import Meanwhile, TrialOrder, best_start
from ..search.messages import MIXED, Claim, Part, Upgrade
from ..search.orders import ContextOrder
from ..search.rules import BY_LAUNCH
from ..storage.known_results import KnownOfKernel
from ..storage.scope import ContextIdentity
from ..timing.samples import Reading, Samples
from ..triton_api.interception import is_in_backward
from ..triton_api.launch import Key

NONE_FAILED: Mapping[str, str] = {}


class Stage(enum.Enum):
    """How far a context is on this rank. After `Registry.forget` its next launch makes it NEW again.

    NEW: launched here, unknown to the peers. `Registry` chooses its first candidate anew in each run.
    CLAIMED: it has a result from memory (`Registry` at its first launch) or from disk (`Registry.open`).
    SHARED: all ranks share its search (`Registry.apply_outcomes`, after the run in which one announced it).
    SETTLED: its search has a final result (`Search`, on the deciding rank). A provisional result leaves it
        SHARED in the next session.
    """

    NEW = enum.auto()
    CLAIMED = enum.auto()
    SHARED = enum.auto()
    SETTLED = enum.auto()


@dataclass(eq=False)
class Binding:
    """A context as one Autotuner object launches it."""

    tuner: Callable[[], Autotuner | None]  # a weak reference; of a `tunable` to nothing
    key: Key
    configs: dict[str, Any]  # by candidate; of a `tunable`: its options
    rank_context: RankContext
    loaded: dict[tuple[str, int], Any] = field(default_factory=dict)  # (candidate, device) -> kernel


class FirstCandidate(Struct, frozen=True, gc=False):
    """The first candidate of a NEW context, and why it is the first."""

    digest: str = ""  # the winner before an upgrade, `expected`, or the winner of `nearest_key`
    nearest_key: str = ""  # the nearest tuned key, where `digest` is its winner
    upgrade: Upgrade | None = None  # the candidates to race again after an upgrade, from this rank's disk
    other_times: TimesByKey | None = None  # of other keys
    expected: str = ""  # the fastest candidate by the times of other keys
    unlikely: Collection[str] = ()  # slow candidates by those times: the search leaves them out


class RunLaunches(Struct, gc=False):
    """The launches of one context in the run under way."""

    choice: str | None = None  # the candidate of the run; None: not launched yet
    ran: dict[str, None] = {}  # candidates; several where the choice has failed
    count: int = 0
    report: Part | None = None  # what this rank reports of them
    wanted: set[str] | None = None  # candidates to compile after the run; None: not asked yet


@dataclass(eq=False)
class RankContext:
    """One context on this rank; `order` is the record that all ranks have. `stage` says how far it is."""

    name: str
    identity: ContextIdentity
    new_samples: Callable[[], Samples]
    rank: int
    claim: Claim | None = None  # its result in memory or on disk, from before its search
    holds_claim_back: bool = False  # the claim is reported, not launched: peers may not have it
    first_candidate: FirstCandidate = field(default_factory=FirstCandidate)
    order: ContextOrder | None = None  # None: no rank has announced it
    announced: bool = False  # by this rank
    bindings: list[Binding] = field(default_factory=list)
    bans: dict[str, str] = field(default_factory=dict)  # candidates that failed here, with reasons
    reported_bans: frozenset[str] = frozenset()  # candidates whose ban the peers know
    run: RunLaunches = field(default_factory=RunLaunches)
    shares: dict[str, int] = field(default_factory=dict)  # candidate -> thousandths of the SMs that it holds
    fills: Fills = field(default_factory=dict)  # config's text -> the part of the SMs' time it fills
    compile: CompileState = field(default_factory=CompileState)
    launches_per_run: int = 0  # in the last run that counted them
    launched_in_backward: dict[bool, None] = field(default_factory=dict)  # both: recomputed there, it may be
    is_published: bool = False  # its result stands where launches outside the function find it
    _samples: Samples | None = None  # None: it is idle

    @property
    def samples(self) -> Samples:
        if self._samples is None:
            self._samples = self.new_samples()
        return self._samples

    def drop_samples(self) -> None:
        self._samples = None

    @property
    def stage(self) -> Stage:
        if self.order is None:
            return Stage.NEW if self.claim is None else Stage.CLAIMED
        return Stage.SETTLED if self.order.result.is_lasting else Stage.SHARED

    @property
    def title(self) -> str:
        return self.identity.title

    @property
    def texts(self) -> Mapping[str, str]:
        return self.identity.texts

    @property
    def counts_launches(self) -> bool:
        """Return whether all launches of this run are counted: no further one is made at once."""
        return self.stage is not Stage.SETTLED and not (self.order and self.order.next_launch.waiting)

    @property
    def tuned(self) -> str | None:
        """Return the winner of a search or of an earlier one, or the only candidate; None: not tuned."""
        if len(self.texts) == 1:
            return next(iter(self.texts))
        if self.order is None:
            return None if self.claim is None else self.claim[1]
        return self.order.winner

    @property
    def later_candidate(self) -> str:
        """Return the candidate of later launches in a run whose first one tried a slow one; "": the same.

        A recomputation in the backward pass, as by a checkpoint, takes the candidate of its forward pass.
        """
        is_recomputed = len(self.launched_in_backward) > 1
        if is_recomputed or self.order is None or self.order.next_launch.later < 0 or not self.run.count:
            return ""
        later = self.order.digests[self.order.next_launch.later]
        return later if later in self.texts and later not in self.bans else ""

    @property
    def measures(self) -> bool:
        """Return whether launches of this run are samples."""
        if self.order is None:
            return self.stage is Stage.NEW and not self.identity.is_choice
        return self.order.judge == BY_LAUNCH and self.order.is_on_trial

    @property
    def checks_form(self) -> bool:
        """Return whether a timed launch may take a form that is not compiled yet."""
        return self.measures and (self.compile.is_varied or self.order is None)

    @property
    def needs_candidates(self) -> bool:
        """Return whether it is tuned by launches, now or in the next run."""
        return self.stage is Stage.NEW if self.order is None else self.order.is_tuned_by_launches

    @property
    def is_to_preflight(self) -> bool:
        """Return whether candidates are still to be compiled; a new form of launch adds some."""
        return self.needs_candidates and bool(self.compile.left or self.wanted_candidates)

    @property
    def wanted_candidates(self) -> set[str]:
        """Return the candidates that may be tried next, and that the compiler was not asked for."""
        if self.run.wanted is None:  # in this run
            left_out = self.outside_race | self.compile.asked
            self.run.wanted = self.texts.keys() - left_out - self.bans.keys() - {self.run.choice}
        return self.run.wanted

    @property
    def unreported_bans(self) -> dict[str, str]:
        return {c: reason for c, reason in self.bans.items() if c not in self.reported_bans}

    def announce(self, order: ContextOrder, reported_bans: Collection[str]) -> None:
        """Take over the record that follows from this rank's report; drop times of other keys."""
        self.order, self.announced = order, True
        if reported_bans:
            self.reported_bans = self.reported_bans.union(reported_bans)
        self.first_candidate = replace(self.first_candidate, other_times=None, unlikely=())

    @property
    def is_idle(self) -> bool:
        """Return whether it costs the next run nothing unless that launches it."""
        has_work = self.samples.report is not None or self.compile.left or self.unreported_bans
        return self.stage is Stage.SETTLED and not has_work

    def tries(self, candidate: str) -> bool:
        """Return whether a launch of this candidate, now, is a trial."""
        if len(self.texts) == 1 or candidate not in self.texts:
            return False
        if self.order is None:
            return self.stage is Stage.NEW
        return self.order.is_on_trial and self.order.digests[self.order.planned] == candidate

    def begin_with(
        self, known: KnownOfKernel, *, tries_few: bool, is_alone: bool, is_online: bool = False
    ) -> None:
        """Choose the first candidate: the winner before an upgrade, or one that other keys suggest.

        That is the fastest by their times, or else the winner of the nearest key. All ranks know the same
        other keys, so all choose alike; fills of launches need an agreement, unless this rank is alone.
        tries_few: the search tries only candidates that are fast by their times. is_online: only the first
        is compiled until the key's share of a step is known.
        """
        before, key, texts = self.first_candidate, self.identity.key_text, self.texts
        if (upgrade := known.upgrade or before.upgrade) is not None:
            self.first_candidate = replace(before, upgrade=upgrade, nearest_key="", digest=upgrade[2][0])
            return
        winners = {other: winner for other, winner in known.winners.items() if winner in texts}
        nearest = next(iter(by_distance(key, winners)), "")
        expected, has_new_times = before.expected, before.other_times != known.told
        if has_new_times:
            text = best_start(key, texts.values(), known.told, self.fills if is_alone else UNKNOWN)
            expected = next((each for each, own in texts.items() if text and own == text), "")
        first, unlikely = expected or winners.get(nearest, ""), before.unlikely
        if has_new_times and tries_few:
            candidates, now = self._candidates(first), Meanwhile(is_online=is_online)
            order = TrialOrder(key, [*candidates.values()], known.told, lambda: now, self.fills)
            unlikely = {each for index, each in enumerate(candidates) if index not in order.likely}
        nearest_key = nearest if first == winners.get(nearest) else ""
        self.first_candidate = FirstCandidate(first, nearest_key, None, known.told, expected, unlikely)

    @property
    def candidates(self) -> dict[str, str]:
        """Return the candidates with their texts, the first one of the context first."""
        return self._candidates(self.first_candidate.digest)

    def _candidates(self, first: str) -> dict[str, str]:
        return {first: self.texts[first], **self.texts} if first else dict(self.texts)

    @property
    def outside_race(self) -> set[str]:
        """Return the candidates that are not compiled, as their times, or other keys', rule them out."""
        if self.order is not None:
            return self.order.outside_race
        upgrade, unlikely = self.first_candidate.upgrade, self.first_candidate.unlikely
        return {*unlikely} if upgrade is None else self.texts.keys() - set(upgrade[2])

    def report_run(self, *, waits: bool) -> Part | None:
        """Return this rank's report of the run, or of an earlier run whose clock was not read; None: nothing.

        waits: read the clock now.
        """
        # While a peer has not read its sample yet, this run's launches are no part of the trial.
        is_waiting = self.order is not None and self.order.next_launch.waiting
        if self.samples.report is not None or (self.run.ran and not is_waiting):
            is_mixed = len(self.run.ran) > 1
            ran = MIXED if is_mixed else next(iter(self.run.ran), None)
            return part_of(self.samples.report_run(ran, waits=waits, is_mixed=is_mixed))
        return self._report_earlier_runs() or (Part() if self.run.ran else None)

    def _report_earlier_runs(self) -> Part | None:
        """Return the median of the candidate on trial where only earlier runs have launched it here."""
        if self.order is None or self.order.next_launch.trial < 0 or self.order.judge != BY_LAUNCH:
            return None
        earlier = self.samples.report_earlier_runs(self.order.digests[self.order.next_launch.trial])
        return None if earlier is None else part_of(earlier)

    def footprint(self, ran: str | None) -> tuple[int, int]:
        """Return the share of the SMs and the number of this run's launches; (0, 1): not judged by them."""
        judges = self.order is None or self.order.is_tuned_by_launches
        if ran is None or not judges or ran not in self.shares:
            return 0, 1
        return self.shares[ran], max(self.run.count, 1)

    def begin_run(self) -> None:
        """Forget the last run; the first launch chooses anew."""
        self.run = RunLaunches()
        self.samples.begin_run()

    def chosen(self, binding: Binding, failed: Mapping[str, str] = NONE_FAILED) -> str:
        """Return the candidate of this run, or a stand-in where it has failed or the Autotuner pruned it."""
        self.launched_in_backward[is_in_backward()] = None
        if self.run.choice is None:
            planned = "" if self.order is None else self.order.digests[self.order.planned]
            is_usable = planned in self.texts and planned not in self.bans
            self.run.choice = planned if is_usable else self.stand_in()
        choice = self.later_candidate or self.run.choice
        if choice in binding.configs and choice not in failed:
            return choice
        return self.stand_in(binding.configs, failed)

    def stand_in(self, among: Collection[str] | None = None, failed: Mapping[str, str] = NONE_FAILED) -> str:
        """Return the incumbent, or the first candidate that has not failed; raises NoValidConfig.

        among: the candidates that an Autotuner's pruning has left; None: all. failed: those that have failed
        in this launch, with reasons.
        """
        candidates = self.candidates
        usable = candidates if among is None else among
        banned = {*self.bans, *failed}
        if self.order is not None:
            incumbent = self.order.digests[self.order.incumbent]
            banned |= {self.order.digests[index] for index in self.order.banned}
        elif self.claim is None or self.holds_claim_back:
            incumbent = next(iter(candidates))
        else:
            incumbent = self.claim[1]
        for candidate in (incumbent, *candidates, *usable):
            if candidate in usable and candidate not in banned:
                return candidate
        reasons = " ".join(self._reasons(failed))
        raise NoValidConfig(f"{self.title}: all {len(self.texts)} configs failed on some rank. {reasons}")

    def _reasons(self, failed: Mapping[str, str]) -> Iterator[str]:
        own = {**failed, **self.bans}
        for candidate, text in self.texts.items():
            if candidate in own:
                yield f"Rank {self.rank}, {config_label(text)}: {own[candidate].rstrip('.')}."
            elif self.order is not None and candidate in self.order.digests:
                index = self.order.digests.index(candidate)
                rank, reason = self.order.banned.get(index, (self.rank, "pruned away"))
                yield f"Rank {rank}, {config_label(text)}: {reason.rstrip('.')}."

    def config_of(self, candidate: str) -> Any:
        """Return the config of a candidate, or the option of a `tunable`; None: this rank has none."""
        holders = (binding.configs for binding in self.bindings if candidate in binding.configs)
        return next(holders, {}).get(candidate)


def part_of(reading: Reading) -> Part:
    """Return a reading as this rank's part of a run's report."""
    if reading.ms is None:
        return Part(reading.ran, is_pending=reading.is_pending, is_unmeasured=reading.is_timed)
    return Part(reading.ran, reading.ms, reading.gap_ms)
