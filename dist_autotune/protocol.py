"""How what all ranks said of a run becomes the next plan. No torch, no I/O, no clock.

`Tuning` is the state that every rank holds alike: fed the same merged payloads, it yields the same
plans, so every rank makes the same number of runs.

First all kernels advance together, each judged by its own launches. Then the contexts that are judged
by the whole run's time take their turns, one after another, from the winners so far. With
`objective="thunk"` the plan that results must beat the default plan in a final alternating comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from .payload import Announcement, Part, Payload
from .search import BY_LAUNCH, BY_RUN, Context, Outcome, Rules
from .settings import digest

ADMISSION_RUNS = 16  # contexts first seen later are partial, so that new keys at every run end
STARVED_RUNS = {"replay": 3, "online": 64}
RUNS_ALLOWED = 4  # max_runs=None: this many times the runs that the search plans
IDLE_RUNS = 3  # runs without a trial after which a session ends even if ranks still differ in what they ran
DUEL_RUNS = 12  # of the comparison with the default plan: two warm-ups, then five of each in turn


class Duel:
    """The tuned plan against the default plan, in alternating runs judged by the whole run's time."""

    def __init__(self, contexts: list[Context], defaults: dict[str, int]) -> None:
        self.contexts = [c for c in contexts if defaults.get(c.name, c.winner) != c.winner]
        self.defaults = defaults
        self.run = 0
        self.ms: dict[str, float | None] = {"tuned": None, "default": None}
        self._turn()

    @property
    def side(self) -> str:
        return "tuned" if self.run % 2 == 0 else "default"

    @property
    def is_warmup(self) -> bool:
        return self.run < 2

    @property
    def is_over(self) -> bool:
        return self.run >= DUEL_RUNS or not self.contexts

    def advance(self, ms: float | None) -> None:
        """Take the agreed time so far of the side that ran."""
        if not self.is_warmup:
            self.ms[self.side] = ms
        self.run += 1
        self._turn()

    @property
    def is_won(self) -> bool:
        """Return whether the tuned plan is faster; it is not if either could not be timed."""
        tuned, default = self.ms["tuned"], self.ms["default"]
        return not self.contexts or (tuned is not None and default is not None and tuned < default)

    def _turn(self) -> None:
        for context in self.contexts:
            playing = not self.is_over and self.side == "default"
            context.override = self.defaults[context.name] if playing else None


@dataclass
class Family:
    """The Autotuners of one function and keys, on all ranks."""

    kernels: list[str] = field(default_factory=list)  # ids, that of the lowest rank first
    siblings: int = 1  # on one rank, at most


def context_name(kernel_id: str, slot: str) -> str:
    """Return the name of a kernel's context, the same on all ranks."""
    return digest(f"{kernel_id}|{slot}")


class Tuning:
    """All contexts of one tuned function. `step(merged)` after each run; `done` ends the session."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.contexts: dict[str, Context] = {}
        self.aliases: dict[str, str] = {}  # ids of kernels that go by another id
        self._families: dict[str, Family] = {}
        self.runs = 0
        self.done = False
        self.closing = not rules.tunes
        self.duel: Duel | None = None
        self.remark = ""
        self._idle_runs = 0
        self._turn: str | None = None  # the context that is judged by the whole run now
        self._defaults: dict[str, int] = {}  # the plan before this session
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
            return "", self.duel.side
        context = self.contexts.get(self._turn or "")
        if context is None or context.trial is None or context.waiting:
            return None
        return context.name, context.digests[context.trial]

    @property
    def planned_runs(self) -> int:
        """Return how many runs the search plans, the final one included."""
        together, in_turn = 0, 0
        for name, run in self._admitted.items():
            context = self.contexts.get(name)
            if context is None:
                continue
            runs = self.rules.planned_runs(len(context.digests))
            judges = self.rules.judges(is_choice=context.is_choice)
            together = max(together, run + runs if BY_LAUNCH in judges else run + 1)
            in_turn += runs if BY_RUN in judges else 0
        return together + in_turn + (DUEL_RUNS if self.rules.objective == "thunk" else 0) + 1

    def is_final(self, context: Context) -> bool:
        """Return whether the context's result stands: the comparison with the default plan is over."""
        return context.settled and (self.duel is None or context not in self.duel.contexts)

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

    # -- one name for one kernel ---------------------------------------------------------------------------

    def unite(self, merged: Payload) -> tuple[Payload, dict[str, str]]:
        """Return the payload with one name for what is one context; and the new names by the old.

        Ranks may give an Autotuner different configs. Where no rank has several Autotuners of a function,
        those of all ranks are one kernel, whose candidates meet in their intersection.
        """
        announced = {
            name: part.announcement
            for name, part in sorted(merged.parts.items())
            if part.announcement is not None and part.announcement.family and name not in self.contexts
        }
        for announcement in sorted(announced.values(), key=lambda a: (a.rank, a.kernel_id)):
            family = self._families.setdefault(announcement.family, Family())
            family.siblings = max(family.siblings, announcement.siblings)
            if announcement.kernel_id not in family.kernels:
                family.kernels.append(announcement.kernel_id)
        for family in self._families.values():
            if family.siblings == 1:
                self.aliases.update(dict.fromkeys(family.kernels[1:], family.kernels[0]))
        names = {
            name: context_name(self.aliases[announcement.kernel_id], announcement.slot)
            for name, announcement in announced.items()
            if announcement.kernel_id in self.aliases
        }
        parts: dict[str, Part] = {}
        for name, part in sorted(merged.parts.items()):
            name = names.get(name, name)
            parts[name] = parts[name].merged(part) if name in parts else part
        return dataclasses.replace(merged, parts=parts), names

    # -- what happens to it --------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a session: take up what earlier ones left unfinished."""
        self.runs, self.done, self.closing, self._idle_runs = 0, False, not self.rules.tunes, 0
        self.duel, self._turn, self.remark = None, None, ""
        self._defaults, self._admitted = {}, {}
        for context in self.contexts.values():
            context.last_run = 0
            if context.provisional and not self.closing:
                self._begin(context)
        self._close_if_spent(0.0)

    def step(self, merged: Payload) -> dict[str, Outcome]:
        """Take in one run of all ranks; return what it was for each context."""
        had_trial, was_closing = self.has_trial, self.closing
        self.runs += 1
        outcomes = {name: self._take(name, merged) for name in sorted(merged.parts)}
        if self.duel is not None:
            self._advance_duel(merged)
        self._starve()
        self._close_if_spent(merged.elapsed_s)
        self._take_turns()
        if had_trial or self.has_trial or any(self.unsettled):
            self._idle_runs = 0
            return outcomes
        self._idle_runs += 1
        as_settled = all(part.ran in (None, self.winner_digest(name)) for name, part in merged.parts.items())
        self.done = as_settled or was_closing or self._idle_runs == IDLE_RUNS
        return outcomes

    def drop_unsettled(self) -> None:
        """Forget searches under way: the session was dropped on all ranks."""
        undecided = self.duel.contexts if self.duel is not None else []
        for context in [*self.unsettled, *undecided]:
            self.contexts.pop(context.name, None)
        self.duel, self._turn = None, None

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
        elif self.closing or (self.rules.mode == "replay" and self.runs > ADMISSION_RUNS):
            context.settle("partial")
        else:
            self._begin(context)

    def _begin(self, context: Context) -> None:
        """Start a search; one that is judged by the whole run waits for its turn."""
        self._admitted[context.name] = max(self.runs - 1, 0)
        self._defaults.setdefault(context.name, context.incumbent)
        context.status = ""
        if context.judge == BY_LAUNCH:
            context.start()

    def _take_turns(self) -> None:
        """Let the next context be judged by the whole run, when all kernels are done; last comes the duel."""
        turn = self.contexts.get(self._turn or "")
        if turn is not None and not turn.settled:
            return
        self._turn = None
        if any(context.judge == BY_LAUNCH for context in self.unsettled):
            return
        following = next(self.unsettled, None)
        if following is not None:
            self._turn = following.name
            following.start()
        elif self.rules.objective == "thunk" and self.duel is None and self._defaults and not self.closing:
            tuned = [self.contexts[name] for name in self._admitted if name in self.contexts]
            self.duel = Duel([context for context in tuned if context.status == "tuned"], self._defaults)
            self._admitted = {}
            if self.duel.is_over:
                self.duel = None
            self._defaults = {}

    def _advance_duel(self, merged: Payload) -> None:
        duel = self.duel
        assert duel is not None
        if merged.run.pending:
            return
        duel.advance(duel.contexts[0].reduced_ms(merged.run))
        if not duel.is_over:
            return
        if not duel.is_won:
            for context in duel.contexts:
                context.settle("tuned", duel.defaults[context.name])
            tuned, default = duel.ms["tuned"], duel.ms["default"]
            self.remark = f"the default plan is kept: it took {default} ms, the tuned one {tuned} ms"
        self.duel = None

    def _starve(self) -> None:
        patience = STARVED_RUNS[self.rules.mode]
        for context in self.unsettled:
            if self.runs - context.last_run >= patience:
                context.settle("starved")

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
        if self.duel is not None:
            for context in self.duel.contexts:
                context.override = None
            self.duel = None
