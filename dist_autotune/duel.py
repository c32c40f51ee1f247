"""The final comparison of `objective="thunk"`: the tuned plan against the default one. No torch, no clock."""

from __future__ import annotations

from collections.abc import Iterable

from .payload import Payload
from .search import Context

DUEL_RUNS = 12  # two warm-ups, then five of each in turn


def contested(contexts: Iterable[Context], defaults: dict[str, int]) -> list[Context]:
    """Return the contexts in which the tuned plan differs from the default one."""
    return [
        c for c in contexts if defaults.get(c.name, c.winner) != c.winner and defaults[c.name] not in c.banned
    ]


class Duel:
    """The tuned plan against the default plan, in alternating runs judged by the whole run's time."""

    def __init__(self, contexts: list[Context], defaults: dict[str, int]) -> None:
        self.contexts = contested(contexts, defaults)
        self.defaults = dict(defaults)  # what was left to another session outlives the plan before it
        self.winners = {context.name: context.winner for context in self.contexts}
        self.run = 0
        self.was_launched = True  # whether the run that is timed launched any of the contexts
        self.idle_runs = 0  # in a row that launched none of them
        self.waiting = False  # online: its last run's time is not read yet on some rank
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

    def takes_up(self, other: Duel) -> bool:
        """Go on where another comparison of the same two plans was left; return whether it is of the same."""
        sides = [{name: (d.winners[name], d.defaults[name]) for name in d.winners} for d in (self, other)]
        if sides[0] != sides[1]:
            return False
        self.run, self.ms = other.run, other.ms
        self._turn()
        return True

    def leave(self) -> None:
        """Stop before it is over: each context takes what the comparison so far speaks for, for now."""
        keeps_default = self.ms["default"] is not None and not self.is_won
        for context in self.contexts:
            context.override = None
            winner = self.winners[context.name]
            context.settle("partial", self.defaults[context.name] if keeps_default else winner)

    def take(self, merged: Payload, *, on_hold: bool, patience: int) -> None:
        """Take in one run of all ranks.

        `on_hold`: it was no trial. A run that launches nothing of what is compared compares nothing, but for
        the last of `patience` such runs in a row.
        """
        is_turn = self.waiting or not on_hold
        if not self.waiting:  # else what is told now is of an earlier run
            parts = [merged.parts.get(context.name) for context in self.contexts]
            self.was_launched = any(part is not None and part.ran is not None for part in parts)
        self.waiting = bool(merged.run.pending)
        if self.waiting or not is_turn:
            return
        if not self.was_launched:
            self.idle_runs += 1
            if self.idle_runs < patience:
                return
        self.idle_runs = 0
        self.advance(self.contexts[0].times.reduced_ms(merged.run))

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
