"""A tuned function on one group of ranks: its setup, and the state that outlives its sessions."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import types
import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
import torch.distributed as dist
import triton
from msgspec.structs import replace

from ..launch.dispatcher import Dispatcher
from ..launch.fast_path import INCUMBENTS
from ..launch.kernel_names import KernelNames
from ..launch.registry import Registry
from ..launch.results import Results
from ..launch.written_tensors import WrittenTensors
from ..options import DEFAULT_N_REPEAT, DEFAULT_N_WARMUP, Options
from ..ranks.exchange import ExchangeWait
from ..ranks.group import GROUPS, RankGroup
from ..ranks.questions import CallCount
from ..ranks.watchdog import Watch
from ..search import strategies
from ..search.messages import Message, Opening
from ..search.orders import ContextOrder, Order, Orders
from ..search.reports import Reports
from ..search.rules import Rules
from ..search.search import SESSION_STATE, Search
from ..storage.crash_guard import CrashGuard
from ..storage.known_results import KnownResults
from ..storage.scope import FunctionScope
from ..storage.winners import Winners
from ..timing.clock import Clock, default_clock
from ..timing.synchronized_start import clock_name
from ..timing.time_spent import TimeSpent
from ..triton_api import identity, interception
from ..triton_api.turn import ProcessTurn, one_at_a_time, session_turn
from ..version import __version__

_DEFAULT: Any = dist.GroupMember if dist.is_available() else types.SimpleNamespace(WORLD=None)
LIMITS = ("watch", "max_runs", "budget_s", "overhead")  # options that no sample depends on


class FunctionSetup(FunctionScope):
    """The setup of a tuned function on which its results depend: the same in all calls."""

    def __init__(
        self, options: Options, name: str, source_digest: str, group: RankGroup, *, mode: str
    ) -> None:
        super().__init__(options, name, source_digest, group, mode=mode)
        self.timeout_s = options.timeout_s
        interpreted = interception.is_interpreted()
        self.clock: Clock = options.clock or default_clock(self.timeout_s, interpreted=interpreted)

    @property
    def checks_in_place(self) -> bool:
        """Whether work in place is looked for: where the number of runs is left to the search, or repeats."""
        options = self.options
        is_free = options.n_warmup is options.n_repeat is options.max_runs is None
        return self.tunes and (self.repeats_first_plan or is_free)

    @property
    def repeats_first_plan(self) -> bool:
        """Whether the search itself makes two runs with the first plan; else the first one is made again."""
        options, runs = self.options, 0
        for given, default in ((options.n_warmup, DEFAULT_N_WARMUP), (options.n_repeat, DEFAULT_N_REPEAT)):
            runs += default if given is None else given
        return options.search_name == "exhaustive" and runs > 1

    def crash_guard(self, disk: Winners) -> CrashGuard:
        """Return the crash guard, named after all that a crash may depend on, without kernels and keys."""
        options = self.options
        facts = {
            "function": self.name,
            "source": self.source_digest,
            "scope": self.scope,
            "strategy": identity.function_digest(options.search) if callable(options.search) else "",
            "device": self.device.text,
            "clock": type(self.clock).__name__,
            "ranks": str(self.group.ranks),
            **versions(),
            **{name: value for name, value in options.agreed_fields().items() if name not in LIMITS},
        }
        return CrashGuard(disk if self.tunes else Winners(None), facts, self.name, self.group.rank)


class FunctionState:
    """The state of a tuned function between and in its sessions.

    `orders` is the same on all ranks, `search` is on the deciding rank alone; `registry` and `dispatcher` are
    this rank's.

    note: writes a line of the log. watch: says how a settled call is watched.
    """

    def __init__(
        self,
        function: FunctionSetup,
        note: Callable[[str], None],
        watch: Callable[[FunctionState], Watch],
    ) -> None:
        disk = Winners(function.options.cache_path, tunes=function.tunes)
        self.function, self._note = function, note
        self.orders = Orders(self._rules())
        is_deciding = function.group.rank == function.group.ranks[0]
        self.search = Search(self.orders.rules, self.orders) if is_deciding else None
        self.known = KnownResults(function, disk, self.orders)
        self.results = Results(self.known)
        self.guard = function.crash_guard(disk)
        self.written = WrittenTensors()  # by the launches of the call under way
        self.time_spent = TimeSpent()  # of the session under way
        self.has_refused = False  # a settled call: the peers know
        self._watch = watch
        self._call_count: CallCount | None = None
        self._reset()

    def _rules(self) -> Rules:
        options = self.function.options
        strategy = options.search if callable(options.search) else strategies.STRATEGIES[options.search_name]
        return Rules(strategy=strategy, tunes=self.function.tunes, **options.rules())

    def _reset(self) -> None:
        """Start without any context."""
        function = self.function
        self.known.orders = self.orders = Orders(self.orders.rules)
        if self.search is not None:
            self.search.orders = self.orders
        names, rank = KernelNames(self.orders.aliases), function.group.rank
        self.registry = Registry(names, function.clock, rank, self.known)
        self.dispatcher = Dispatcher(
            self.registry, function.clock, self.guard, self.compiling, self._note, self.written
        )

    @property
    def call_count(self) -> CallCount | None:
        """The number of settled calls since the last session; None: nobody asks about them."""
        count, session = self._call_count, self.orders.session
        if count is not None and count.session == session:
            return count
        function = self.function
        if function.is_alone or not (function.tunes and function.options.watch and session):
            return None
        self._call_count = function.group.call_count(session, self._watch(self))
        return self._call_count

    def exchange(self, message: Message, wait: ExchangeWait) -> tuple[bytes, bytes, float]:
        """Exchange a message for the order; return the sent bytes, the received bytes, and the seconds."""
        sent, began = message.encode(), time.perf_counter()

        def decide(reports: Reports) -> bytes:
            assert self.search is not None
            return self.search.decide(type(message), reports)

        received = self.function.group.exchange(sent, decide, wait)
        seconds = time.perf_counter() - began
        self.time_spent.add("exchanges_s", seconds)
        return sent, received, seconds

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Compile or load in the block: peers go on waiting, and the time is counted."""
        with self.function.group.busy(), self.time_spent.adding("compiling_s"):
            yield

    def opening(self, state: str = "") -> Opening:
        """Return this rank's message when a session opens, or goes on from `state` after a failed run."""
        function = self.function
        facts = {
            SESSION_STATE: state,
            "the source of the tuned function": function.source_digest,
            "the version of dist_autotune": __version__,
            "the version of Triton": triton.__version__,
            "retune": str(self.known.ignores_known),
            "DIST_AUTOTUNE_MODE": function.mode,
            "device": function.device.text,
            "clock": clock_name(),
            "cache": self.known.store,
            "settled": self.orders.digest_text,
            **{f"the option {name}": value for name, value in function.options.agreed_fields().items()},
        }
        return Opening(facts)

    def opening_with_results(self) -> Opening:
        """Return this rank's message when a session opens, with the results on its disk."""
        offers, crashes = self.known.offered_at_opening(), self.guard.recover().crashes
        return replace(self.opening(), offers=offers, crashes={} if self.known.ignores_known else crashes)

    def open(self, order: Order) -> list[str]:
        """Begin the session that the order opens; return remarks for its log."""
        opening = order.opening
        assert opening is not None
        self.known.ignores_known = opening.retunes
        if opening.resets:
            self._reset()
        is_first = opening.stores.get(self.known.store) == self.function.group.rank
        self.known.open(opening.offers, same_device=opening.same_device, stores=is_first)
        self.orders.apply(order)
        self.orders.crash_bans = opening.crash_bans
        self.guard.begin_session(opening.session, opening.crashes)
        self.registry.open()
        self.dispatcher.report_all()
        remarks, options = [*opening.remarks], self.function.options
        if options.overhead is not None and options.mode == "replay":
            remarks.append(
                f"overhead={options.overhead} does not limit replay, which makes all its runs in one call: "
                "budget_s= and max_runs= do"
            )
        return remarks

    def drop_searches(self, named: Container[str] = ()) -> None:
        """Forget the searches under way and the contexts that an order names, on all ranks alike."""
        dropped = self.orders.drop(named)
        if self.search is not None:
            self.search.drop()
        self.registry.drop_unshared(dropped)

    def publish(self, seconds: float) -> list[ContextOrder]:
        """Write every new result to `Autotuner.cache` and, when final, to disk; return the new contexts."""
        new = [self.orders.contexts[name] for name in self.orders.run.results]
        known = self.registry.by_name
        here = [*self.registry.active(), *(known[each.name] for each in new if each.name in known)]
        for rank_context in dict.fromkeys(here):
            if (context := rank_context.order) is None:
                continue
            # What is not new may have settled before it was launched here.
            if context in new or (not rank_context.is_published and context.result.is_final):
                self.results.publish(context, rank_context, seconds)
        return new


class FunctionRanks:
    """The ranks that make a function's calls: the default process group may be another one in each."""

    def __init__(self, options: Options, name: str) -> None:
        self._options, self._name, self._is_given = options, name, options.group is not None
        self._world: Callable[[], Any] = lambda: None  # of the last call the default group, and the process
        self._pid = -1
        self._asking: dict[str, object] = {}  # the thread that takes the turn with other ranks

    def group(self) -> RankGroup:
        """Return the ranks that make a call now."""
        options = self._options
        return GROUPS.of(options.process_group()) if options.is_dist else GROUPS.single()

    def are_current(self, group: RankGroup) -> bool:
        """Return whether these ranks make a call now, as a rule without looking for them."""
        world = _DEFAULT.WORLD
        if self._is_given or world is not self._world() or os.getpid() != self._pid:
            if group.shared is not self.group():
                return False
            self._world = (lambda: None) if world is None else weakref.ref(world, self._forget)
            self._pid = os.getpid()
        return True

    def _forget(self, ended: Any) -> None:
        if self._world is ended:
            self._world = object  # a new one at each call: an ended group's None would stand for no group

    def new_state(
        self,
        function: Callable[..., Any] | None,
        mode: str,
        note: Callable[[str], None],
        watch: Callable[[FunctionState], Watch],
    ) -> FunctionState:
        """Return a new state of the function, on the ranks that make a call now.

        function: see `Calls`. note, watch: see `FunctionState`.
        """
        group = self.group().of_function(self, self._name)
        try:
            source = "" if function is None else identity.function_digest(function)
            setup = FunctionSetup(self._options, self._name, source, group, mode=mode)
            return FunctionState(setup, note, watch)
        except BaseException as error:  # see [Note: ranks leave together]
            group.fail(error)
            raise

    @contextlib.contextmanager
    def turn(
        self,
        group: RankGroup,
        take: Callable[[RankGroup, ProcessTurn], bool],
        goes_on: Callable[[], bool],
        is_open: Callable[[], bool],
    ) -> Iterator[bool]:
        """Take the turn of sessions on all ranks, for one thread that calls the function at a time.

        take: takes it on all. goes_on: whether this process alone is to take it; what that depends on changes
        only in its turns. is_open: whether a session is that another thread may have opened meanwhile.
        """
        if goes_on():
            with session_turn(INCUMBENTS) as is_own:
                if not is_own or goes_on():
                    yield is_own
                    return
        with one_at_a_time(self._asking) as has_waited:
            if has_waited is None:
                yield False
                return
            # Where another thread has opened the session, peers may not be asking.
            own = group.of_function(self, self._name)
            alone = own.turns is None or (has_waited and is_open())
            with session_turn(INCUMBENTS, None if alone else functools.partial(take, own)) as is_own:
                yield is_own


def versions() -> dict[str, str]:
    return {"dist_autotune": __version__, "triton": triton.__version__, "torch": str(torch.__version__)}
