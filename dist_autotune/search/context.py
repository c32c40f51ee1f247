"""A context on the deciding rank."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

from msgspec import Struct

from .context_search import ContextSearch
from .expectation.fields import LaunchMs
from .expectation.order import Meanwhile
from .messages import Announcement, Ban, Claim
from .plans.search import MOST_PLANS
from .reports import AgreedPart
from .rules import Rules
from .shared_context import ContextDefinition, SharedContext, Status
from .strategies import TIE, least

NOT_SHARED = "not a candidate on every rank"  # why it is banned where ranks have others
SLOW = 2.0  # times the fastest: such a candidate is tried in one launch of a run


class RunVerdict(enum.Enum):
    """The verdict of whole runs on a context in this search, beside its winner.

    The phase that judges the context writes it, at the end of the phase or of a turn; `SearchState` sets it
    back where a search begins.
    """

    NOTHING = enum.auto()
    DECIDED = enum.auto()  # `RaceRuns`: its candidate is that of the best plan
    LEFT_OUT = enum.auto()  # `TakeTurns`: the best plan does not launch it, and so it may starve


class NextRun(Struct, frozen=True, gc=False):
    """The phase's plan for a context in the next run; `SearchState` replaces it before each run."""

    candidate: int | None = None  # None: the context's own trial, or its incumbent
    is_compared: bool = False  # the run compares its bits
    is_held: bool = False  # it tries nothing: see `Pace`
    is_spared: bool = False  # slow candidates are tried in one launch of it


class Context(SharedContext):
    """The state of one context. `search` is its own; phases that judge by whole runs settle it, too.

    `SearchState` alone writes `last_run`, `compiling` and `next_run`, and `began`, which `FinalComparison`
    sets back; `VerifyBits` alone `same_bits`. `RaceRuns` and `FinalComparison` add the times of whole runs to
    `times.ms`.
    """

    def __init__(
        self,
        name: str,
        announcement: Announcement,
        rules: Rules,
        run: int,
        meanwhile: Callable[[], Meanwhile] = Meanwhile,
    ) -> None:
        raced_again, order = announcement.raced_first()
        digests = tuple(digest for digest, _ in order)
        definition = ContextDefinition(
            kernel=announcement.kernel,
            key=announcement.key,
            kernel_id=announcement.kernel_id,
            digests=digests,
            texts=tuple(text for _, text in order),
            is_choice=announcement.is_choice,
            nearest_key=announcement.nearest_key,
            default=digests.index(announcement.default) if announcement.default in digests else 0,
            final_judge=rules.judges(is_choice=announcement.is_choice)[-1],
            fills=dict(zip((text for _, text in announcement.order), announcement.fills, strict=False)),
        )
        super().__init__(name, definition)
        self.status = Status.UNDER_WAY
        self.winner: int | None = None
        self.began: int | None = None  # the run of this session in which its search began
        self.last_run = run  # the last in which some rank launched it
        self.ranks = 0  # that have launched it in one run, at least
        self.launches = 1  # in a run
        self.shares: dict[int, float] = {}  # of the device, by candidate that was launched; see `Part.share`
        self.compiling = 0  # online: candidates that some rank has still to compile; then none is tried
        self.waiting = False  # online: the trial has run, some rank's sample is not read yet
        self.trial: int | None = None  # the candidate that its search waits for
        self.next_run = NextRun()
        self.launch_winner: int | None = None  # of its launches, where whole runs are still to judge
        self.by_run = RunVerdict.NOTHING
        self.same_bits: bool | None = None  # the winner leaves the first config's outputs; None: not verified
        self.search = ContextSearch(self, announcement, raced_again, rules, meanwhile)
        self.ban_missing(announcement)

    @property
    def judge(self) -> str:  # type: ignore[override]
        return self.search.judge

    @property
    def is_lasting(self) -> bool:
        """Return whether the next call takes the result as it is."""
        if self.search.rules.mode == "online" and self.status is Status.PARTIAL:
            return True  # left to another process, or `retune()`: its runs or time would be spent again
        return self.settled and not self.provisional

    @property
    def is_tuned_separately(self) -> bool:
        """Return whether it is a choice of too many options for a race of plans."""
        return self.is_choice and self.search.rules.races and len(self.digests) > MOST_PLANS

    @property
    def incumbent(self) -> int:
        """Return the winner so far, else the first viable candidate. Raises NoValidConfig if none is left."""
        if self.winner is not None and self.winner not in self.banned:
            return self.winner
        for index in range(len(self.digests)):
            if index not in self.banned:
                return index
        raise self.nothing_works()

    @property
    def best_so_far(self) -> int:
        """Return the candidate of runs without a trial: online the fastest so far, else the incumbent."""
        incumbent = self.incumbent
        if self.settled or self.search.rules.mode != "online" or not self.is_tuned_by_launches:
            return incumbent
        known = {**self.times.warmup_ms, **self.times.ms}
        for index in self.banned:
            known.pop(index, None)
        fastest_ms, fastest = min(zip(known.values(), known, strict=True), default=(math.inf, incumbent))
        is_faster = fastest_ms * (1 + TIE) < least(self.times.agreed_ms(incumbent))
        return fastest if is_faster else incumbent

    def later_candidate(self, best: int) -> int:
        """Return the candidate of later launches in a run whose first one tries a slow one; -1: the same.

        best: so far.
        """
        if not (self.next_run.is_spared and self.is_racing and self.is_tuned_by_launches):
            return -1
        assert self.trial is not None
        if not (trial_ms := least(self.times.agreed_ms(self.trial))):
            return -1
        return best if 0 < SLOW * self.times.agreed_ms(best) <= trial_ms else -1

    @property
    def planned(self) -> int:
        """Return the candidate that every rank launches in the next run."""
        return self.best_so_far if self.tried is None else self.tried

    @property
    def tried(self) -> int | None:
        """Return what the next run launches for the phase or as a trial; None: the best so far."""
        planned = self.next_run.candidate
        if planned is not None and planned not in self.banned:
            return planned
        return self.trial if self.is_racing else None

    @property
    def is_racing(self) -> bool:
        """Return whether the next run is a trial of its own search."""
        return self.trial is not None and not (self.waiting or self.compiling or self.next_run.is_held)

    @property
    def is_on_trial(self) -> bool:
        """Return whether the next run is a trial."""
        return self.next_run.is_compared or self.is_racing

    @property
    def is_left_out(self) -> bool:
        """Return whether the best plan does not launch it, and so it may starve."""
        return self.by_run is RunVerdict.LEFT_OUT

    @property
    def device_ms(self) -> tuple[float, float]:
        """Return the incumbent's ms on the device, at least and at most; zeros: not known."""
        ms = self.times.agreed_ms(self.incumbent)
        return least(ms), float(ms)

    @property
    def saved_ms(self) -> float:
        """Return the device's ms that the fastest config so far saves in a run; 0.0: none known."""
        if (best := self.best_so_far) == self.default:
            return 0.0
        first_ms, ms = (float(self.times.agreed_ms(index)) for index in (self.default, best))
        return self.launches * (first_ms - ms) if ms else 0.0

    def ms_by_text(self) -> dict[str, LaunchMs]:
        """Return the times by its launches, by the config's text: of its search, or so far."""
        if self.launch_ms:
            return super().ms_by_text()
        so_far = {self.texts[index]: least(self.times.agreed_ms(index)) for index in self.times.ms}
        fills = self.definition.fills
        return {text: LaunchMs(ms, fills.get(text, 1.0)) for text, ms in so_far.items() if ms > 0}

    def apply(self, part: AgreedPart) -> None:
        """Apply the reports on any run: failures, launches, share of the device."""
        self.apply_bans(part.bans)
        self.ranks = max(self.ranks, part.ranks)
        index = self.index_of(part.ran)
        self.launches = max(self.launches, part.launches)
        if index is not None and part.share:
            self.shares[index] = max(self.shares.get(index, 0.0), part.share / 1000)

    def ban_missing(self, announcement: Announcement) -> None:
        """Ban candidates that some rank does not have."""
        missing = [digest for digest in self.digests if digest not in announcement.shared]
        self.apply_bans(dict.fromkeys(missing, (announcement.rank, NOT_SHARED)))

    def adopt(self, claim: Claim) -> bool:
        """Take the result that some rank already has; return whether every rank can use it."""
        index, ms = self.index_of(claim[1]), claim[2]
        if index is None or index in self.banned:
            return False
        if ms is not None:
            self.times.ms[index] = ms
        self.winner = index
        return True

    def apply_bans(self, bans: dict[str, Ban]) -> None:
        for digest, ban in bans.items():
            if (index := self.index_of(digest)) is not None:
                self.ban(index, *ban)

    def ban(self, index: int, rank: int, reason: str) -> None:
        self.banned.setdefault(index, (rank, reason))
        self.times.ms.pop(index, None)
        if self.winner == index:
            self.winner = self.times.fastest(self.banned)

    def ban_after_run(self, index: int, rank: int, reason: str) -> None:
        """Ban a candidate between two runs: its search goes on with another."""
        self.ban(index, rank, reason)
        if self.trial == index:
            self.search.drop_trial()

    def settle(self, status: Status, winner: int | None = None) -> None:
        """End the search: `winner`, else the best known so far, else the incumbent."""
        if winner is None:
            best = self.times.fastest(self.banned)
            winner = self.incumbent if best is None else best
        self.winner, self.status, self.trial, self.waiting = winner, status, None, False
