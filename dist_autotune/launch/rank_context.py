"""One context on this rank: its configs, its failures, and its launches in the run under way."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from triton.runtime.autotuner import Autotuner

from ..compilation.backlog import CompileState
from ..errors import NoValidConfig
from ..formatting import config_label
from ..search.context import Context
from ..search.expectation.fields import TimesByKey
from ..search.expectation.flow import order_of
from ..search.expectation.keys import by_distance
from ..search.expectation.order import best_start
from ..search.messages import Claim, Part, Upgrade, femtoseconds
from ..search.rules import BY_LAUNCH
from ..storage.known_results import KnownOfKernel
from ..storage.scope import ContextIdentity
from ..timing.samples import Reading, Samples
from ..triton_api.launch import Key

SETTLED_FAILURES = 3  # in a row, of a settled config: then others replace it until a session has banned it
NONE_FAILED: Mapping[str, str] = {}


class Stage(enum.Enum):
    """How far a context is on this rank. `Registry.forget` drops one, and a launch meets it as a new one.

    NEW: a launch has met it. `Registry` chooses in each run anew what it begins with.
    CLAIMED: it has a result of memory or disk: since its first launch, or since a session opened.
    SHARED: all ranks share its search, from the end of the run in which one of them announced it
        (`Registry.apply_outcomes`); at once where that was before its first launch here.
    SETTLED: the search has a result that stands (`SearchState.step`). A provisional one is SHARED again in
        the next session.
    """

    NEW = enum.auto()
    CLAIMED = enum.auto()
    SHARED = enum.auto()
    SETTLED = enum.auto()


@dataclass(eq=False)
class Binding:
    """One context as launched through one Autotuner object: its configs by candidate digest."""

    tuner: Callable[[], Autotuner | None]  # a weak reference; of a `tunable` to nothing
    key: Key
    configs: dict[str, Any]  # or the options of a `tunable`
    rank_context: RankContext
    loaded: dict[tuple[str, int], Any] = field(default_factory=dict)  # (candidate, device) -> kernel


@dataclass(frozen=True)
class Beginning:
    """The candidate that a new context begins with, and why."""

    first: str = ""  # an old winner, the nearest key's, or `expected`
    like: str = ""  # the nearest tuned key, if `first` is its winner
    upgrade: Upgrade | None = None  # the candidates to race again after an upgrade, from this rank's disk
    told: TimesByKey | None = None  # times of other keys
    expected: str = ""  # the candidate that is the fastest by those times
    unlikely: Collection[str] = ()  # candidates that are slow by those times: the search leaves them out


@dataclass
class RunLaunches:
    """The launches of one context in the run under way."""

    choice: str | None = None  # the candidate that the run launches; None: nothing was launched yet
    ran: set[str] = field(default_factory=set)
    count: int = 0
    report: Part | None = None  # to the peers


@dataclass(eq=False)
class RankContext:
    """One context on this rank; `search` is the state of it that all ranks share."""

    name: str
    slot: str  # unique among the contexts of the kernel
    identity: ContextIdentity
    samples: Samples
    rank: int
    claim: Claim | None = None  # its result in memory or on disk, before this rank first launched it
    holds_claim_back: bool = False  # the claim is reported and not launched: peers may not have it
    beginning: Beginning = field(default_factory=Beginning)
    search: Context | None = None  # the state all ranks share, once one of them has announced it
    announced: bool = False  # by this rank
    bindings: list[Binding] = field(default_factory=list)
    bans: dict[str, str] = field(default_factory=dict)  # digest -> reason, found here
    reported_bans: set[str] = field(default_factory=set)
    # Of settled launches here, by digest: how often in a row a candidate has failed, and why the last time.
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    run: RunLaunches = field(default_factory=RunLaunches)
    shares: dict[str, int] = field(default_factory=dict)  # candidate -> thousandths of the SMs that it holds
    compile: CompileState = field(default_factory=CompileState)
    launches_per_run: int = 0  # in the last run that launched it before it was settled
    is_published: bool = False  # its result, to where launches outside the function find it
    is_recorded: bool = False  # on disk, as one that waits for a result

    @property
    def stage(self) -> Stage:
        if self.search is None:
            return Stage.NEW if self.claim is None else Stage.CLAIMED
        return Stage.SETTLED if self.search.is_lasting else Stage.SHARED

    @property
    def title(self) -> str:
        return self.identity.title

    @property
    def texts(self) -> Mapping[str, str]:
        return self.identity.texts

    @property
    def tuned(self) -> str | None:
        """Return the winner of a search, or the only candidate; None: not tuned."""
        if len(self.texts) == 1:
            return next(iter(self.texts))
        if self.search is None:
            return None if self.claim is None else self.claim[1]
        has_result = self.search.winner is not None and not self.search.provisional and self.search.settled
        return self.search.digests[self.search.incumbent] if has_result else None

    @property
    def measures(self) -> bool:
        """Return whether launches of this run are samples."""
        if self.search is None:
            return self.stage is Stage.NEW and not self.identity.is_choice
        return self.search.judge == BY_LAUNCH and self.search.is_on_trial

    @property
    def checks_form(self) -> bool:
        """Return whether a launch that is timed may have a form that is not compiled yet."""
        return self.measures and (self.compile.is_varied or self.search is None)

    @property
    def is_to_preflight(self) -> bool:
        """Return whether candidates are still to be compiled, for the form of a new launch too."""
        has_all = self.search is None or self.compile.has_all or self.compile.waves == self.search.waves
        if self.compile.is_preflighted and has_all and not self.compile.left:
            return False
        return self.stage is Stage.NEW if self.search is None else self.search.is_tuned_by_launches

    @property
    def failing(self) -> dict[str, str]:
        """Return the candidates that have failed in each of the last settled launches, with reasons."""
        return {c: reason for c, (times, reason) in self.failures.items() if times >= SETTLED_FAILURES}

    def tries(self, candidate: str) -> bool:
        """Return whether a launch of this candidate, now, is a trial."""
        if len(self.texts) == 1 or candidate not in self.texts:
            return False
        if self.search is None:
            return self.stage is Stage.NEW
        return self.search.is_on_trial and self.search.digests[self.search.planned] == candidate

    def begin_with(self, known: KnownOfKernel, *, tries_few: bool) -> None:
        """Choose the candidate to begin with: the winner before an upgrade, or one that other keys suggest.

        That is the fastest by their times, or else the winner of the nearest key. All ranks know the same
        other keys, so all begin alike. tries_few: the search tries only what is fast by their times.
        """
        before = self.beginning
        if (upgrade := known.upgrade or before.upgrade) is not None:
            self.beginning = replace(before, upgrade=upgrade, like="", first=upgrade[2][0])
            return
        key, texts = self.identity.key_text, self.texts
        usable = {key: winner for key, winner in known.winners.items() if winner in texts}
        like = next(iter(by_distance(key, usable)), "")
        expected, is_new = before.expected, before.told != known.told
        if is_new:
            text = best_start(key, texts.values(), known.told)
            expected = next((each for each, own in texts.items() if text and own == text), "")
        first = expected or usable.get(like, "")
        like = like if first == usable.get(like) else ""
        self.beginning = Beginning(first, like, told=known.told, expected=expected, unlikely=before.unlikely)
        if is_new and tries_few:
            candidates = self.candidates
            order = order_of(key, [*candidates.values()], known.told)
            likely = range(len(candidates)) if order is None else order.likely
            unlikely = {each for index, each in enumerate(candidates) if index not in likely}
            self.beginning = replace(self.beginning, unlikely=unlikely)

    @property
    def candidates(self) -> dict[str, str]:
        """Return the texts of the candidates by digest, first the one that the context begins with."""
        first, texts = self.beginning.first, dict(self.texts)
        return {first: texts[first], **texts} if first else texts

    @property
    def outside_race(self) -> set[str]:
        """Return the candidates that are not compiled: others are better, by their times or other keys'."""
        if self.search is not None:
            return self.search.outside_race
        upgrade, unlikely = self.beginning.upgrade, self.beginning.unlikely
        return {*unlikely} if upgrade is None else self.texts.keys() - set(upgrade[2])

    def report_earlier_runs(self) -> Part | None:
        """Return the statistic so far of the candidate on trial, if only other runs launched it here."""
        if self.search is None or self.search.trial is None or self.search.judge != BY_LAUNCH:
            return None
        earlier = self.samples.report_earlier_runs(self.search.digests[self.search.trial])
        return None if earlier is None else part_of(earlier)

    def footprint(self, ran: str | None) -> tuple[int, int]:
        """Return share of the SMs and number of this run's launches; 0 and 1 where they are not judged."""
        judges = self.search is None or self.search.is_tuned_by_launches
        if ran is None or not judges or ran not in self.shares:
            return 0, 1
        return self.shares[ran], max(self.run.count, 1)

    def begin_run(self) -> None:
        """Forget the last run; the first launch chooses anew."""
        self.run = RunLaunches()
        self.samples.begin_run()

    def chosen(self, binding: Binding, failed: Mapping[str, str] = NONE_FAILED) -> str:
        """Return the candidate of this run; another one where it `failed`, or the Autotuner has pruned it."""
        if self.run.choice is None:
            planned = "" if self.search is None else self.search.digests[self.search.planned]
            is_usable = planned in self.texts and planned not in self.bans
            self.run.choice = planned if is_usable else self.stand_in()
        if self.run.choice in binding.configs and self.run.choice not in failed:
            return self.run.choice
        return self.stand_in(binding.configs, failed)

    def stand_in(self, among: Collection[str] | None = None, failed: Mapping[str, str] = NONE_FAILED) -> str:
        """Return the incumbent, or the first candidate that has not failed; raises NoValidConfig.

        among: the candidates that an Autotuner has left after pruning; None: all. failed: candidates that
        have failed in this launch, with reasons.
        """
        candidates = self.candidates
        known = candidates if among is None else among
        banned = set(self.bans)
        if self.search is not None:
            incumbent = self.search.digests[self.search.incumbent]
            banned |= {self.search.digests[index] for index in self.search.banned}
        elif self.claim is None or self.holds_claim_back:
            incumbent = next(iter(candidates))
        else:
            incumbent = self.claim[1]
        for candidate in (incumbent, *candidates, *known):
            if candidate not in banned and candidate not in failed and candidate in known:
                return candidate
        reasons = " ".join(self._reasons(failed))
        raise NoValidConfig(f"{self.title}: all {len(self.texts)} configs failed on some rank. {reasons}")

    def _reasons(self, failed: Mapping[str, str]) -> Iterator[str]:
        own = {**failed, **self.bans}
        for candidate, text in self.texts.items():
            if candidate in own:
                yield f"Rank {self.rank}, {config_label(text)}: {own[candidate].rstrip('.')}."
            elif self.search is not None and candidate in self.search.digests:
                index = self.search.digests.index(candidate)
                rank, reason = self.search.banned.get(index, (self.rank, "pruned away"))
                yield f"Rank {rank}, {config_label(text)}: {reason.rstrip('.')}."

    def config_of(self, candidate: str) -> Any:
        """Return the config of a candidate, or the option of a `tunable`; None where this rank has none."""
        holders = (binding.configs for binding in self.bindings if candidate in binding.configs)
        return next(holders, {}).get(candidate)


def part_of(reading: Reading) -> Part:
    """Return one rank's reading as its part of a run's report."""
    ms = reading.ms
    if ms is None:
        pending, unmeasured = int(reading.is_pending), int(reading.is_timed)
        return Part(reading.ran, pending=pending, unmeasured=unmeasured)
    return Part(reading.ran, ms, ms, femtoseconds(ms), gap_ms=reading.gap_ms, measured=1)
