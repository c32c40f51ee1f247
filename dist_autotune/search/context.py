"""The search of one context: drives its flow with what the ranks agreed."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from ..errors import NoValidConfig
from ..formatting import config_label, context_label, counted
from .agreed_times import AgreedTimes
from .expectation.fields import LaunchMs
from .expectation.flow import order_of
from .expectation.order import Meanwhile, TrialOrder
from .messages import Announcement, Ban, Claim
from .plans.search import MOST_PLANS
from .reports import AgreedPart
from .rules import BY_LAUNCH, BY_RUN, Rules
from .strategies import TIE, RunningFlow, Winner, least

NOT_SHARED = "not a candidate on every rank"  # why it is banned where ranks have others


class Status(enum.StrEnum):
    """How far the search of a context is.

    A search under way is ended by `Context.settle`: by its own flow or the phase that runs, at the end of a
    run; by `SearchState` where no rank launches the context, or the session must end. Nobody else writes it.
    """

    UNDER_WAY = ""  # since `Context.start`, or `SearchState` let it wait for its phase
    TUNED = "tuned"  # the search is over, or one candidate was left
    CACHED = "cached"  # at its admission: it has the result of some rank's claim
    STARVED = "starved"  # no rank launches it; online a launch begins the search again
    PARTIAL = "partial"  # the session ended first; the next one goes on

    @property
    def is_provisional(self) -> bool:
        """Return whether a later session takes up the search."""
        return self in (Status.PARTIAL, Status.STARVED)


class RunVerdict(enum.Enum):
    """What whole runs have said of a context in this search, beside its winner.

    The phase that judges it writes it, at its end or at that of a turn; `SearchState` sets it back where a
    search begins.
    """

    NOTHING = enum.auto()
    DECIDED = enum.auto()  # `RaceRuns`: its candidate is that of the best plan
    LEFT_OUT = enum.auto()  # `TakeTurns`: the best plan does not launch it, and so it may starve


@dataclass(frozen=True)
class LaunchResult:
    """What a search by launches has found; `Context` replaces it at the end of one."""

    ms: Mapping[int, float] = field(default_factory=dict)  # by candidate
    winner: int | None = None  # where the whole run is still to judge


@dataclass(frozen=True)
class NextRun:
    """What the phase under way plans for the next run; `SearchState` replaces it before each."""

    candidate: int | None = None  # None: the context's own trial, or its incumbent
    is_compared: bool = False  # the run compares its bits


class Outcome(Struct, frozen=True, array_like=True):
    """What a run was for a context: the k-th of n warm-ups or samples of candidate `index`."""

    kind: str = "incumbent"  # "warm-up" | "sample" | "incumbent": no trial, or one that did not count
    index: int | None = None
    k: int = 0
    n: int = 0
    judge: str = BY_LAUNCH


class Context:
    """The state of one context. Candidates are indices of `digests` and `texts`.

    It writes its fields as it records runs and is settled. `SearchState` alone writes `last_run` and
    `compiling`, and `began`, which `FinalComparison` sets back; `VerifyBits` alone `same_bits`.
    `RaceRuns` and `FinalComparison` add to `times.ms` what whole runs took.
    meanwhile: returns what the session knows by now.
    """

    def __init__(
        self,
        name: str,
        announcement: Announcement,
        rules: Rules,
        run: int,
        meanwhile: Callable[[], Meanwhile] = Meanwhile,
    ) -> None:
        self.name: Final = name
        self.kernel: Final = announcement.kernel
        self.key: Final = announcement.key
        self.kernel_id: Final = announcement.kernel_id
        self.nearest_key: Final = announcement.nearest_key
        self.is_choice: Final = announcement.is_choice
        self.upgrade, order = announcement.raced_first()
        self.digests: Final = tuple(digest for digest, _ in order)
        self.texts: Final = tuple(text for _, text in order)
        # The first so many candidates are raced: after an upgrade the best of an old result.
        self.raced = len(announcement.upgrade[2]) if self.upgrade and announcement.upgrade else len(order)
        self.banned: dict[int, Ban] = {}
        self.times = AgreedTimes()
        self.status = Status.UNDER_WAY
        self.winner: int | None = None
        self.began: int | None = None  # the run of this session in which its search began
        self.last_run = run  # the last in which some rank launched it
        self.ranks = 0  # that have launched it in one run, at least
        self.trial: int | None = None
        self.waiting = False  # online: the trial has run, some rank's sample is not read yet
        self.compiling = 0  # online: candidates that some rank has still to compile; then none is tried
        self.next_run = NextRun()
        self.same_bits: bool | None = None  # the winner leaves the first config's outputs; None: not verified
        self.by_launches = LaunchResult()
        self.by_run = RunVerdict.NOTHING
        self.shares: dict[int, float] = {}  # of the device, by candidate that was launched; see `Part.share`
        self.launches = 1  # in a run
        self._told = announcement.times_by_key()
        self.fills = dict(zip((text for _, text in announcement.order), announcement.fills, strict=False))
        self._rules, self._meanwhile = rules, meanwhile
        judges = rules.judges(is_choice=announcement.is_choice)
        self.judge, self.final_judge = judges[0], judges[-1]  # of its candidates now, and of its result
        self.flow: RunningFlow | None = None  # its own search; None: it has not begun, or is over
        self._order: TrialOrder | None = None  # in which candidates are tried; None: all are
        self._chosen: tuple[int | None, str] = None, ""  # by its search; why it is not the fastest
        self._ran: set[int] = set()  # candidates that ran because the flow had asked for them
        self.first_default: Final = self.index_of(announcement.default) or 0
        self.ban_missing(announcement)

    @property
    def settled(self) -> bool:
        return self.status is not Status.UNDER_WAY

    @property
    def provisional(self) -> bool:
        return self.status.is_provisional

    @property
    def is_lasting(self) -> bool:
        """Return whether the next call takes the result as it is."""
        if self._rules.mode == "online" and self.status is Status.PARTIAL:
            return True  # left to another process, or `retune()`: its runs or time would be spent again
        return self.settled and not self.provisional

    @property
    def is_tuned_by_launches(self) -> bool:
        """Return whether its search by launches is under way."""
        return self.judge == BY_LAUNCH and not self.settled

    @property
    def is_tuned_separately(self) -> bool:
        """Return whether it is a choice of too many options for a race of plans."""
        return self.is_choice and self._rules.races and len(self.digests) > MOST_PLANS

    @property
    def title(self) -> str:
        return context_label(self.kernel, self.key)

    @property
    def is_spent(self) -> bool:
        """Return whether every candidate is banned."""
        return len(self.banned) == len(self.digests)

    @property
    def incumbent(self) -> int:
        """Return the winner so far, else the first viable candidate. Raises NoValidConfig if none is left."""
        if self.winner is not None and self.winner not in self.banned:
            return self.winner
        if not self.is_spent:
            return next(index for index in range(len(self.digests)) if index not in self.banned)
        bans = sorted(self.banned.items())
        failed = ((rank, config_label(self.texts[index]), reason) for index, (rank, reason) in bans)
        reasons = " ".join(f"Rank {rank}, {config}: {reason}." for rank, config, reason in failed)
        raise NoValidConfig(f"{self.title}: all {len(self.digests)} configs failed on some rank. {reasons}")

    @property
    def planned(self) -> int:
        """Return the candidate that every rank launches in the next run."""
        planned = self.next_run.candidate
        if planned is not None and planned not in self.banned:
            return planned
        return self.trial if self.trial is not None and self.is_racing else self.incumbent

    @property
    def is_racing(self) -> bool:
        """Return whether the next run is a trial of its own race."""
        return self.trial is not None and not (self.waiting or self.compiling)

    @property
    def is_on_trial(self) -> bool:
        """Return whether the next run is a trial."""
        return self.next_run.is_compared or self.is_racing

    @property
    def is_warmup(self) -> bool:
        return self.flow is not None and self.flow.is_warmup

    @property
    def most_tried(self) -> int:
        """Return how many candidates its search tries at most."""
        return self.raced if self._order is None else self._order.most

    @property
    def outside_indices(self) -> tuple[int, ...]:
        """Return the candidates that are not to be compiled now: not tried, or before."""
        if self._order is None:
            return tuple(range(self.raced, len(self.digests)))
        wanted = self._order.likely - self._ran
        return tuple(index for index in range(len(self.digests)) if index not in wanted)

    @property
    def is_left_out(self) -> bool:
        """Return whether the best plan does not launch it, and so it may starve."""
        return self.by_run is RunVerdict.LEFT_OUT

    @property
    def again(self) -> str:
        """Return which candidates are raced after an upgrade; empty: there was none."""
        if not self.upgrade or self.status is Status.CACHED:
            return ""
        raced = f"{self.raced} of {len(self.digests)} candidates, the best with {self.upgrade}"
        return f"{raced}; raced again after an upgrade"

    @property
    def not_fastest(self) -> str:
        """Return why the winner is not the fastest of those that were timed; empty: it is."""
        known = dict(self.times.known(self.banned))
        winner = self.winner if self.settled and self.winner in known else None
        if winner is None or known[winner] <= (fastest_ms := min(known.values())):
            return ""
        chosen, why = self._chosen
        if fastest_ms not in self.times.ms.values():
            return "only warm-up runs were faster"
        if winner == chosen and why:
            return why
        if self.final_judge == BY_RUN:
            return "the whole run decides"
        return "faster ones change bits of the outputs" if self._rules.bits == "same" else ""

    def ms_by_text(self) -> dict[str, LaunchMs]:
        """Return the times by its launches, by the config's text: of its search, or so far."""
        so_far = {index: least(self.times.agreed_ms(index)) for index in self.times.ms}
        known = {self.texts[index]: ms for index, ms in (self.by_launches.ms or so_far).items() if ms > 0}
        return {text: LaunchMs(ms, self.fills.get(text, 1.0)) for text, ms in known.items()}

    @property
    def device_ms(self) -> tuple[float, float]:
        """Return what the incumbent takes on the device, at least and at most; zeros: not known."""
        ms = self.times.agreed_ms(self.incumbent)
        return least(ms), float(ms)

    @property
    def untried(self) -> str:
        """Return why candidates were not tried, once the search is over; empty: all were."""
        return self._order.untried_text() if self._order is not None and self.settled else ""

    @property
    def default(self) -> int:
        """Return the candidate that is launched untuned; the first that works if that one is banned."""
        order = (self.first_default, *range(len(self.digests)))
        return next((index for index in order if index not in self.banned), self.first_default)

    @property
    def default_ms(self) -> float | None:  # of samples: its warm-up may hold first-launch costs
        return self.times.ms.get(self.default)

    def index_of(self, digest: str | None) -> int | None:
        """Return the index of a candidate's digest; None: not a candidate of this context."""
        return self.digests.index(digest) if digest in self.digests else None

    def apply(self, part: AgreedPart) -> None:
        """Apply what ranks say of a run, whatever it was for: failures, launches, share of the device."""
        self.apply_bans(part.bans)
        self.ranks = max(self.ranks, part.ranks)
        index = self.index_of(part.ran)
        self.launches = max(self.launches, part.launches)
        if index is not None and part.share:
            self.shares[index] = max(self.shares.get(index, 0.0), part.share / 1000)

    def ban_missing(self, announcement: Announcement) -> None:
        """Ban what some rank does not have among its candidates."""
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
            self.drop_trial()

    def start(self) -> None:
        """Begin the search, or go on where an earlier session left it."""
        self.status, self.waiting = Status.UNDER_WAY, False
        if self.flow is None:
            if sum(index not in self.banned for index in range(self.raced)) < 2:
                self.raced, self.upgrade = len(self.digests), ""
            self._order = None
            races_all = self.raced == len(self.digests)  # else some, after an upgrade
            if races_all and self._rules.tries_few(len(self.texts), is_choice=self.is_choice):
                self._order = order_of(self.key, self.texts, self._told, self._meanwhile, self.fills)
            self.flow = self._rules.flow_of(self.raced, self._order, self.default)
            self._resume(None)
            return
        self.trial = self.flow.index
        if self.trial in self.banned:  # since then
            self._resume(math.inf)

    def advance(self, part: AgreedPart) -> Outcome:
        """Record one run of all ranks, in which its launches are judged if it is on trial."""
        was_held = self.compiling and not self.waiting  # else the report is of a trial before
        self.waiting = part.is_pending and self.trial is not None
        index = self.trial
        if index is None and self.flow is not None and self.flow.is_paused:
            if part.ran is not None and not (part.compiling or self.settled):  # in its last run, as partial
                self._resume(math.nan)
            return Outcome()
        if index is None or self.waiting:
            return Outcome()
        if index in self.banned:
            self.drop_trial()
            return Outcome(index=index)
        if part.ran is None or was_held:
            return Outcome()
        if part.ran != self.digests[index]:
            return Outcome(index=index)
        return self.record(part)

    def next_trial(self) -> int | None:
        """Return the candidate to try, without a pause for compilers: options are not compiled."""
        while self.flow is not None and self.flow.is_paused:
            self._resume(math.nan)
        return self.trial

    def drop_trial(self) -> None:
        """Go on without the candidate on trial, which is banned."""
        self._resume(math.inf)

    def record(self, judged: AgreedPart) -> Outcome:
        """Record a run of the trial, in which `judged` tells its time; the flow asks for the next."""
        index = self.trial
        assert index is not None
        assert self.flow is not None
        self._ran.add(index)
        kind, planned = "sample", self._rules.planned_asks(is_warmup=self.is_warmup)
        if self.is_warmup:
            kind, ms = "warm-up", self.times.record_warmup(index, judged)
            if self.is_choice and index not in self.times.ms:
                ms = math.nan  # its first run may compile and load whatever the option launches
        else:
            ms = self.times.record_sample(index, judged)
        outcome = Outcome(kind, index, self.flow.count, planned, self.judge)
        self._resume(ms)
        return outcome

    def settle(self, status: Status, winner: int | None = None) -> None:
        """End the search: `winner`, else the best known so far, else the incumbent."""
        if winner is None:
            best = self.times.fastest(self.banned)
            winner = self.incumbent if best is None else best
        self.winner, self.status, self.trial, self.waiting = winner, status, None, False

    def _resume(self, ms: float | None) -> None:
        assert self.flow is not None
        self.incumbent  # noqa: B018  raises NoValidConfig when no candidate is left to ask for
        winner = self.flow.resume(ms, self.banned)
        if winner is None:
            self.trial = self.flow.index
        else:
            self._finish(winner)

    def _finish(self, chosen: int) -> None:
        """Take the flow's winner; go on to the next judge, if there is one."""
        if self.raced < len(self.digests) and all(index in self.banned for index in range(self.raced)):
            self.flow = None
            self.start()  # what was best before an upgrade works no more
            return
        winner, incumbent = int(chosen), self.incumbent
        tied = chosen.tied if isinstance(chosen, Winner) else None  # None: the flow has decided
        if winner in self.banned or (winner in self._ran and winner not in self.times.ms):
            self.settle(Status.TUNED)  # the flow's has no time on some rank that launched it
        elif tied is not None and (incumbent in tied or self.times.are_equal(winner, incumbent)):
            self.settle(Status.TUNED, incumbent)
        else:
            self.settle(Status.TUNED, winner)
        self._chosen = self.winner, self._why_slower(tied)
        self.flow = None
        if self.judge == BY_LAUNCH:
            known = chosen.ms if isinstance(chosen, Winner) else {}
            found = {index: float(known.get(index, ms)) for index, ms in self.times.ms.items()}
            self.by_launches = LaunchResult(found, None if self.judge == self.final_judge else self.winner)
        if self.judge != self.final_judge:
            self.judge, self.status = self.final_judge, Status.UNDER_WAY
            self.times.drop_samples()  # candidates are judged by something else now
            self._ran.clear()

    def _why_slower(self, tied: Container[int] | None) -> str:
        """Return why its search chose not the fastest; empty: it has. tied: None, where it tells none."""
        winner, fastest = self.winner, self.times.fastest(self.banned)
        if winner is None or fastest in (winner, None) or winner not in self.times.ms:
            return ""
        assert fastest is not None
        assert self.flow is not None
        if tied is None:
            return "its search returned it"
        if fastest in tied and self.times.ratio(winner, fastest) <= 1 + TIE:
            return "a tie within 1 %, to the first"
        if self.times.are_equal(winner, fastest):
            return "the host's part of the times may be all that they differ by"
        few = min(self.flow.samples(each) for each in (winner, fastest))
        return f"within the noise of {counted(few, 'sample')}"
