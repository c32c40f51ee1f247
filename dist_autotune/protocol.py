"""How what all ranks said of a run becomes the next plan. No torch, no I/O, no clock.

`Tuning` is the state that every rank holds alike: fed the same merged payloads, it yields the same
plans, so every rank makes the same number of runs.

First all kernels advance together, each judged by its own launches. Then the contexts that are judged
by the whole run's time take their turns, one after another, from the winners so far. With
`objective="thunk"` the plan that results must beat the default plan in a final alternating comparison.
"""

from __future__ import annotations

from collections.abc import Iterator

from .duel import DUEL_RUNS, Duel, contested
from .kernel_families import KernelFamilies
from .outlook import Outlook, RunsSpent
from .pace import Pace
from .payload import Announcement, Part, Payload
from .purpose import Purpose
from .search import BY_LAUNCH, BY_RUN, Context, Outcome, Rules
from .turns import Turns

ADMISSION_RUNS = 16  # contexts first seen later are partial, so that new keys at every run end
STARVED_RUNS = {"replay": 3, "online": 64}
RUNS_ALLOWED = 4  # max_runs=None: this many times the runs that the search plans
IDLE_RUNS = 3  # runs without a trial after which a session ends even if ranks still differ in what they ran


class Tuning:
    """All contexts of one tuned function. `step(merged)` after each run; `done` ends the session."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.contexts: dict[str, Context] = {}
        self.kernels = KernelFamilies()
        self.runs = 0
        self.done = False
        self.closing = not rules.tunes
        self.duel: Duel | None = None
        self.on_hold = False  # online: the next run is no trial, to keep to `Rules.online_share`
        self.remark = ""
        self.session = ""  # the last one that used this state
        self.crash_bans: dict[str, dict[str, tuple[int, str]]] = {}  # context -> candidate -> (rank, reason)
        self.elapsed_before_s = 0.0  # of the session, in processes before this one
        self._resumed_at = 0  # the run with which this process took the session up
        self._unconfirmed: set[str] = set()  # contexts taken up that may not be launched any more
        self._told: dict[str, tuple[str, int | None]] = {}  # results that `newly_final` has returned
        self._idle_runs = 0
        self._pace = Pace(rules.online_share)
        self._turns = Turns()  # of what is judged by the whole run
        self._spent = RunsSpent()
        self._defaults: dict[str, int] = {}  # the plan before this search, of what is not decided yet
        self._left: Duel | None = None  # the comparison that a session without runs or time left to the next
        self._admitted: dict[str, int] = {}  # searches of this session and the run they began in, from 0

    # -- the state -----------------------------------------------------------------------------------------

    @property
    def unsettled(self) -> Iterator[Context]:
        return (context for context in self.contexts.values() if not context.settled)

    @property
    def has_trial(self) -> bool:
        """Return whether the next run tries something."""
        return self.duel is not None or any(c.trial is not None for c in self.contexts.values())

    @property
    def judged_run(self) -> tuple[str, str] | None:
        """Return (context, candidate) that the whole next run is timed for; None: it is not timed."""
        if self.duel is not None:
            return None if self.on_hold else ("", self.duel.side)
        context = self._on_turn
        if context is None or context.trial is None or not context.is_on_trial:
            return None
        return context.name, context.digests[context.trial]

    @property
    def planned_runs(self) -> int:
        """Return how many runs the search plans, the final one included."""
        together, in_turn = 0, 0
        for name, run in tuple(self._admitted.items()):
            context = self.contexts.get(name)
            if context is None:
                continue
            runs = self.rules.planned_runs(len(context.digests))
            judges = self.rules.judges(is_choice=context.is_choice)
            together = max(together, run + runs if BY_LAUNCH in judges else run + 1)
            in_turn += runs if BY_RUN in judges else 0
        return together + in_turn + (DUEL_RUNS if self.rules.objective == "thunk" else 0) + 1

    @property
    def outlook(self) -> Outlook:
        """Return how far the session has come."""
        admitted = map(self.contexts.get, tuple(self._admitted))  # a copy: any thread may ask for a report
        contexts = [context for context in admitted if context is not None]
        return Outlook(
            timed=sum(len(context.times.ms.keys() | context.banned.keys()) for context in contexts),
            candidates=sum(len(context.digests) for context in contexts),
            planned_trials=self.planned_runs - 1,
            spent=self._spent,
        )

    @property
    def _on_turn(self) -> Context | None:
        return self.contexts.get(self._turns.name or "")

    def is_final(self, context: Context) -> bool:
        """Return whether the context's result stands: the comparison with the default plan is over."""
        return context.settled and context not in self._undecided()

    def newly_final(self) -> list[Context]:
        """Return the contexts whose result stands and is new since this was last asked."""
        new = []
        for context in self.contexts.values():
            state = (context.status, context.winner)
            if self.is_final(context) and self._told.get(context.name) != state:
                self._told[context.name] = state
                new.append(context)
        return new

    def winner_digest(self, name: str) -> str:
        context = self.contexts[name]
        return context.digests[context.incumbent]

    def digest_text(self) -> str:
        """Return the settled state as text: equal on ranks that have lived through the same."""
        return ";".join(
            f"{name}={context.status}:{self.winner_digest(name)}"
            for name, context in sorted(self.contexts.items())
            if context.settled
        )

    # -- what happens to it --------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a session: take up what earlier ones left unfinished."""
        self.runs, self.done, self.closing, self._idle_runs = 0, False, not self.rules.tunes, 0
        self.duel, self._turns, self.remark, self._spent = None, Turns(), "", RunsSpent()
        self._admitted = {}
        self.elapsed_before_s, self._resumed_at = 0.0, 0
        self._pace = Pace(self.rules.online_share if self.rules.mode == "online" else 1.0)
        self._hold(False)
        for context in self.contexts.values():
            context.last_run = 0
            if not context.provisional:
                self._defaults.pop(context.name, None)
            elif not self.closing:
                self._begin(context)
        if not any(self.unsettled):
            self._take_turns()
        self._close_if_spent(0.0)

    def step(self, merged: Payload) -> dict[str, Outcome]:
        """Take in one run of all ranks; return what it was for each context."""
        self._drop_unconfirmed(merged)
        had_trial, was_closing = self.has_trial, self.closing
        purpose = Purpose.of(self.unsettled, self.duel, on_hold=self.on_hold)
        turn = self._on_turn
        self._turns.ran(merged, None if turn is None or turn.waiting else turn)
        self.runs += 1
        is_new = any(part.announcement for part in merged.parts.values())
        self._spent = self._spent.after(trial=purpose.tries or is_new, wait=purpose.waits, hold=purpose.holds)
        outcomes = {name: self._take(name, merged) for name in self._in_order(merged)}
        had_trial = had_trial or self.has_trial  # a search that begins with this run, and may end with it
        if self.duel is not None:
            self._advance_duel(merged)
        self._starve()
        self._close_if_spent(merged.elapsed_s)
        self._take_turns()
        self._hold(
            self._pace.take(
                merged.elapsed_s,
                was_trial=purpose.tries_rival,
                waited=purpose.awaits_rival,
                compiling_s=merged.compiling_s,
            )
        )
        if had_trial or self.has_trial or any(self.unsettled):
            self._idle_runs = 0
            return outcomes
        self._idle_runs += 1
        as_settled = all(part.ran in (None, self.winner_digest(name)) for name, part in merged.parts.items())
        self.done = as_settled or was_closing or self._idle_runs == IDLE_RUNS
        return outcomes

    def drop_unsettled(self) -> set[str]:
        """Forget searches under way, and what nothing works for: the session was dropped on all ranks.

        Returns the names of what is forgotten.
        """
        spent = [context for context in self.contexts.values() if context.is_spent]
        dropped = {context.name for context in (*self.unsettled, *self._undecided(), *spent)}
        for name in dropped:
            del self.contexts[name]
            self._defaults.pop(name, None)
        self.duel, self._left, self._turns = None, None, Turns()
        return dropped

    def rule_out(self, bans: dict[str, dict[str, tuple[int, str]]]) -> None:
        """Ban what was running in a crash, also in contexts that are still to come.

        Raises NoValidConfig when a context under way has nothing left.
        """
        for name, candidates in sorted(bans.items()):
            self.crash_bans.setdefault(name, {}).update(candidates)
            if name in self.contexts:
                self.contexts[name].rule_out(candidates)
        self._take_turns()

    def await_confirmation(self) -> None:
        """Go on in another process: what a rank was still to read is lost, and kernels may have changed."""
        self._resumed_at = self.runs
        self.kernels.forget_configs()
        for context in self.contexts.values():
            context.waiting = False
        if self.duel is not None:
            self.duel.waiting = False
        if self.rules.mode == "replay":
            self._unconfirmed = {context.name for context in self.unsettled}

    def _drop_unconfirmed(self, merged: Payload) -> None:
        """Forget the searches taken up that the first run of a replay has not launched."""
        for name in self._unconfirmed - merged.parts.keys():
            del self.contexts[name]
            self._admitted.pop(name, None)
            self._defaults.pop(name, None)
        self._unconfirmed = set()

    def _in_order(self, merged: Payload) -> list[str]:
        """Return the contexts of a run; the new ones last, in the order of the lowest rank that has them."""

        def place(name: str) -> tuple[int, int, str]:
            announced = merged.parts[name].announcement
            if announced is None or name in self.contexts:
                return -1, 0, name
            return announced.rank, announced.place, name

        return sorted(merged.parts, key=place)

    def _hold(self, on_hold: bool) -> None:
        self.on_hold = on_hold
        for context in self.contexts.values():
            context.on_hold = on_hold

    def _take(self, name: str, merged: Payload) -> Outcome:
        part, context = merged.parts[name], self.contexts.get(name)
        if context is None:
            if part.announcement is None:
                return Outcome()
            context = self._admit(name, part.announcement, part)
        elif part.announcement is not None:
            context.narrow(part.announcement)
        if part.ran is not None:
            context.last_run = self.runs
        outcome = context.advance(part, part if context.judge == BY_LAUNCH else merged.run)
        context.incumbent  # noqa: B018  raises NoValidConfig, settled or not, when nothing works any more
        if context.status == "cached" and context.winner is None:  # it does not work on some rank
            self._search_or_leave(context)
        return outcome

    def _admit(self, name: str, announcement: Announcement, part: Part) -> Context:
        context = self.contexts[name] = Context(name, announcement, self.rules, self.runs)
        context.take_bans(part.bans)
        self._defaults[name] = context.incumbent  # raises NoValidConfig when nothing works on every rank
        if context.adopt(announcement.claim):
            context.settle("cached", context.winner)
        else:
            self._search_or_leave(context)
        return context

    def _search_or_leave(self, context: Context) -> None:
        if len(context.digests) - len(context.banned) == 1:
            context.settle("tuned")
        elif self.closing or (self.rules.mode == "replay" and self.runs - self._resumed_at > ADMISSION_RUNS):
            context.settle("partial")
        else:
            self._begin(context)

    def _begin(self, context: Context) -> None:
        """Start a search; one that is judged by the whole run waits for its turn."""
        self._admitted[context.name] = max(self.runs - 1, 0)
        self._defaults.setdefault(context.name, context.incumbent)
        if self._left is not None and context.name in self._left.winners:  # searched to the end
            winner = self._left.winners[context.name]
            context.settle("tuned", None if winner in context.banned else winner)
            return
        context.status = ""
        if context.judge == BY_LAUNCH:
            context.start()

    def _take_turns(self) -> None:
        """Let the next context be judged by the whole run, when all kernels are done; last comes the duel.

        What is new while plans are compared waits until that is over: a whole run is timed for one thing.
        """
        if self.duel is not None:
            return
        self._turns.pass_on(self.contexts)
        if any(self.unsettled):
            return
        if self.rules.objective == "thunk" and self._defaults and not self.closing:
            self.duel = Duel(self._undecided(), self._defaults)
            if self._left is not None:
                self.duel.takes_up(self._left)
            self._left, self._admitted, self._defaults = None, {}, {}
            if self.duel.is_over:
                self.duel = None

    def _undecided(self) -> list[Context]:
        """Return the contexts whose winners have yet to beat the default plan."""
        if self.duel is not None:
            return self.duel.contexts
        if self.rules.objective != "thunk":
            return []
        tuned = (self.contexts[name] for name in self._admitted if name in self.contexts)
        return contested([context for context in tuned if context.status == "tuned"], self._defaults)

    def _advance_duel(self, merged: Payload) -> None:
        duel = self.duel
        assert duel is not None
        is_turn = duel.waiting or not self.on_hold
        if not duel.waiting:  # else what is told now is of an earlier run
            parts = [merged.parts.get(context.name) for context in duel.contexts]
            duel.was_launched = any(part is not None and part.ran is not None for part in parts)
        duel.waiting = bool(merged.run.pending)
        if duel.waiting or not is_turn:
            return
        if not duel.was_launched:
            duel.idle_runs += 1
            if duel.idle_runs < STARVED_RUNS[self.rules.mode]:
                return  # a run that launches nothing of what is compared compares nothing
        duel.idle_runs = 0
        duel.advance(duel.contexts[0].times.reduced_ms(merged.run))
        if not duel.is_over:
            return
        if not duel.is_won:
            for context in duel.contexts:
                if duel.defaults[context.name] not in context.banned:
                    context.settle("tuned", duel.defaults[context.name])
            tuned, default = duel.ms["tuned"], duel.ms["default"]
            self.remark = f"the default plan is kept: it took {default} ms, the tuned one {tuned} ms"
        self.duel = None

    def _starve(self) -> None:
        patience = STARVED_RUNS[self.rules.mode]
        for context in self.unsettled:
            if self.runs - context.last_run >= patience:
                context.is_unasked = self._is_unasked(context)
                context.settle("starved")

    def _is_unasked(self, context: Context) -> bool:
        """Return whether it is a winner's doing that the context is not launched: it has had no turn yet."""
        others = (other for other in self.contexts.values() if other is not context)
        has_changed = any(o.incumbent != self._defaults.get(o.name, o.incumbent) for o in others)
        return context.judge == BY_RUN and context.name != self._turns.name and has_changed

    def _close_if_spent(self, elapsed_s: float) -> None:
        """Settle what is under way when the next run must be the last."""
        allowed = self.rules.max_runs
        if allowed is None and self._admitted and self.rules.mode == "replay":
            allowed = RUNS_ALLOWED * self.planned_runs
        out_of_runs = allowed is not None and self.runs + 1 >= allowed
        out_of_time = self.rules.budget_s is not None and elapsed_s >= self.rules.budget_s
        if out_of_runs or out_of_time:
            self.closing = True
        if not self.closing:
            return
        for context in list(self.unsettled):
            context.settle("partial")
        left = self.duel or Duel(self._undecided(), self._defaults)
        if not left.is_over:
            self._left = left
            self._defaults.update(left.defaults)
            left.leave()
        self.duel = None
