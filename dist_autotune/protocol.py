"""How what all ranks said of a run becomes the next plan. No torch, no I/O, no clock.

`Tuning` is the state that every rank holds alike: fed the same merged payloads, it yields the same
plans, so every rank makes the same number of runs.

First all kernels advance together, each judged by its own launches. Then the contexts that are judged
by the whole run's time take their turns, one after another, from the winners so far. With
`objective="thunk"` the plan that results must beat the default plan in a final alternating comparison.
"""

from __future__ import annotations

from . import limits
from .contexts import Contexts
from .duel import Duel
from .kernel_families import KernelFamilies
from .outlook import Outlook, RunsSpent
from .pace import Pace
from .payload import Payload
from .purpose import Purpose
from .rules import BY_LAUNCH, Rules
from .search import Context, Outcome

ADMISSION_RUNS = 16  # contexts first seen later are partial, so that new keys at every run end
STARVED_RUNS = {"replay": 3, "online": 64}
IDLE_RUNS = 3  # runs without a trial after which a session ends even if ranks still differ in what they ran


class Tuning:
    """The state of one tuned function. `step(merged)` after each run; `done` ends the session."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.contexts = Contexts(rules)
        self.kernels = KernelFamilies()
        self.runs = 0
        self.done = False
        self.closing = not rules.tunes
        self.on_hold = False  # online: the next run is no trial, to keep to `Rules.online_share`
        self.remark = ""
        self.session = ""  # the last one that used this state
        self.crash_bans: dict[str, dict[str, tuple[int, str]]] = {}  # context -> candidate -> (rank, reason)
        self.elapsed_before_s = 0.0  # of the session, in processes before this one
        self._admitting: set[int] = set()  # the runs of the session in which searches have begun
        self._resumed_at = 0  # the run with which this process took the session up
        self._unconfirmed: set[str] = set()  # contexts taken up that may not be launched any more
        self._idle_runs = 0
        self._pace = Pace(rules.online_share)
        self._spent = RunsSpent()

    # -- the state -----------------------------------------------------------------------------------------

    @property
    def duel(self) -> Duel | None:
        """Return the comparison with the default plan that is under way."""
        return self.contexts.comparison.duel

    @property
    def has_trial(self) -> bool:
        """Return whether the next run tries something."""
        return self.duel is not None or any(c.trial is not None for c in self.contexts.values())

    @property
    def judged_run(self) -> tuple[str, str] | None:
        """Return (context, candidate) that the whole next run is timed for; None: it is not timed."""
        if self.duel is not None:
            return None if self.on_hold else ("", self.duel.side)
        context = self.contexts.on_turn
        if context is None or context.trial is None or not context.is_on_trial:
            return None
        return context.name, context.digests[context.trial]

    @property
    def planned_runs(self) -> int:
        """Return how many runs the search plans, the final one included."""
        return limits.planned_runs(self.rules, self.contexts.searches)

    @property
    def outlook(self) -> Outlook:
        """Return how far the session has come."""
        return limits.outlook(self.rules, self.contexts.searches, self._spent)

    # -- what happens to it --------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a session: take up what earlier ones left unfinished."""
        self.runs, self.done, self.closing, self._idle_runs = 0, False, not self.rules.tunes, 0
        self.remark, self._spent = "", RunsSpent()
        self.elapsed_before_s, self._resumed_at, self._admitting = 0.0, 0, set()
        self._pace = Pace(self.rules.online_share if self.rules.mode == "online" else 1.0)
        self._hold(False)
        self.contexts.open(begins=not self.closing)
        if not any(self.contexts.unsettled):
            self.contexts.take_turns(closing=self.closing)
        self._close_if_spent(0.0)

    def step(self, merged: Payload) -> dict[str, Outcome]:
        """Take in one run of all ranks; return what it was for each context."""
        self._drop_unconfirmed(merged)
        had_trial, was_closing = self.has_trial, self.closing
        purpose = Purpose.of(self.contexts.unsettled, self.duel, on_hold=self.on_hold)
        self.contexts.ran(merged)
        self.runs += 1
        is_new = any(part.announcement for part in merged.parts.values())
        self._spent = self._spent.after(trial=purpose.tries or is_new, wait=purpose.waits, hold=purpose.holds)
        outcomes = {name: self._take(name, merged) for name in merged.in_order(self.contexts)}
        had_trial = had_trial or self.has_trial  # a search that begins with this run, and may end with it
        patience = STARVED_RUNS[self.rules.mode]
        remark = self.contexts.comparison.take(merged, on_hold=self.on_hold, patience=patience)
        self.remark = remark or self.remark
        self.contexts.starve(self.runs, patience)
        self._close_if_spent(merged.elapsed_s)
        self.contexts.take_turns(closing=self.closing)
        self._hold(
            self._pace.take(
                merged.elapsed_s,
                was_trial=purpose.tries_rival,
                waited=purpose.awaits_rival,
                compiling_s=merged.compiling_s,
            )
        )
        if had_trial or self.has_trial or any(self.contexts.unsettled):
            self._idle_runs = 0
            return outcomes
        self._idle_runs += 1
        as_settled = all(
            part.ran in (None, self.contexts.winner_digest(name)) for name, part in merged.parts.items()
        )
        self.done = as_settled or was_closing or self._idle_runs == IDLE_RUNS
        return outcomes

    def rule_out(self, bans: dict[str, dict[str, tuple[int, str]]]) -> None:
        """Ban what was running in a crash, also in contexts that are still to come.

        Raises NoValidConfig when a context under way has nothing left.
        """
        for name, candidates in sorted(bans.items()):
            self.crash_bans.setdefault(name, {}).update(candidates)
            if name in self.contexts:
                self.contexts[name].rule_out(candidates)
        self.contexts.take_turns(closing=self.closing)

    def await_confirmation(self) -> None:
        """Go on in another process: what a rank was still to read is lost, and kernels may have changed."""
        self._resumed_at = self.runs
        self.kernels.forget_configs()
        for context in self.contexts.values():
            context.waiting = False
        if self.duel is not None:
            self.duel.waiting = False
        if self.rules.mode == "replay":
            self._unconfirmed = {context.name for context in self.contexts.unsettled}

    def _drop_unconfirmed(self, merged: Payload) -> None:
        """Forget the searches taken up that the first run of a replay has not launched."""
        for name in self._unconfirmed - merged.parts.keys():
            self.contexts.forget(name)
        self._unconfirmed = set()

    def _hold(self, on_hold: bool) -> None:
        self.on_hold = on_hold
        for context in self.contexts.values():
            context.on_hold = on_hold

    def _take(self, name: str, merged: Payload) -> Outcome:
        part, context = merged.parts[name], self.contexts.get(name)
        if context is None:
            if part.announcement is None:
                return Outcome()
            context = self.contexts.admit(name, part.announcement, part.bans, self.runs)
            if context.adopt(part.announcement.claim):
                context.settle("cached", context.winner)
            else:
                self._search_or_leave(context)
        elif part.announcement is not None:
            context.narrow(part.announcement)
        if part.ran is not None:
            context.last_run = self.runs
        outcome = context.advance(part, part if context.judge == BY_LAUNCH else merged.run)
        context.incumbent  # noqa: B018  raises NoValidConfig, settled or not, when nothing works any more
        if context.status == "cached" and context.winner is None:  # it does not work on some rank
            self._search_or_leave(context)
        return outcome

    def _search_or_leave(self, context: Context) -> None:
        if len(context.digests) - len(context.banned) == 1:
            context.settle("tuned")
        elif self.closing or self._is_too_late():
            context.settle("partial")
        else:
            self._admitting.add(self.runs)
            self.contexts.begin(context, max(self.runs - 1, 0))

    def _is_too_late(self) -> bool:
        """Return whether the session leaves what is new to others.

        Online, shapes come as the data does: what counts are the runs that brought any.
        """
        if self.rules.mode == "online":
            return len(self._admitting | {self.runs}) > ADMISSION_RUNS
        return self.runs - self._resumed_at > ADMISSION_RUNS

    def _close_if_spent(self, elapsed_s: float) -> None:
        """Settle what is under way when the next run must be the last."""
        if limits.is_spent(self.rules, self.contexts.searches, self.runs, elapsed_s):
            self.closing = True
        if self.closing:
            self.contexts.leave()
