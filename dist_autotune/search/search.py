"""The search of one function on its deciding rank: from the reports of all ranks to one order.

No other rank has one. What it raises as a TuningError becomes an order, too: all ranks raise it.
"""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, TypeVar

from ..errors import TuningError
from .context import Context
from .messages import Facts, InPlaceReport, Message, Opening, RunReport, bans_for_crashes, checked, decode
from .orders import ContextChanges, OpeningOrder, Order, Orders, RunOrder, changes_of
from .rules import Rules
from .state import SearchState

M = TypeVar("M", bound=Message)
Reports: TypeAlias = Mapping[int, bytes]  # by rank

SESSION_STATE = "the state of the session"  # the fact that names the session which a rank would go on with
# Facts of an opening in which ranks may differ.
MAY_DIFFER = ("device", "settled", "clock", "retune", "cache", SESSION_STATE)
SOURCE_OF = "the source of kernel "  # and its name: a fact that runs report


class Search:
    """Decides what the ranks of a group launch next.

    orders: what the ranks have been told; the order of an exchange that fails is none of it.
    """

    def __init__(self, rules: Rules, orders: Orders) -> None:
        self.rules, self.orders = rules, orders
        self.state = SearchState(rules)
        self.last_report: RunReport | None = None  # of all ranks, of the last run
        self._sources: Facts = {}  # of kernels, as ranks have reported them

    def open(self, reports: Reports) -> bytes:
        """Return the order that opens a session, or lets one go on behind a failed run."""
        return self._order(lambda: self._open(_united(reports, Opening, MAY_DIFFER)))

    def meet(self, reports: Reports) -> bytes:
        """Return an order without a plan: all ranks have come."""

        def meet() -> Order:
            _united(reports, Opening)
            return Order()

        return self._order(meet)

    def compare(self, reports: Reports) -> bytes:
        """Return an order that says what some rank has found in place."""

        def compare() -> Order:
            found = _united(reports, InPlaceReport).found
            return Order(found=min(found, key=found.__getitem__, default=""))

        return self._order(compare)

    def step(self, reports: Reports) -> bytes:
        """Return the order that follows from a run."""
        return self._order(lambda: self._step(self._checked_run(reports)))

    def drop(self) -> None:
        """Drop searches under way, as all ranks do with their records."""
        self.state.drop(self.orders.contexts)

    @property
    def point(self) -> str:
        """Return where the session stands; behind a failed exchange it may be ahead of the ranks."""
        return f"{self.orders.session} {self.state.runs}"

    def _order(self, decide: Callable[[], Order]) -> bytes:
        """Return the order that `decide` makes; where it raises a TuningError, one by which all ranks do."""
        try:
            order = decide()
        except TuningError as error:
            dropped = tuple(name for name in self.state.contexts if not self.state.stays(name))
            order = Order(failure=(type(error).__name__, str(error)), dropped=dropped)
        return order.encode()

    # -- a session -----------------------------------------------------------------------------------------

    def _open(self, merged: Opening) -> Order:
        facts, remarks = merged.facts, []
        points = set(facts[SESSION_STATE])
        if points != {""}:
            resumes = points == {self.point}
            return Order(opening=OpeningOrder(resumes=resumes, drops=not resumes))
        retunes, differ = str(True) in facts["retune"], len(facts["settled"]) > 1
        if differ:
            remarks.append("ranks hold different earlier results: dropped on all ranks")
        if resets := differ or retunes:
            self.state = SearchState(self.rules)
        devices = facts["device"]
        if len(devices) > 1:
            remarks.append(f"ranks run on different devices ({', '.join(devices)}): no disk entries are used")
        self.state.open()
        opening = OpeningOrder(
            session=uuid.uuid4().hex[:12],
            retunes=retunes,
            resets=resets,
            same_device=len(devices) == 1,
            shares_clock=len(facts["clock"]) == 1,
            stores=facts["cache"],
            offers=merged.offers,
            crashes=merged.crashes,
            crash_bans=bans_for_crashes(merged),
            remarks=tuple(remarks),
        )
        contexts = self._changes(self.state.contexts.values(), resets=resets)
        order = Order(opening=opening, run=self._run_order(RunReport()), contexts=contexts)
        self.state.keep_settled()
        return order

    # -- a run ---------------------------------------------------------------------------------------------

    def _checked_run(self, reports: Reports) -> RunReport:
        """Return the merged report; raises RankMismatch where ranks differ.

        A kernel's name may stand for several source texts (functions made by functions), of which ranks may
        launch different ones: they differ only where they have none in common.
        """
        merged, facts = _merged(reports), {}
        for name, values in merged.facts.items():
            if name.startswith(SOURCE_OF):
                values = self._sources[name] = {**values, **self._sources.get(name, {})}
                texts = [set(value.split()) for value in values]
                if all(one & other for one, other in itertools.combinations(texts, 2)):
                    continue
            facts[name] = values
        return checked(merged, RunReport, facts)

    def _step(self, merged: RunReport) -> Order:
        state = self.state
        aliases = dict(state.kernels.aliases)
        merged, names = state.kernels.unite(merged, state.known)
        self.last_report = merged
        outcomes = state.step(merged)
        bans = [
            (name, context.digests.index(digest))
            for name, part in merged.parts.items()
            if (context := state.contexts.get(name)) is not None
            for digest in part.bans
            if digest in context.digests
        ]
        verified = () if state.verify_bits is None else state.verify_bits.new_bans
        bans += [(context.name, index) for context, index in verified]
        remark, state.remark = state.remark, ""
        order = self._run_order(
            merged,
            outcomes=outcomes,
            bans=tuple(bans),
            results=tuple(context.name for context in state.newly_final()),
            names=names,
            unknown=tuple(name for name in merged.parts if name not in state.known),
            aliases=None if state.kernels.aliases == aliases else dict(state.kernels.aliases),
            remark=remark,
            offers=merged.offers,
        )
        return Order(run=order, contexts=self._changes(state.contexts.values()))

    def _run_order(self, merged: RunReport, **values: object) -> RunOrder:
        state, rules = self.state, self.rules
        is_cut_short = state.closing and rules.tunes and rules.mode == "replay"
        return RunOrder(
            runs=state.runs,
            judged_run=state.judged_run,
            tries=state.tries,
            follows_fit=state.follows_fit,
            compares_outputs=state.compares_outputs,
            counts=state.has_counted_run,
            is_pending=bool(merged.run.pending),
            done=state.done,
            has_work=state.has_work,
            wants_another=is_cut_short and any(c.status == "partial" for c in state.contexts.values()),
            forecast=state.forecast,
            sent_ns=merged.sent_ns,
            lag_ns=merged.lag_ns,
            wanted_ms=merged.wanted_ms,
            late_ms=merged.late_ms,
            **values,  # type: ignore[arg-type]
        )

    def _changes(self, contexts: Iterable[Context], *, resets: bool = False) -> dict[str, ContextChanges]:
        known = {} if resets else self.orders.contexts
        found = {each.name: changes_of(each, self.state, known.get(each.name)) for each in contexts}
        return {name: changes for name, changes in found.items() if changes != ContextChanges()}


def _merged(reports: Reports) -> Message:
    return functools.reduce(Message.merged, map(decode, reports.values()))


def _united(reports: Reports, kind: type[M], may_differ: Iterable[str] = ()) -> M:
    """Return all ranks' messages as one; raises RankMismatch where they differ in a fact that may not."""
    merged = _merged(reports)
    return checked(merged, kind, {n: v for n, v in merged.facts.items() if n not in set(may_differ)})
