"""What one tuned function knows on one group of ranks: searches, launches, results in memory and on disk.

A domain outlives its sessions: a later one takes up what an earlier one left unfinished.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import triton
from triton.runtime.autotuner import Autotuner

from ..codec import digest
from ..launch.dispatch import Dispatcher, NewCandidates
from ..launch.kernel_ids import KernelNames
from ..launch.rank_contexts import Claim, RankContext, RankContexts
from ..launch.registry import Registry
from ..options import Options
from ..ranks.group import RankGroup, SingleRank
from ..search import strategies
from ..search.context_search import Context
from ..search.messages import Message, Opening, RunReport, bans_for_crashes, checked
from ..search.rules import Rules
from ..search.state import SearchState
from ..storage.crash_guard import FOLDER, CrashGuard
from ..storage.device import Device
from ..storage.winners import Winners
from ..timing.clock import Clock, default_clock
from ..timing.synchronized_start import clock_name
from ..timing.time_spent import TimeSpent
from ..triton_api import identity, interception
from ..version import __version__
from .results import Offers, Results

LIMITS = ("watch", "max_runs", "budget_s")  # options that no sample depends on
UNDER_WAY = "under way"  # the fact that says what session a rank would go on with
MAY_DIFFER = ("device", "settled", "clock", "retune", "session", UNDER_WAY)  # facts of an opening
SOURCE_OF = "the source of kernel "  # and its name: a fact that ranks tell


class FunctionState:
    """The lasting state of one tuned function on one group of ranks."""

    def __init__(
        self, options: Options, name: str, function_digest: str, agreement: RankGroup, *, tunes: bool
    ) -> None:
        self.options = options
        self.name = name
        self.agreement = agreement
        # Many functions are called `step`, and all lambdas `<lambda>`: a name of the user's own is enough.
        self.scope = "" if options.share else options.name or f"{name}#{function_digest}"
        self.timeout_s = options.resolved_timeout_s()
        self.clock: Clock = options.clock or default_clock(
            self.timeout_s, interpreted=interception.is_interpreted()
        )
        self.disk = Winners(options.resolved_cache_dir())
        self.device = Device.current()
        self._results = Results(
            self.disk,
            agreement,
            self.device,
            f"{name}#{function_digest}",
            self.scope,
            options.agree,
            options.objective,
        )
        self.ledger = TimeSpent()  # of the session under way
        self.on_ban: Callable[[RankContext, str, str], None] = lambda local, candidate, reason: None
        self.shares_clock = False  # all ranks read one monotonic clock
        self.forgetful = False  # retune(): what memory and disk hold does not count
        self._function_digest = function_digest
        self._sources: dict[str, dict[str, int]] = {}  # as told: name -> texts -> lowest rank
        self.in_session = False
        self._looks_on_disk = False
        self._offers: Offers = {}  # disk entries that all ranks use
        self.guard = self._crash_guard(tunes=tunes)
        self.reset(tunes=tunes)

    def reset(self, *, tunes: bool) -> None:
        """Start without any context."""
        options = self.options
        strategy = options.search if callable(options.search) else strategies.STRATEGIES[options.search_name]
        self.tuning = SearchState(
            Rules(
                strategy=strategy,
                search=options.search_name,
                n_warmup=options.warmups,
                n_repeat=options.repeats,
                rank_reduce=options.rank_reduce,
                objective=options.objective,
                mode=options.mode,
                max_runs=options.max_runs,
                budget_s=options.budget_s,
                tunes=tunes,
            )
        )
        rank, names = self.agreement.rank, KernelNames(self.tuning.kernels.aliases)
        self.local_contexts = RankContexts(
            names, options.agree, rank, lambda local, candidate, reason: self.on_ban(local, candidate, reason)
        )
        admission = Registry(
            self.local_contexts,
            names,
            self.clock,
            options.statistic,
            rank,
            find_claim=self._find_claim,
            recall=self._recall,
        )
        guard = self.guard
        self.new_candidates = NewCandidates(
            self.local_contexts, lambda local, candidate: guard.launching(local.name, candidate, loads=True)
        )
        self.launches = Dispatcher(
            names,
            self.local_contexts,
            admission,
            self.new_candidates,
            self.clock,
            busy=self.compiling,
            trying=lambda local, candidate: guard.launching(local.name, candidate),
            passes_single=isinstance(self.agreement, SingleRank),
            is_frozen=not tunes,
        )

    def _recall(self, local: RankContext) -> dict[str, str]:
        """Join a context that is new on this rank to what the ranks share; return its bans, with reasons."""
        local.context = self.tuning.contexts.get(local.name)
        bans = {} if local.context is not None else self.tuning.crash_bans.get(local.name, {})
        known = {candidate for candidate, _ in local.order}
        return {candidate: reason for candidate, (_, reason) in bans.items() if candidate in known}

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Compile or load in the block: the peers wait on, and the time is accounted for."""
        with self.agreement.busy(), self.ledger.compiling():
            yield

    @property
    def point(self) -> dict[str, str]:
        """Return where in the program this rank is, to be told at every exchange."""
        return {"the tuned function": self.name}

    def _crash_guard(self, *, tunes: bool) -> CrashGuard:
        """Return the crash guard, named after all that a crash depends on, but for kernels and keys."""
        options, cache = self.options, self.disk.directory
        strategy = identity.function_digest(options.search) if callable(options.search) else ""
        facts = {
            "function": self.name,
            "source": self._function_digest,
            "scope": self.scope,
            "strategy": strategy,
            "device": self.device.text,
            "clock": type(self.clock).__name__,
            "ranks": str(self.agreement.ranks),
            "dist_autotune": __version__,
            "triton": triton.__version__,
            "torch": str(torch.__version__),
            **{name: value for name, value in options.agreed_fields().items() if name not in LIMITS},
        }
        return CrashGuard(
            cache / FOLDER if cache is not None and tunes else None,
            facts,
            self.name,
            self.agreement.rank,
            self.disk.guard_failed,
        )

    # -- opening a session ---------------------------------------------------------------------------------

    def opening(self) -> Opening:
        """Return what this rank says when a session opens."""
        opening = replace(self.going_on(""), offers=self._offered())
        crashes, bans = self.guard.take_over()
        return opening if self.forgetful else replace(opening, crashes=crashes, crash_bans=bans)

    def _offered(self) -> dict[str, tuple[int, str, float]]:
        if self.forgetful or isinstance(self.agreement, SingleRank):  # one rank looks entries up when needed
            return {}
        return self._results.launched_before()

    def going_on(self, state: str) -> Opening:
        """Return what this rank says to go on with a session that a failed run has left in `state`.

        "": it has none to go on with.
        """
        rank = self.agreement.rank
        facts = {
            UNDER_WAY: state,
            **self.point,
            "the source of the tuned function": self._function_digest,
            "the version of dist_autotune": __version__,
            "the version of Triton": triton.__version__,
            "retune": str(self.forgetful),
            "DIST_AUTOTUNE_MODE": "tune" if self.tuning.rules.tunes else "cached",
            "device": self.device.text,
            "clock": clock_name(),
            "settled": digest(self.tuning.contexts.digest_text()),
            **{f"the option {name}": value for name, value in self.options.agreed_fields().items()},
        }
        return Opening(rank, {name: {value: rank} for name, value in facts.items()})

    def check_opening(self, merged: Message) -> Opening:
        """Return what all ranks said; raises RankMismatch."""
        facts = {name: values for name, values in merged.facts.items() if name not in MAY_DIFFER}
        return checked(merged, Opening, facts)

    def open(self, merged: Opening) -> list[str]:
        """Take in what all ranks said and what `check_opening` has passed; return remarks for the log."""
        remarks: list[str] = []
        facts = merged.facts
        devices, settled = facts.get("device", {}), facts.get("settled", {})
        self.shares_clock = len(facts.get("clock", {})) == 1
        self.forgetful = str(True) in facts.get("retune", {})  # on some rank: then on all
        session = next(iter(facts.get("session", {})), "")
        if len(settled) > 1:
            remarks.append("ranks remember different results of earlier sessions: all of them are dropped")
            self.reset(tunes=self.tuning.rules.tunes)
        self._offers = dict(merged.offers)
        if len(devices) > 1:
            remarks.append(f"ranks run on different devices ({', '.join(devices)}): no disk entries are used")
            self._offers = {}
        self._looks_on_disk = len(devices) == 1
        self.in_session = True
        if self.forgetful:
            self.reset(tunes=self.tuning.rules.tunes)
        self.tuning.open()
        self.tuning.crash_bans = bans_for_crashes(merged)
        self.guard.begin_session(session, self.tuning.crash_bans)
        for local in self.local_contexts.by_name.values():
            if local.context is None and local.claim is None:  # met in a settled call
                local.claim = self._claim_on_disk(local)
        return remarks

    def check_run(self, merged: Message) -> RunReport:
        """Return what all ranks said; raises RankMismatch, for sources since this state began.

        One name may stand for several texts (functions made by functions), and ranks may launch different
        ones of them: they differ when they have none in common.
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
        self._offers = {**report.offers, **self._offers}
        return report

    def with_offers(self, report: RunReport) -> RunReport:
        """Offer all entries of the kernels that a run announces, if nothing is agreed on later."""
        is_agreed_later = self.options.watch and self.tuning.rules.tunes
        if (
            isinstance(self.agreement, SingleRank)
            or is_agreed_later
            or self.forgetful
            or not self._looks_on_disk
        ):
            return report
        told = [local for local in self.local_contexts.by_name.values() if local.told is not None]
        new = [local for local in told if local.told and local.told.announcement is not None]
        kernels = {(local.source.short_name, local.kernel) for local in new}
        return replace(report, offers=self._results.of_kernels(kernels))

    def look_on_disk(self) -> None:
        """Let a call before the first session use disk entries, unless there are peers to agree with."""
        self._looks_on_disk = self._looks_on_disk or isinstance(self.agreement, SingleRank)

    def drop_session(self) -> None:
        """Forget the searches under way, on all ranks alike."""
        untold = {name for name, local in self.local_contexts.by_name.items() if local.context is None}
        self.launches.forget(self.tuning.contexts.drop_unsettled() | untold)

    # -- results -------------------------------------------------------------------------------------------

    def _find_claim(self, local: RankContext, tuner: Autotuner | None) -> Claim | None:
        """Return the result that a context has in memory or on disk before its first launch here."""
        if self.forgetful:
            return None
        known = None if tuner is None else self._results.in_memory(tuner, local.key)
        if known is not None:
            return Claim(self.agreement.rank, identity.candidate_digest(known.all_kwargs()))
        return self._claim_on_disk(local)

    def _claim_on_disk(self, local: RankContext) -> Claim | None:
        """Return what all ranks have agreed to use, else what this rank has and will tell the others of."""
        if self.forgetful:
            return None
        offer = self._offers.get(self._results.entry_key(local).digest)
        if offer is not None:
            return Claim(*offer)
        is_told = self.in_session or isinstance(self.agreement, SingleRank)
        return self._results.on_disk(local) if is_told and self._looks_on_disk else None

    def publish(self, seconds: float) -> list[Context]:
        """Write every new result to `Autotuner.cache` and, when final, to disk; return what is new."""
        new = self.tuning.contexts.newly_final()
        for context in new:
            local = self.local_contexts.by_name.get(context.name)
            if local is not None:
                self._results.publish(context, local, seconds)
        for local in self.local_contexts.by_name.values():  # settled before they were launched here
            late = local.context
            if late is not None and not local.is_published and self.tuning.contexts.is_final(late):
                self._results.publish(late, local, seconds)
        return new
