"""The search of one context: sends agreed times to its flow, and settles the context."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from msgspec import Struct

from ..formatting import counted
from .expectation.order import Meanwhile, TrialOrder
from .messages import Announcement
from .reports import AgreedPart
from .rules import BY_LAUNCH, BY_RUN, Rules
from .shared_context import Outcome, Status
from .strategies import TIE, RunningFlow, Winner

if TYPE_CHECKING:
    from .context import Context


_NONE = frozenset[int]()


class _FinalOrder(Struct, frozen=True, gc=False):
    """The result of a `TrialOrder`, in its place once the search is over."""

    most: int
    likely: frozenset[int]  # those that did not run
    untried: str


class ContextSearch:
    """Tries the candidates of one context, each judged by its launches, then, if asked for, by whole runs.

    raced_again: the versions of an old result; empty: all candidates are raced. meanwhile: returns the state
    of the session.
    """

    def __init__(
        self,
        context: Context,
        announcement: Announcement,
        raced_again: str,
        rules: Rules,
        meanwhile: Callable[[], Meanwhile],
    ) -> None:
        self.rules = rules
        self.judge = rules.judges(is_choice=context.is_choice)[0]  # of the candidates now
        self.flow: RunningFlow | None = None  # None: it has not begun, or is over
        self.upgrade = raced_again
        # The first so many candidates are raced: after an upgrade the best of an old result.
        raced = announcement.upgrade[2] if raced_again and announcement.upgrade else context.digests
        self.raced = len(raced)
        self._context, self._meanwhile = context, meanwhile
        self._told = announcement.times_by_key()
        self._order: TrialOrder | _FinalOrder | None = None  # in which candidates are tried; None: all are
        self._chosen: tuple[int | None, str] = None, ""  # the winner; why it is not the fastest
        self._ran = _NONE  # candidates that ran because the flow had asked for them

    def start(self) -> None:
        """Begin the search, or go on where an earlier session left it."""
        context = self._context
        context.status, context.waiting = Status.UNDER_WAY, False
        if self.flow is None:
            if sum(index not in context.banned for index in range(self.raced)) < 2:
                self.raced, self.upgrade = len(context.digests), ""
            order = self._order = None
            races_all = self.raced == len(context.digests)  # else some, after an upgrade
            if races_all and self.rules.tries_few(len(context.texts), is_choice=context.is_choice):
                told = self._told, self._meanwhile, context.definition.fills
                order = self._order = TrialOrder(context.key, context.texts, *told)
            self.flow = self.rules.flow_of(self.raced, order, context.default)
            self._resume(None)
            return
        context.trial = self.flow.index
        if context.trial in context.banned:  # since then
            self._resume(math.inf)

    def advance(self, part: AgreedPart) -> Outcome:
        """Record one run of all ranks, in which its launches are judged if it is on trial."""
        context = self._context
        is_held = context.compiling or context.next_run.is_held
        was_held = is_held and not context.waiting  # else the report is of a trial before
        context.waiting = part.is_pending and context.trial is not None
        index = context.trial
        if index is None and self.flow is not None and self.flow.is_paused:
            is_partial = context.settled  # in its last run
            if part.ran is not None and not (part.compiling or is_partial):
                self._resume(math.nan)
            return Outcome()
        if index is None or context.waiting:
            return Outcome()
        if index in context.banned:
            self.drop_trial()
            return Outcome(index=index)
        if part.ran is None or was_held:
            return Outcome()
        if part.ran != context.digests[index]:
            return Outcome(index=index)
        return self.record(part)

    def next_trial(self) -> int | None:
        """Return the candidate to try, without a pause for compilers: options are not compiled."""
        context = self._context
        while self.flow is not None and self.flow.is_paused:
            self._resume(math.nan)
        return context.trial

    def drop_trial(self) -> None:
        """Go on without the candidate on trial, which is banned."""
        self._resume(math.inf)

    def record(self, judged: AgreedPart) -> Outcome:
        """Record a run of the trial, in which `judged` tells its time; the flow asks for the next."""
        context = self._context
        index = context.trial
        assert index is not None
        assert self.flow is not None
        self._ran |= {index}
        kind, planned = "sample", self.rules.planned_asks(is_warmup=self.is_warmup)
        if self.is_warmup:
            kind, ms = "warm-up", context.times.record_warmup(index, judged)
            if context.is_choice and index not in context.times.ms:
                ms = math.nan  # its first run may compile and load whatever the option launches
        else:
            ms = context.times.record_sample(index, judged)
        outcome = Outcome(kind, index, self.flow.count, planned, self.judge)
        self._resume(ms)
        return outcome

    def _resume(self, ms: float | None) -> None:
        context = self._context
        assert self.flow is not None
        context.incumbent  # noqa: B018  raises NoValidConfig when no candidate is left to ask for
        winner = self.flow.resume(ms, context.banned)
        if winner is None:
            context.trial = self.flow.index
        else:
            self._finish(winner)

    def _finish(self, chosen: int) -> None:
        """Take the flow's winner; go on to the next judge, if there is one."""
        context, final_judge = self._context, self._context.definition.final_judge
        if self.raced < len(context.digests) and all(index in context.banned for index in range(self.raced)):
            self.flow = None
            self.start()  # what was best before an upgrade works no more
            return
        winner, incumbent = int(chosen), context.incumbent
        tied = chosen.tied if isinstance(chosen, Winner) else None  # None: the flow has decided
        if winner in context.banned or (winner in self._ran and winner not in context.times.ms):
            context.settle(Status.TUNED)  # the flow's has no time on some rank that launched it
        elif tied is not None and (incumbent in tied or context.times.are_equal(winner, incumbent)):
            context.settle(Status.TUNED, incumbent)
        else:
            context.settle(Status.TUNED, winner)
        self._chosen = context.winner, self._why_slower(tied)
        self.flow = None
        if self.judge == BY_LAUNCH:
            known = chosen.ms if isinstance(chosen, Winner) else {}
            found = {index: float(known.get(index, ms)) for index, ms in context.times.ms.items()}
            context.launch_ms = found
            context.launch_winner = None if self.judge == final_judge else context.winner
        if self.judge != final_judge:
            self.judge, context.status = final_judge, Status.UNDER_WAY
            context.times.drop_samples()  # candidates are judged by something else now
            self._ran = _NONE
        else:
            self._let_go()

    def _let_go(self) -> None:
        """Drop the inputs of a search that is over, such as times of other keys: its context is kept."""
        if (order := self._order) is not None:
            self._order = _FinalOrder(order.most, order.likely - self._ran or _NONE, order.untried)
        self._ran, self._told, self._meanwhile = _NONE, {}, Meanwhile

    def _why_slower(self, tied: Container[int] | None) -> str:
        """Return why its search chose not the fastest; empty: it has. tied: None, where it tells none."""
        context = self._context
        winner, fastest = context.winner, context.times.fastest(context.banned)
        if winner is None or fastest in (winner, None) or winner not in context.times.ms:
            return ""
        assert fastest is not None
        assert self.flow is not None
        if tied is None:
            return "its search returned it"
        if fastest in tied and context.times.ratio(winner, fastest) <= 1 + TIE:
            return "a tie within 1 %, to the first"
        if context.times.are_equal(winner, fastest):
            return "the host's part of the times may be all that they differ by"
        few = min(self.flow.samples(each) for each in (winner, fastest))
        return f"within the noise of {counted(few, 'sample')}"

    @property
    def most_tried(self) -> int:
        """Return how many candidates its search tries at most."""
        return self.raced if self._order is None else self._order.most

    @property
    def outside_indices(self) -> tuple[int, ...]:
        """Return the candidates that are not to be compiled now: not tried, or before."""
        context = self._context
        if self._order is None:
            return tuple(range(self.raced, len(context.digests)))
        wanted = self._order.likely - self._ran
        return tuple(index for index in range(len(context.digests)) if index not in wanted)

    @property
    def again(self) -> str:
        """Return which candidates are raced after an upgrade; empty: there was none."""
        context = self._context
        if not self.upgrade or context.status is Status.CACHED:
            return ""
        raced = f"{self.raced} of {len(context.digests)} candidates, the best with {self.upgrade}"
        return f"{raced}; raced again after an upgrade"

    @property
    def not_fastest(self) -> str:
        """Return why the winner is not the fastest of the timed candidates; empty: it is."""
        context = self._context
        known = dict(context.times.known(context.banned)) if context.settled else {}
        winner = context.winner
        if winner not in known or known[winner] <= (fastest_ms := min(known.values())):
            return ""
        chosen, why = self._chosen
        if fastest_ms not in context.times.ms.values():
            return "only warm-up runs were faster"
        if winner == chosen and why:
            return why
        if context.definition.final_judge == BY_RUN:
            return "the whole run decides"
        return "faster ones change bits of the outputs" if self.rules.bits == "same" else ""

    @property
    def untried(self) -> str:
        """Return why candidates were not tried, once the search is over; empty: all were."""
        context = self._context
        return self._order.untried if self._order is not None and context.settled else ""

    @property
    def is_warmup(self) -> bool:
        return self.flow is not None and self.flow.is_warmup
