"""The search of one function on its deciding rank: from the reports of all ranks to one order.

No other rank has one. A TuningError of it becomes an order, too: all ranks raise it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ..errors import TuningError
from .context import Context
from .messages import InPlaceReport, Message, Opening, RunReport
from .orders import (
    ContextChanges,
    ContextOrder,
    NextLaunch,
    OpeningOrder,
    Order,
    Orders,
    PlannedRun,
    RunOrder,
    SearchResult,
)
from .reports import (
    AgreedRun,
    Reports,
    Sources,
    agreed_run,
    announced_in,
    bans_for_crashes,
    crashes_of,
    offered,
    read_reports,
    values_of,
)
from .rules import Rules
from .state import SearchState

SESSION_STATE = "the state of the session"  # the fact that names the session which a rank would go on with
# Facts of an opening in which ranks may differ.
MAY_DIFFER = ("device", "settled", "clock", "retune", "cache", SESSION_STATE)


class Search:
    """Decides what the ranks of a group launch next.

    orders: those that reached the ranks, without the order of an exchange that fails.
    """

    def __init__(self, rules: Rules, orders: Orders) -> None:
        self.rules, self.orders = rules, orders
        self.state = SearchState(rules)
        self.last_run: AgreedRun | None = None  # what all ranks said of it
        self._sources = Sources()

    def decide(self, kind: type[Message], reports: Reports) -> bytes:
        """Return the order that follows from the reports of all ranks, which are messages of one kind.

        A TuningError becomes an order by which all ranks raise it.
        """
        try:
            order = self._decide(kind, reports)
        except TuningError as error:
            state = self.state
            dropped = tuple(name for name, each in state.contexts.items() if not state.results.stays(each))
            order = Order(failure=(type(error).__name__, str(error)), dropped=dropped)
        return order.encode()

    def _decide(self, kind: type[Message], reports: Reports) -> Order:
        if kind is Opening:
            return self._open(read_reports(reports, Opening, may_differ=MAY_DIFFER))
        if kind is RunReport:
            return self._step(read_reports(reports, RunReport, sources=self._sources))
        if kind is InPlaceReport:  # the lowest rank that has found something is right
            found = [each.found for each in read_reports(reports, InPlaceReport).values()]
            return Order(found=next(filter(None, found), ""))
        read_reports(reports, kind)  # all ranks have come
        return Order()

    def drop(self) -> None:
        """Drop searches under way, as all ranks do with their records."""
        self.state.drop(self.orders.contexts)

    @property
    def point(self) -> str:
        """Return where the session stands; after a failed exchange it may be ahead of the ranks."""
        return f"{self.orders.session} {self.state.runs}"

    # -- a session -----------------------------------------------------------------------------------------

    def _open(self, reports: Mapping[int, Opening]) -> Order:
        remarks = []
        points = set(values_of(reports, SESSION_STATE))
        if points != {""}:
            resumes = points == {self.point}
            return Order(opening=OpeningOrder(resumes=resumes, drops=not resumes))
        retunes = str(True) in values_of(reports, "retune")
        if differ := len(values_of(reports, "settled")) > 1:
            remarks.append("ranks hold different earlier results: dropped on all ranks")
        if resets := differ or retunes:
            self.state = SearchState(self.rules)
        devices = values_of(reports, "device")
        if len(devices) > 1:
            remarks.append(f"ranks run on different devices ({', '.join(devices)}): no disk entries are used")
        self.state.open()
        crashes = crashes_of(reports)
        opening = OpeningOrder(
            session=uuid.uuid4().hex[:12],
            retunes=retunes,
            resets=resets,
            same_device=len(devices) == 1,
            shares_clock=len(values_of(reports, "clock")) == 1,
            stores=values_of(reports, "cache"),
            offers=offered(reports),
            crashes=crashes,
            crash_bans=bans_for_crashes(crashes),
            remarks=tuple(remarks),
        )
        contexts = self._changes(self.state.contexts.values(), resets=resets)
        order = Order(opening=opening, run=self._run_order(AgreedRun()), contexts=contexts)
        self.state.keep_settled()
        return order

    # -- a run ---------------------------------------------------------------------------------------------

    def _step(self, reports: Mapping[int, RunReport]) -> Order:
        state = self.state
        aliases = dict(state.kernels.aliases)
        names = state.kernels.unite(announced_in(reports), state.known)
        self.last_run = run = agreed_run(reports, names, state.known)
        outcomes = state.step(run)
        bans = [
            (name, context.digests.index(digest))
            for name, part in run.parts.items()
            if (context := state.contexts.get(name)) is not None
            for digest in part.bans
            if digest in context.digests
        ]
        verified = () if state.verify_bits is None else state.verify_bits.new_bans
        bans += [(context.name, index) for context, index in verified]
        remark, state.made.remark = state.made.remark, ""
        order = self._run_order(
            run,
            outcomes=outcomes,
            bans=tuple(bans),
            results=tuple(context.name for context in state.results.newly_final(state.changed)),
            names=names,
            unknown=tuple(name for name in run.parts if name not in state.known),
            aliases=None if state.kernels.aliases == aliases else dict(state.kernels.aliases),
            remark=remark,
        )
        return Order(run=order, contexts=self._changes(state.changed))

    def _run_order(self, run: AgreedRun, **values: object) -> RunOrder:
        state, rules = self.state, self.rules
        is_cut_short = state.closing and rules.tunes and rules.mode == "replay"
        return RunOrder(
            runs=state.runs,
            next_run=PlannedRun(
                judged=state.judged_run,
                tries=state.tries,
                follows_fit=state.phase.follows_fit,
                compares_outputs=state.compares_outputs,
                compiles=not state.pace.pauses,
                apart=state.apart,
            ),
            counts=state.made.is_sample,
            is_pending=run.run.is_pending,
            done=state.done,
            retunes=run.retunes,
            has_work=state.has_work,
            wants_another=is_cut_short and any(c.status == "partial" for c in state.contexts.values()),
            forecast=state.forecast,
            cost=state.pace.cost,
            gain=state.steps.gain,
            host=run.host,
            **values,  # type: ignore[arg-type]
        )

    def _changes(self, contexts: Iterable[Context], *, resets: bool = False) -> dict[str, ContextChanges]:
        known = {} if resets else self.orders.contexts
        found = {each.name: self._changes_of(each, known.get(each.name)) for each in contexts}
        nothing = ContextChanges()
        return {name: changes for name, changes in found.items() if changes != nothing}

    def _changes_of(self, context: Context, known: ContextOrder | None) -> ContextChanges:
        """Return the difference of a context from the record that all ranks have; None: they have none."""
        search, spent, tried = context.search, context.is_spent, context.tried
        best = -1 if spent else context.best_so_far
        next_launch = NextLaunch(
            planned=best if spent or tried is None else tried,
            trial=-1 if context.trial is None else context.trial,
            is_on_trial=context.is_on_trial,
            waiting=context.waiting,
            later=-1 if spent else context.later_candidate(best),
            judge=context.judge,
            outside_race=search.outside_indices,
        )
        result = SearchResult(
            status=context.status,
            incumbent=best,
            winner=-1 if context.winner is None else context.winner,
            is_final=self.state.results.is_final(context),
            is_lasting=context.is_lasting,
            is_undecided=self.state.results.is_undecided(context),
            is_left_out=context.is_left_out,
            ranks=context.ranks,
            again=search.again,
            untried=search.untried,
            not_fastest=search.not_fastest,
            same_bits=context.same_bits,
        )
        before = ContextOrder(context.name, context.definition) if known is None else known
        changes = before.changes_to(context, next_launch, result)
        return replace(changes, definition=context.definition) if known is None else changes
