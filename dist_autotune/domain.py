"""What one tuned function knows on one group of ranks: searches, launches, results in memory and on disk.

A domain outlives its sessions: a later one takes up what an earlier one left unfinished.
"""

from __future__ import annotations

import datetime
import itertools
import math
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner

from . import flows, identity, intercept
from .agreement import Agreement, Alone
from .cache import DiskCache, Entry, EntryKey
from .clock import Clock, default_clock
from .intercept import Key
from .launches import Launches
from .local import Claim, Local
from .payload import Payload, check_facts
from .protocol import Tuning
from .report import TunedContext
from .search import Context, Rules
from .settings import Options, digest
from .tunable import CHOICES
from .version import __version__

SOURCE_OF = "the source of kernel "  # and its name: a fact that ranks tell


@dataclass(frozen=True)
class Mark:
    """Who wrote an entry of some `Autotuner.cache`."""

    agreement: Agreement
    scope: str
    provisional: bool


class Results:
    """Which entries of `Autotuner.cache` come from a session of ours. Holds no Autotuner alive."""

    def __init__(self) -> None:
        self._marks: weakref.WeakKeyDictionary[Autotuner, dict[Key, Mark]] = weakref.WeakKeyDictionary()

    def mark(self, tuner: Autotuner, key: Key, mark: Mark) -> None:
        self._marks.setdefault(tuner, {})[key] = mark

    def find(self, tuner: Autotuner, key: Key) -> Mark | None:
        return self._marks.get(tuner, {}).get(key)


RESULTS = Results()


class Domain:
    """The lasting state of one tuned function on one group of ranks."""

    def __init__(
        self, options: Options, name: str, function_digest: str, agreement: Agreement, *, tunes: bool
    ) -> None:
        self.options = options
        self.name = name
        self.agreement = agreement
        # Many functions are called `step`, and all lambdas `<lambda>`: a name of the user's own is enough.
        self.scope = "" if options.share else options.name or f"{name}#{function_digest}"
        self.timeout_s = options.resolved_timeout_s()
        self.clock: Clock = options.clock or default_clock(
            self.timeout_s, interpreted=intercept.is_interpreted()
        )
        self.disk = DiskCache(options.resolved_cache_dir())
        self.device = Device.current()
        self.on_ban: Callable[[Local, str, str], None] = lambda local, candidate, reason: None
        self.forgetful = False  # retune(): what memory and disk hold does not count
        self._function_digest = function_digest
        self._sources: dict[str, dict[str, int]] = {}  # as told: name -> texts -> lowest rank
        self._offers: dict[str, tuple[int, str, float]] = {}  # disk entries that all ranks use
        self._published: dict[str, tuple[str, int | None]] = {}
        self.reset(tunes=tunes)

    def reset(self, *, tunes: bool) -> None:
        """Start without any context."""
        options = self.options
        strategy = options.search if callable(options.search) else flows.STRATEGIES[options.search_name]
        self.tuning = Tuning(
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
        self.launches = Launches(
            clock=self.clock,
            agree=options.agree,
            statistic=options.statistic,
            rank=self.agreement.rank,
            shared=self.tuning.contexts,
            aliases=self.tuning.aliases,
            find_claim=self._find_claim,
            on_ban=lambda local, candidate, reason: self.on_ban(local, candidate, reason),
            busy=self.agreement.busy,
            passes_single=isinstance(self.agreement, Alone),
            is_frozen=not tunes,
        )
        self._published.clear()

    @property
    def point(self) -> dict[str, str]:
        """Return where in the program this rank is, to be told at every exchange."""
        return {"the tuned function": self.name}

    # -- opening a session ---------------------------------------------------------------------------------

    def opening(self) -> Payload:
        """Return what this rank says when a session opens."""
        rank = self.agreement.rank
        facts = {
            **self.point,
            "the source of the tuned function": self._function_digest,
            "the version of dist_autotune": __version__,
            "the version of Triton": triton.__version__,
            "retune": str(self.forgetful),
            "DIST_AUTOTUNE_MODE": "tune" if self.tuning.rules.tunes else "cached",
            "device": self.device.text,
            "settled": digest(self.tuning.digest_text()),
            **{f"the option {name}": value for name, value in self.options.agreed_fields().items()},
        }
        offers = {} if self.forgetful else self._usable_entries()
        return Payload("open", rank, {name: {value: rank} for name, value in facts.items()}, offers)

    def open(self, merged: Payload) -> list[str]:
        """Take in what all ranks said; return remarks for the log. Raises RankMismatch."""
        remarks: list[str] = []
        facts = dict(merged.facts)
        devices, settled = facts.pop("device", {}), facts.pop("settled", {})
        self.forgetful = str(True) in facts.pop("retune", {})  # on some rank: then on all
        facts.pop("session", None)
        check_facts(Payload(merged.kind, facts=facts), "open")
        if len(settled) > 1:
            remarks.append("ranks remember different results of earlier sessions: all of them are dropped")
            self.reset(tunes=self.tuning.rules.tunes)
        self._offers = dict(merged.offers)
        if len(devices) > 1:
            remarks.append(f"ranks run on different devices ({', '.join(devices)}): no disk entries are used")
            self._offers = {}
        if self.forgetful:
            self.reset(tunes=self.tuning.rules.tunes)
        self.tuning.open()
        return remarks

    def check_run(self, merged: Payload) -> None:
        """Raise RankMismatch where ranks differ in what must be equal; in sources, since this state began.

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
        check_facts(Payload(merged.kind, facts=facts), "run")

    def look_on_disk(self) -> None:
        """Let a call outside a session use disk entries; with peers they would have to be agreed first."""
        if isinstance(self.agreement, Alone):
            self._offers = self._offers or self._usable_entries()

    def drop_session(self) -> None:
        """Forget the searches under way, on all ranks alike."""
        unsettled = {context.name for context in self.tuning.unsettled}
        unsettled |= {name for name, local in self.launches.contexts.items() if local.context is None}
        self.launches.forget(unsettled)
        self.tuning.drop_unsettled()

    def _usable_entries(self) -> dict[str, tuple[int, str, float]]:
        usable = self.disk.load_all(self._is_usable)
        return {name: (self.agreement.rank, entry.winner, entry.ms) for name, entry in usable.items()}

    def _is_usable(self, entry: Entry) -> bool:
        key = entry.key
        return (
            (key.device, key.capability, key.driver)
            == (self.device.name, self.device.capability, self.device.driver)
            and key.triton_version == triton.__version__
            and key.world_size == len(self.agreement.ranks)
            and key.scope == self.scope
            and key.agree == self.options.agree
        )

    # -- results -------------------------------------------------------------------------------------------

    def _find_claim(self, local: Local, tuner: Autotuner | None) -> Claim | None:
        """Return the result that a context has in memory or on disk before its first launch here."""
        if self.forgetful:
            return None
        known = None if tuner is None else self._in_memory(tuner, local.key)
        if known is not None:
            return Claim(self.agreement.rank, identity.candidate_digest(known.all_kwargs()))
        offer = self._offers.get(self._entry_key(local).digest)
        return None if offer is None else Claim(*offer)

    def _in_memory(self, tuner: Autotuner, key: Key) -> Any:
        """Return the config in `Autotuner.cache` if it counts."""
        config, mark = tuner.cache.get(key), RESULTS.find(tuner, key)
        if config is None or (mark is not None and mark.provisional):
            return None
        if mark is None:
            return config if isinstance(self.agreement, Alone) and not self.scope else None
        if not isinstance(self.agreement, Alone) and mark.agreement is not self.agreement:
            return None
        return config if mark.scope == self.scope else None

    def publish(self, seconds: float) -> list[Context]:
        """Write every new result to `Autotuner.cache` and, when final, to disk; return what is new."""
        new: list[Context] = []
        for context in self.tuning.contexts.values():
            state = (context.status, context.winner)
            if not self.tuning.is_final(context) or self._published.get(context.name) == state:
                continue
            self._published[context.name] = state
            new.append(context)
            local = self.launches.contexts.get(context.name)
            if local is not None:
                self._publish_local(context, local, seconds)
        return new

    def _publish_local(self, context: Context, local: Local, seconds: float) -> None:
        winner = context.digests[context.incumbent]
        timings = {context.digests[index]: ms for index, ms in context.timings.items()}
        failed = {context.digests[index]: math.inf for index in context.banned}
        if local.is_choice:
            CHOICES.remember(context.kernel, local.key_text, local.bindings[0].configs[winner])
        for binding in local.bindings:
            tuner = binding.tuner()
            config = binding.configs.get(winner)
            if tuner is None or config is None or len(tuner.configs) == 1:
                continue
            cached = context.status == "cached"
            standing = tuner.cache.get(binding.key)
            if cached and standing is not None and identity.candidate_digest(standing.all_kwargs()) == winner:
                continue  # and so does all that belongs to it
            known = {**timings, **failed}
            by_config = [(own, known[digest]) for digest, own in binding.configs.items() if digest in known]
            intercept.publish(tuner, binding.key, config, by_config, seconds)
            RESULTS.mark(tuner, binding.key, Mark(self.agreement, self.scope, context.provisional))
            if not context.provisional:
                intercept.announce(tuner, binding.key, cache_hit=cached)
        ms = timings.get(winner)
        if context.status == "tuned" and ms is not None and len(context.digests) > 1:
            self.disk.put(self._entry(context, local, winner, ms))

    def _entry(self, context: Context, local: Local, winner: str, ms: float) -> Entry:
        return Entry(
            key=self._entry_key(local),
            winner=winner,
            config=context.texts[context.incumbent],
            ms=ms,
            timings={context.texts[index]: ms for index, ms in context.timings.items()},
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            package_version=__version__,
        )

    def _entry_key(self, local: Local) -> EntryKey:
        return EntryKey(
            kernel=local.source.short_name,
            kernel_digest=local.kernel,
            key=local.key_text,
            constants=local.constants,
            candidates=tuple(sorted(candidate for candidate, _ in local.order)),
            device=self.device.name,
            capability=self.device.capability,
            driver=self.device.driver,
            triton_version=triton.__version__,
            world_size=len(self.agreement.ranks),
            scope=self.scope,
            agree=self.options.agree,
        )

    def tuned_contexts(self, names: set[str]) -> tuple[TunedContext, ...]:
        """Return the contexts among `names` that there was a choice in, as they stand."""
        contexts = []
        for name in sorted(names):
            context, local = self.tuning.contexts.get(name), self.launches.contexts.get(name)
            if context is None or local is None or len(context.digests) == 1:
                continue
            contexts.append(
                TunedContext(
                    kernel=context.kernel,
                    key=local.key,
                    config=local.bindings[0].configs.get(context.digests[context.incumbent]),
                    ms=context.timings.get(context.incumbent),
                    fastest_rank_ms=context.fastest_ms.get(context.incumbent),
                    status=context.status or "tuning",
                    timings={context.texts[index]: ms for index, ms in context.known_ms()},
                    banned={
                        context.texts[index]: f"rank {rank}: {reason}"
                        for index, (rank, reason) in sorted(context.banned.items())
                    },
                )
            )
        return tuple(contexts)


@dataclass(frozen=True)
class Device:
    """The device that results hold for."""

    name: str
    capability: str
    driver: str

    @property
    def text(self) -> str:
        return f"{self.name} {self.capability} {self.driver}".strip()

    @classmethod
    def current(cls) -> Device:
        if intercept.is_interpreted() or not torch.cuda.is_available():
            return cls("interpreter", "", "")
        major, minor = torch.cuda.get_device_capability()
        return cls(torch.cuda.get_device_name(), f"{major}.{minor}", _driver_version())


def _driver_version() -> str:
    """Return the NVIDIA driver's version, as the kernel module states it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found.group(0) if found else ""
