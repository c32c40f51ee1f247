"""The orders of the deciding rank to all ranks, one per exchange, and records of contexts.

The search itself is on the deciding rank alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Final, TypeAlias

from msgspec import Struct, msgpack

from ..codec import digest
from .budget import Forecast
from .expectation.fields import TimesByKey
from .messages import Ban, Crash, CrashBans, HostTimes, Offers
from .phases.pace import Cost
from .phases.step_gain import StepGain
from .rules import BY_LAUNCH, Rules
from .shared_context import AgreedTimes, ContextDefinition, Outcome, SharedContext, Status

TOLD_KEYS = 64  # results of a kernel, the latest, that tell what to expect of a new key


class NextLaunch(Struct, frozen=True, array_like=True, gc=False):
    """The launches of a context in the next run, and the report on them."""

    planned: int = -1  # the candidate that every rank launches; -1: nothing works
    trial: int = -1  # the candidate whose time the search waits for
    is_on_trial: bool = False  # the next run is a trial of the context
    later: int = -1  # launches after the first one, where that tries a slow candidate; -1: as planned
    waiting: bool = False  # online: the trial has run, some rank's sample is not read yet
    judge: str = BY_LAUNCH  # of its candidates now
    outside_race: tuple[int, ...] = ()  # candidates that are not to be compiled now


class SearchResult(Struct, frozen=True, array_like=True, gc=False):
    """How far the search of a context is, and its result."""

    status: Status = Status.UNDER_WAY
    incumbent: int = -1  # launched where no candidate is on trial; -1: nothing works
    winner: int = -1
    is_final: bool = False  # no whole run is still to judge the result
    is_lasting: bool = False  # the next call takes the result as it is
    is_undecided: bool = False  # settled, and still compared
    is_left_out: bool = False  # the best plan does not launch it, and so it may starve
    ranks: int = 0  # that have launched it in one run, at least
    again: str = ""  # which candidates are raced after an upgrade
    untried: str = ""  # why candidates were not tried
    not_fastest: str = ""  # why the winner is not the fastest of those timed
    same_bits: bool | None = None  # the winner's outputs equal the first config's


# A candidate's agreed ms, that of its warm-up, the fastest rank's, and how much of it may be a host's.
TimesRow: TypeAlias = tuple[float | None, float | None, float | None, float | None]


class ContextChanges(Struct, frozen=True, omit_defaults=True):
    """The difference of a context from the record that all ranks have."""

    definition: ContextDefinition | None = None  # of a new context
    next_launch: NextLaunch | None = None
    result: SearchResult | None = None
    banned: dict[int, Ban] = {}
    times: dict[int, TimesRow] = {}
    launch_ms: dict[int, float] | None = None


class ContextOrder(SharedContext):
    """The record of a context that every rank has, for its launches, reports and results."""

    def __init__(self, name: str, definition: ContextDefinition) -> None:
        super().__init__(name, definition)
        self.next_launch, self.result = NextLaunch(), SearchResult()

    @property
    def planned(self) -> int:
        """Return the candidate that every rank launches in the next run; raises NoValidConfig."""
        return self.incumbent if self.next_launch.planned < 0 else self.next_launch.planned

    @property
    def is_left(self) -> bool:
        """Return whether a later session takes it up."""
        return self.provisional and not self.result.is_left_out

    @property
    def is_on_trial(self) -> bool:
        return self.next_launch.is_on_trial

    @property
    def judge(self) -> str:  # type: ignore[override]
        return self.next_launch.judge

    @property
    def status(self) -> Status:  # type: ignore[override]
        return self.result.status

    @property
    def incumbent(self) -> int:
        """Return the candidate that is launched where none is on trial; raises NoValidConfig."""
        if self.result.incumbent < 0:
            raise self.nothing_works()
        return self.result.incumbent

    @property
    def winner(self) -> str | None:
        """Return the digest of the final result; None: there is none yet."""
        has_result = self.result.winner >= 0 and self.settled and not self.provisional
        return self.digests[self.incumbent] if has_result else None

    @property
    def outside_race(self) -> set[str]:
        """Return the digests of the candidates that are not to be compiled now."""
        return {self.digests[index] for index in self.next_launch.outside_race}

    @property
    def stays(self) -> bool:
        """Return whether it outlives a session that is dropped."""
        return self.settled and not (self.result.is_undecided or self.is_spent)

    @property
    def mark(self) -> int:
        """Return a number for the result; 0: there is none."""
        result = self.result
        return int(digest(f"{self.name} {result.status} {result.incumbent}"), 16) if self.settled else 0

    def apply(self, changes: ContextChanges) -> None:
        """Take over how the context has changed."""
        self.next_launch = changes.next_launch or self.next_launch
        self.result = changes.result or self.result
        self.banned.update(changes.banned)
        for index, row in changes.times.items():
            for times, ms in zip(_columns(self.times), row, strict=True):
                if ms is None:
                    times.pop(index, None)
                else:
                    times[index] = ms
        if changes.launch_ms is not None:
            self.launch_ms = changes.launch_ms

    def changes_to(
        self, context: SharedContext, next_launch: NextLaunch, result: SearchResult
    ) -> ContextChanges:
        """Return how the deciding rank's context differs from this record."""
        launch_ms = dict(context.launch_ms)
        return ContextChanges(
            next_launch=None if next_launch == self.next_launch else next_launch,
            result=None if result == self.result else result,
            banned={index: context.banned[index] for index in context.banned.keys() - self.banned.keys()},
            times=_changed_rows(context.times, self.times),
            launch_ms=None if launch_ms == self.launch_ms else launch_ms,
        )


def _columns(times: AgreedTimes) -> tuple[dict[int, float], ...]:
    return times.ms, times.warmup_ms, times.fastest_ms, times.gap_ms


def _changed_rows(times: AgreedTimes, before: AgreedTimes) -> dict[int, TimesRow]:
    """Return the rows of `times` that differ."""
    columns = [*zip(_columns(times), _columns(before), strict=True)]
    differing = (now.items() ^ then.items() for now, then in columns if now != then)
    changed = {index for items in differing for index, _ in items}
    return {index: _row([now.get(index) for now, _ in columns]) for index in changed}


def _row(ms: list[float | None]) -> TimesRow:
    return tuple(None if each is None else float(each) for each in ms)  # type: ignore[return-value]


class OpeningOrder(Struct, frozen=True, omit_defaults=True):
    """How a session opens, or goes on after a failed run."""

    session: str = ""
    resumes: bool = False  # the session that a failed run has left goes on
    drops: bool = False  # some ranks would have resumed one that others have not: all drop it, and open anew
    retunes: bool = False  # results in memory and on disk do not count
    resets: bool = False  # no context is kept
    same_device: bool = True
    shares_clock: bool = False  # all ranks read one monotonic clock
    stores: dict[str, int] = {}  # cache -> the lowest rank that has it, and writes for all
    offers: Offers = {}
    crashes: dict[str, Crash] = {}
    crash_bans: CrashBans = {}
    remarks: tuple[str, ...] = ()


class PlannedRun(Struct, frozen=True, omit_defaults=True):
    """The purpose of the next run as a whole."""

    judged: str | None = None  # what its time is a sample of; None: it is not timed
    tries: bool = False  # something that it launches may be timed
    follows_fit: bool = False  # choosing it took the host long: ranks come late to it
    compares_outputs: bool = False
    compiles: bool = True  # beside it; False: compilers pause
    apart: int = 0  # so many runs without a trial come before the next exchange


class RunOrder(Struct, frozen=True, omit_defaults=True):
    """The order after a run."""

    runs: int = 0  # so far
    next_run: PlannedRun = PlannedRun()
    counts: bool = False  # the time of the run as a whole was a sample
    is_pending: bool = False  # online: a rank has not read that time yet
    done: bool = False
    retunes: bool = False  # all ranks tune anew from the next call on
    has_work: bool = True
    wants_another: bool = False  # the session is cut short: the next call opens one
    remark: str = ""
    outcomes: dict[str, Outcome] = {}
    bans: tuple[tuple[str, int], ...] = ()  # of this run: context, candidate
    results: tuple[str, ...] = ()  # contexts whose result is final and new
    names: dict[str, str] = {}  # new names of contexts
    unknown: tuple[str, ...] = ()  # reported contexts that the search does not know: announce them anew
    aliases: dict[str, str] | None = None  # of kernels; None: as before
    forecast: Forecast | None = None
    cost: Cost = Cost()
    gain: StepGain | None = None
    host: HostTimes = HostTimes()


class Order(Struct, frozen=True, omit_defaults=True):
    """The deciding rank's order to all ranks at the end of an exchange."""

    failure: tuple[str, str] | None = None  # the error that all ranks raise: class, message
    dropped: tuple[str, ...] = ()  # contexts that are dropped with it, beside those of searches under way
    found: str = ""  # in place, by the lowest rank that has found something
    opening: OpeningOrder | None = None
    run: RunOrder | None = None
    contexts: dict[str, ContextChanges] = {}  # those that have changed, by name

    def encode(self) -> bytes:
        return msgpack.encode(self)


read_order: Final = msgpack.Decoder(Order).decode


class Orders:
    """This rank's knowledge of the search of one function. Any thread may read."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.contexts: dict[str, ContextOrder] = {}
        # A run costs what it touches, however many contexts there are:
        self._unsettled: dict[str, ContextOrder] = {}
        self._told: dict[str, dict[str, ContextOrder]] = {}  # by kernel: the latest results, by context
        self._digest = 0  # of all results
        self.aliases: dict[str, str] = {}  # ids of kernels that go by another id
        self.run = RunOrder(next_run=PlannedRun(tries=rules.tunes))
        self.session = ""  # the last one that used this state
        self.crash_bans: CrashBans = {}

    @property
    def runs(self) -> int:
        return self.run.runs

    @property
    def verifies(self) -> bool:
        """Return whether outputs are compared."""
        return self.rules.bits != "any" and self.rules.tunes

    @property
    def unsettled(self) -> Iterator[ContextOrder]:
        return iter(tuple(self._unsettled.values()))

    @property
    def forecast(self) -> Forecast:
        """Return how far the session has come. Any thread may ask."""
        return self.run.forecast or Forecast(0, 0, 0, self.runs)

    def apply(self, order: Order) -> None:
        """Take over an order: its changes of contexts, and the next run."""
        for name, changes in order.contexts.items():
            if changes.definition is not None:
                self._forget(name)
                context = ContextOrder(name, changes.definition)
            else:
                context = self.contexts[name]
            self._digest ^= context.mark
            context.apply(changes)
            self._digest ^= context.mark
            self.contexts[name] = context  # a new one not before: other threads read it
            self._sort_in(context)
        if order.run is not None:
            self.run = order.run
            if order.run.aliases is not None:
                self.aliases.update(order.run.aliases)
            for name in order.run.unknown:
                self._forget(name)

    def _sort_in(self, context: ContextOrder) -> None:
        name = context.name
        if context.settled:
            self._unsettled.pop(name, None)
        else:
            self._unsettled[name] = context
        told = self._told.setdefault(context.definition.kernel_id, {})
        told.pop(name, None)
        if context.settled or context.launch_ms:
            told[name] = context
            if len(told) > TOLD_KEYS:
                del told[next(iter(told))]

    def _forget(self, name: str) -> None:
        if (context := self.contexts.pop(name, None)) is not None:
            self._digest ^= context.mark
            self._unsettled.pop(name, None)
            self._told.get(context.definition.kernel_id, {}).pop(name, None)

    def drop(self, named: Container[str]) -> set[str]:
        """Drop searches under way, contexts without a working candidate, named ones; return their names."""
        dropped = {name for name, context in self.contexts.items() if name in named or not context.stays}
        for name in dropped:
            self._forget(name)
        return dropped

    @property
    def digest_text(self) -> str:
        """Return a text for the settled results, to compare between ranks."""
        return f"{self._digest:016x}"

    def tuned_keys(self, kernel_id: str) -> dict[str, str]:
        """Return the tuned keys of a kernel, each with the digest of its winner."""
        return {
            context.key: context.digests[context.incumbent]
            for context in self._of_kernel(kernel_id)
            if context.result.is_final and not (context.provisional or context.is_spent)
        }

    def times_by_key(self, kernel_id: str) -> TimesByKey:
        """Return the times of a kernel's launches, by key and config, of searches that are over."""
        return {
            context.key: context.ms_by_text()
            for context in self._of_kernel(self.aliases.get(kernel_id, kernel_id))
            if context.launch_ms
        }

    def _of_kernel(self, kernel_id: str) -> Iterator[ContextOrder]:
        for own, told in tuple(self._told.items()):
            if self.aliases.get(own, own) == kernel_id:
                yield from tuple(told.values())
