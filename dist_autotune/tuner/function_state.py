"""A tuned function on one group of ranks: its setup, and the state that outlives its sessions."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
import triton
from msgspec.structs import replace

from ..codec import digest
from ..launch.dispatcher import Dispatcher
from ..launch.kernel_names import KernelNames
from ..launch.registry import Registry
from ..launch.results import Results
from ..launch.written_tensors import WrittenTensors
from ..options import Options
from ..ranks.group import RankGroup
from ..ranks.questions import CallCount
from ..ranks.watchdog import Watch
from ..search import strategies
from ..search.context import Context
from ..search.messages import Facts, Message, Opening, RunReport, bans_for_crashes, checked
from ..search.rules import Rules
from ..search.state import SearchState
from ..storage.crash_guard import CrashGuard
from ..storage.known_results import KnownResults
from ..storage.scope import FunctionScope
from ..storage.winners import Winners
from ..timing.clock import Clock, default_clock
from ..timing.synchronized_start import clock_name
from ..timing.time_spent import TimeSpent
from ..triton_api import identity, interception
from ..version import __version__

SESSION_STATE = "the state of the session"  # the fact that names the session which a rank would go on with
# Facts of an opening in which ranks may differ.
MAY_DIFFER = ("device", "settled", "clock", "retune", "session", "cache", SESSION_STATE)
SOURCE_OF = "the source of kernel "  # and its name: a fact that runs report
WAITS_AFTER_RUNS = 16  # without a launch: fewer are those of gradients that are accumulated, and the like
LIMITS = ("watch", "max_runs", "budget_s")  # options that no sample depends on


class FunctionSetup(FunctionScope):
    """What its results depend on: the same in all calls."""

    def __init__(
        self, options: Options, name: str, source_digest: str, group: RankGroup, *, mode: str
    ) -> None:
        super().__init__(options, name, source_digest, group, mode=mode)
        self.timeout_s = options.resolved_timeout_s()
        interpreted = interception.is_interpreted()
        self.clock: Clock = options.clock or default_clock(self.timeout_s, interpreted=interpreted)

    def facts(self, values: dict[str, str]) -> Facts:
        """Return facts as this rank reports them; each exchange holds the name of the function."""
        values = {"the tuned function": self.name, **values}
        return {name: {value: self.group.rank} for name, value in values.items()}

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

    `search` is the same on all ranks; `registry` and `dispatcher` are this rank's.

    note: writes a line of the log.
    """

    def __init__(self, function: FunctionSetup, note: Callable[[str], None]) -> None:
        disk = Winners(function.options.resolved_cache_dir(), tunes=function.tunes)
        self.function, self._note = function, note
        self.known = KnownResults(function, disk, self._new_search())
        self.results = Results(self.known)
        self.guard = function.crash_guard(disk)
        self.written = WrittenTensors()  # by the launches of the call under way
        self.time_spent = TimeSpent()  # of the session under way
        self.has_refused = False  # a settled call: the peers know
        self.watches: Callable[[], Watch] | None = None  # settled calls; None: nobody asks about them
        self._call_count: CallCount | None = None
        self._sources: Facts = {}  # of kernels, as all ranks have reported them
        self._reset()

    def _new_search(self) -> SearchState:
        options = self.function.options
        strategy = options.search if callable(options.search) else strategies.STRATEGIES[options.search_name]
        return SearchState(Rules(strategy=strategy, tunes=self.function.tunes, **options.rules()))

    def _reset(self) -> None:
        """Start without any context."""
        function = self.function
        self.known.search = self.search = self._new_search()
        names, rank = KernelNames(self.search.kernels.aliases), function.group.rank
        self.registry = Registry(names, function.clock, rank, self.known)
        self.dispatcher = Dispatcher(
            self.registry, function.clock, self.guard, self.compiling, self._note, self.written
        )

    @property
    def call_count(self) -> CallCount | None:
        """The number of settled calls since the last session; None: nobody asks about them."""
        count, session = self._call_count, self.search.session
        if count is not None and count.session == session:
            return count
        if self.watches is None or not session:
            return None
        self._call_count = self.function.group.call_count(session, self.watches())
        return self._call_count

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
            "settled": digest(self.search.digest_text()),
            **{f"the option {name}": value for name, value in function.options.agreed_fields().items()},
        }
        return Opening(function.group.rank, function.facts(facts))

    def opening_with_results(self) -> Opening:
        """Return this rank's message when a session opens, with the results on its disk."""
        opening = replace(self.opening(), offers=self.known.offered_at_opening())
        left = self.guard.recover()
        if self.known.ignores_known:
            return opening
        return replace(opening, crashes=left.crashes)

    def open(self, session: str, merged: Opening) -> list[str]:
        """Begin the session that all ranks have agreed on; return remarks for its log."""
        remarks, facts = [], merged.facts
        self.known.ignores_known = str(True) in facts["retune"]  # on some rank: then on all
        differ = len(facts["settled"]) > 1
        if differ:
            remarks.append("ranks hold different earlier results: dropped on all ranks")
        if differ or self.known.ignores_known:
            self._reset()
        devices = facts["device"]
        if len(devices) > 1:
            remarks.append(f"ranks run on different devices ({', '.join(devices)}): no disk entries are used")
        is_first = facts["cache"][self.known.store] == self.function.group.rank
        self.known.open(merged.offers, same_device=len(devices) == 1, stores=is_first)
        self.search.open()
        self.search.crash_bans = bans_for_crashes(merged)
        self.guard.begin_session(session, merged.crashes)
        self.registry.open()
        return remarks

    def check_run(self, merged: Message) -> RunReport:
        """Return the merged report and keep its offers; raises RankMismatch where ranks differ.

        A kernel's name may stand for several source texts (functions made by functions), of which ranks may
        launch different ones: they differ only where they have none in common.
        """
        facts = {}
        for name, values in merged.facts.items():
            if name.startswith(SOURCE_OF):
                values = self._sources[name] = {**values, **self._sources.get(name, {})}
                texts = [set(value.split()) for value in values]
                if all(one & other for one, other in itertools.combinations(texts, 2)):
                    continue
            facts[name] = values
        report = checked(merged, RunReport, facts)
        self.known.add_offers(report.offers)
        return report

    def drop_searches(self) -> None:
        """Forget the searches under way, on all ranks alike."""
        self.registry.drop_unshared(self.search.drop_unsettled())

    def publish(self, seconds: float) -> list[Context]:
        """Write every new result to `Autotuner.cache` and, when final, to disk; return the new contexts."""
        new = self.search.newly_final()
        for rank_context in self.registry.by_name.values():
            if (context := rank_context.search) is None:
                continue
            # What is not new may have settled before it was launched here.
            if context in new or (not rank_context.is_published and self.search.is_final(context)):
                self.results.publish(context, rank_context, seconds)
        return new


def check_opening(merged: Message) -> Opening:
    """Return the merged opening; raises RankMismatch where ranks differ."""
    facts = {name: values for name, values in merged.facts.items() if name not in MAY_DIFFER}
    return checked(merged, Opening, facts)


def versions() -> dict[str, str]:
    return {"dist_autotune": __version__, "triton": triton.__version__, "torch": str(torch.__version__)}
