"""Verifies after the search that the winners give the outputs of the first configs, bit for bit.

The first configs run twice, then the winners. If outputs differ, one half of the contexts takes its winners,
then the other, down to single contexts, which go back to their next best candidates.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TypeAlias

from ...errors import TuningError
from ...formatting import config_label
from ..context import Context
from ..messages import Bits
from ..plans.space import Plan
from ..reports import AgreedRun
from ..shared_context import Status
from .phase import Phase

RUNS = 2  # of each plan: the second shows whether it repeats itself
# Of a session that surely gets on: a run to tell who launches, two each of the first configs, of the winners
# verified before and of the next ones, and the last.
LEAST_RUNS = 8
PATIENCE = 3  # runs that launch other candidates than planned
SHOWN_CONFIGS = 2  # of a plan, in an error
NO_TENSOR = "the function returns no tensor: name in outputs= what it writes, or use bits='any'"
UNPLANNED = "other configs are launched than those planned, so their bits cannot be compared"
REMEDY = (
    "Have it use the same random numbers in each run, name the state that it changes in preserve=, leave "
    "out of its result what may change, or give it bits='any'."
)

Verification: TypeAlias = Generator[Plan, Bits, None]


def runs_at_most(candidates: Iterable[int]) -> int:
    """Return how many runs the phase takes at most, for so many candidates of each context."""
    return RUNS * (1 + 2 * sum(count - 1 for count in candidates))


class VerifyBits(Phase):
    """Compares the winners' outputs with those of the first configs; `same` bans a winner that changes them.

    A result is final once it is verified. `leave` puts others back to their first config; the next session
    takes them up.
    """

    def __init__(self, contexts: Mapping[str, Context], rule: str) -> None:
        super().__init__(contexts)
        self._rule = rule
        self._left: dict[str, tuple[Status, int]] = {}  # results that `leave` has put back
        self._groups: list[list[str]] = []  # contexts that are still to be verified together, from the last
        self.open()

    def open(self) -> None:
        """Begin a session: its inputs, and so its outputs, are others."""
        self.is_over = self._has_given_up = False
        self.remark = ""  # for the log
        self.new_bans: list[tuple[Context, int]] = []  # of the last run
        self._asked: Plan | None = None
        self._base: Plan = {}  # the first configs
        self._agreed: Plan = {}  # the candidates that are known to leave the first configs' outputs
        self._others: set[str] = set()  # contexts whose winners change outputs, under `check`
        self._reference = ""  # digest of the first configs' outputs
        self._verification: Verification = iter(())  # type: ignore[assignment]  # none yet
        self._missed = 0
        self._has_put_back = False  # behind the run that is recorded

    @property
    def is_under_way(self) -> bool:
        return self._asked is not None

    @property
    def compares(self) -> bool:
        """Return whether the outputs of the next run are compared."""
        return (self.is_under_way or self.is_over) and not self._has_given_up

    def plan(self) -> Plan:
        return self._asked or {}

    def is_final(self, context: Context) -> bool:
        return self.is_over or context.last_run <= 0 or context.is_spent  # not launched in this session

    def begin(self) -> None:
        """Begin when every context is settled, unless that was done."""
        if self.is_over or self.is_under_way or not self._launched:
            return
        self._left.clear()
        self._base = {context.name: _first(context) for context in self._launched}
        self._agreed = dict(self._base)
        self._others, self._missed = set(), 0
        known = {name for group in self._groups for name in group}  # a session was cut short: it goes on
        new = sorted((c for c in self._launched if c.name not in known), key=_order)
        self._groups.append([context.name for context in new])
        self._verification = self._verified()
        self._asked = next(self._verification)

    @property
    def _launched(self) -> list[Context]:  # in this session
        return [c for c in self._contexts.values() if c.last_run > 0 and not c.is_spent]

    def record(self, report: AgreedRun, *, closing: bool) -> None:
        """Compare the outputs of a run of all ranks. Raises TuningError where `same` cannot be kept."""
        self.remark, self.new_bans, self._has_put_back = "", [], False
        if self._has_given_up or closing or report.bits is None:
            return
        if not report.bits.tensors:
            self._give_up(NO_TENSOR)
        elif not report.launched <= self._agreed.keys() or any(not c.settled for c in self._launched):
            self._asked, self.is_over = None, False  # it begins anew after their searches
        elif self._asked is not None:
            self._advance(self._asked, report, report.bits)

    def _advance(self, asked: Plan, report: AgreedRun, bits: Bits) -> None:
        ran = {name: self._contexts[name].index_of(report.ran(name)) for name in report.launched}
        plans = (asked, self._agreed, self._base)
        if any(index in self._contexts[name].banned for plan in plans for name, index in plan.items()):
            self._asked = None  # it failed; the first configs may be others now
        elif any(index != asked[name] for name, index in ran.items()):
            self._missed += 1
            if self._missed == PATIENCE:
                self._give_up(UNPLANNED)
        else:
            self._missed = 0
            try:
                self._asked = self._verification.send(bits)
            except StopIteration:
                self._finish()

    def _finish(self) -> None:
        self._asked, self.is_over = None, True
        for name in self._agreed.keys() if not self._has_given_up else ():
            self._contexts[name].same_bits = name not in self._others

    def _verified(self) -> Verification:
        """Take over the winners that change nothing, group by group; the next best where one does."""
        first, again = yield from self._twice({})
        if first.digest != again.digest:
            self._give_up(self._unsteady(again))
            return
        self._reference = first.digest
        while self._groups:
            names = self._changed_by(self._groups[-1])
            winners = {name: self._contexts[name].incumbent for name in names}
            first, again = (yield from self._twice(winners)) if winners else (first, first)
            self._groups.pop()
            if not winners or first.digest == again.digest == self._reference:
                self._agreed |= winners
            elif len(names) > 1:
                self._groups += [names[len(names) // 2 :], names[: len(names) // 2]]
            elif first.digest != again.digest:
                self._ban(names, again, "does not repeat itself: other bits in another run")
            elif self._rule == "check":
                self._others |= {*names}
            else:
                self._ban(names, first, "other bits than with the first config")

    def _changed_by(self, names: Sequence[str]) -> list[str]:
        """Return the contexts of a group in which the winner is still to be taken over."""
        launched = (name for name in names if name in self._agreed)
        return [name for name in launched if self._contexts[name].incumbent != self._agreed[name]]

    def _ban(self, names: list[str], bits: Bits, reason: str) -> None:
        context, (rank, path) = self._contexts[names[0]], bits.differs or (0, "the outputs")
        self.new_bans.append((context, context.incumbent))
        context.ban_after_run(context.incumbent, rank, f"{reason}, in {path}")
        self._groups.append(names)

    def _twice(self, winners: Plan) -> Generator[Plan, Bits, tuple[Bits, Bits]]:
        plan = {**self._agreed, **winners}
        return (yield plan), (yield plan)

    def _unsteady(self, bits: Bits) -> str:
        contexts = [self._contexts[name] for name in sorted(self._agreed)]
        configs = [f"{c.title} {config_label(c.texts[_first(c)])}" for c in contexts[:SHOWN_CONFIGS]]
        further = len(contexts) - len(configs)
        shown = "; ".join(configs) + (f"; and those of {further} more contexts" if further else "")
        return (
            f"two runs with the same configs ({shown}) have different bits in {_where(bits)}: the function, "
            f"or one of these configs, does not repeat itself. {REMEDY}"
        )

    def _give_up(self, why: str) -> None:
        if self._rule == "same":
            raise TuningError(f"bits='same': {why}")
        self._asked, self.is_over, self._has_given_up = None, True, True
        self.remark = f"bits='check': {why}"

    # -- the end -------------------------------------------------------------------------------------------

    def accepts(self, report: AgreedRun, *, closing: bool) -> bool:
        """Return whether a run of the winners may be the last: with `same` it has the first configs' bits."""
        if self._rule != "same" or report.bits is None:
            return True
        if self._has_put_back:
            return False
        if report.bits.digest == self._reference or not self._reference:
            return True
        if all(context.incumbent == _first(context) for context in self._launched):
            self._give_up(self._unsteady(report.bits))
        self.remark = f"the winners change {_where(report.bits)}, which they did not before: verified again"
        self._agreed, self.is_over = {}, False
        if closing:
            self.leave()
        else:
            self.begin()
        return False

    def leave(self, max_runs: int | None = None) -> None:
        """Put contexts that are not verified back to the first config: the session ends."""
        self._asked, self.is_over = None, True
        if max_runs is not None and max_runs < LEAST_RUNS and any(self.unverified):
            self.remark = (
                f"max_runs={max_runs} ended the session before winners were verified, and first configs "
                f"stay: give bits='same' {LEAST_RUNS} runs or more"
            )
        for context in self.unverified:
            if not context.provisional:
                self._left[context.name] = context.status, context.incumbent
            context.settle(Status.PARTIAL, self._agreed.get(context.name, _first(context)))
            self._has_put_back = True

    def take_up(self, context: Context) -> bool:
        """Return whether a result is known that was left to be verified; the context has it then."""
        status, winner = self._left.pop(context.name, (Status.TUNED, None))
        if winner is None or winner in context.banned:
            return False
        context.settle(status, winner)
        return True

    @property
    def unverified(self) -> list[Context]:
        """Return the contexts that `same` does not let have their result."""
        if self._rule != "same":
            return []
        return [c for c in self._launched if c.incumbent != self._agreed.get(c.name, _first(c))]


def _first(context: Context) -> int:
    """Return a context's first config that works."""
    return next(index for index in range(len(context.digests)) if index not in context.banned)


def _order(context: Context) -> tuple[bool, float, str]:
    """Sort choices first, which bring kernels, then the largest gains: the last ones give way."""
    return not context.is_choice, context.times.ratio(context.incumbent, _first(context)), context.name


def _where(bits: Bits) -> str:
    """Return `the result[0] on rank 1`."""
    return "the outputs" if bits.differs is None else f"{bits.differs[1]} on rank {bits.differs[0]}"
