"""The contexts that this rank has launched: found by a launch, reported to the peers run by run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace
from triton.runtime.autotuner import Autotuner

from ..codec import digest
from ..formatting import config_label
from ..options import Options
from ..search.context import Context, Outcome
from ..search.expectation.model import Told
from ..search.kernel_families import context_name
from ..search.messages import MIXED, Announcement, Claim, Part, Upgrade
from ..search.rules import BY_LAUNCH
from ..timing.clock import Clock
from ..timing.samples import Samples
from ..triton_api import identity
from ..triton_api.identity import KernelIdentity
from ..triton_api.launch import Key, Launch, config_texts
from .kernel_names import KernelNames, family_of
from .rank_context import Binding, RankContext


class Registry:
    """The contexts of this rank, by name. Not for several threads at once.

    recall: gives a new context what the ranks share of it, and returns what it must not launch, with reasons.
    find_claim: the result that memory or disk has for it. find_winners: those of other keys of its kernel.
    find_told: the times that those have told. find_upgrade: what is raced again after an upgrade.
    tries_few: a search tries a few candidates, those that other keys let expect to be fast.
    """

    def __init__(
        self,
        names: KernelNames,
        options: Options,
        clock: Clock,
        rank: int,
        recall: Callable[[RankContext], Mapping[str, str]],
        find_claim: Callable[[RankContext, Autotuner | None], Claim | None],
        find_winners: Callable[[RankContext], Mapping[str, str]],
        find_told: Callable[[RankContext], Told],
        find_upgrade: Callable[[RankContext], Upgrade | None],
        tries_few: bool = False,
    ) -> None:
        self.by_name: dict[str, RankContext] = {}
        self.has_news = False  # the ranks have agreed on something since the last run began
        self.on_ban: Callable[[RankContext, str, str], None] = lambda *ban: None
        self.names = names
        self._options, self._clock, self._rank = options, clock, rank
        self._recall, self._find_claim, self._find_upgrade = recall, find_claim, find_upgrade
        self._find_winners, self._find_told, self._tries_few = find_winners, find_told, tries_few
        self._bindings: weakref.WeakKeyDictionary[Autotuner, dict[Key, Binding]] = weakref.WeakKeyDictionary()

    def find(self, launch: Launch) -> Binding | None:
        """Return how the key was launched through the Autotuner before; None: it was not."""
        key = launch.key()  # raises for an Autotuner that was never seen, too
        binding = self._bindings.get(launch.tuner, {}).get(key)
        if binding is not None:
            self._choose_first(binding.rank_context)
        return binding

    def admit(self, launch: Launch) -> Binding:
        """Return the binding of a launch that `find` does not know, from now on known."""
        binding = self.look(launch, admits=True)
        context = binding.rank_context
        self.by_name[context.name] = context
        context.bindings = [binding, *(known for known in context.bindings if known.tuner() is not None)]
        self._bindings.setdefault(launch.tuner, {})[binding.key] = binding
        return binding

    def look(self, launch: Launch, *, admits: bool = False) -> Binding:
        """Return what `admit` would, and admit nothing."""
        configs, kernel = launch.candidates(), self.names.name_of(launch.tuner, launches=admits)
        texts = dict(zip(configs, config_texts(list(configs.values())), strict=True))
        source = identity.kernel_identity(launch.tuner)
        context = self._context(kernel, launch.key(), source, configs, texts, launch)
        return Binding(weakref.ref(launch.tuner), launch.key(), configs, context)

    def choice(self, name: str, key: Key, options: dict[str, Any], *, is_joint: bool) -> RankContext:
        """Return the context of a `tunable`, whose options are given by their texts."""
        kernel = self.names.name_of_choice(name, options, is_joint=is_joint)
        texts = {digest(text): text for text in options}
        configs = {each: options[text] for each, text in texts.items()}
        source = KernelIdentity(name, digest="")
        context = self._context(kernel, key, source, configs, texts, None, is_joint=is_joint)
        if not context.bindings:
            context.bindings.append(Binding(lambda: None, key, configs, context))
            self.by_name[context.name] = context
        return context

    def _context(
        self,
        kernel: str,
        key: Key,
        source: KernelIdentity,
        configs: dict[str, Any],
        texts: dict[str, str],
        launch: Launch | None,
        *,
        is_joint: bool = False,
    ) -> RankContext:
        """Return the context of a kernel's key; a new one has a slot of its own among those of the kernel.

        A config that `Autotuner.cache` holds and that is none of the candidates is added to `configs`.
        """
        key_text, tuner = identity.key_text(key), None if launch is None else launch.tuner
        own = {context.key_text: context for context in self.by_name.values() if context.kernel == kernel}
        if key_text in own:
            self._choose_first(own[key_text])
            return own[key_text]
        slot, taken = key_text, {context.slot for context in own.values()}
        if self._options.agree == "ordinal":
            slot = next(free for n in range(len(own) + 1) if (free := f"@{n}") not in taken)
        name = context_name(self.names.alias(kernel), slot)
        if name in self.by_name:  # of another Autotuner, one that shares its contexts with peers'
            name = context_name(f"{kernel}!", slot)
        samples = Samples(self._clock, self._options.statistic, flags_gaps=launch is not None)
        constants = "" if launch is None else launch.constants_text()
        names, is_choice = () if launch is None else launch.key_names(), launch is None
        context = RankContext(
            name, kernel, source, key, key_text, texts, samples, self._rank, slot, constants, names, is_choice
        )
        context.is_joint = is_joint
        bans, claim = self._recall(context), self._find_claim(context, tuner)
        if claim is not None and claim[1] not in configs:
            cached = None if tuner is None else tuner.cache.get(key)
            if cached is not None and identity.config_digest(cached) == claim[1]:
                configs[claim[1]], texts[claim[1]] = cached, str(cached)
            else:
                claim = None
        context.claim = claim
        self._choose_first(context)
        self.ban(context, bans)
        return context

    def _choose_first(self, context: RankContext) -> None:
        """Let a context that no rank has announced begin with an old winner, or what other keys tell of it.

        Anew in each run, by its first launch: ranks that announce it together know the same results.
        """
        is_new = context.search is None and context.claim is None
        if is_new and context.choice is None and len(context.texts) > 1:
            upgrade = self._find_upgrade(context)
            known = self._find_winners(context), self._find_told(context), upgrade
            context.begin_with(*known, tries_few=self._tries_few)

    def ban(self, context: RankContext, bans: Mapping[str, str]) -> None:
        """Ban candidates on this rank, with reasons; the run's report tells the peers."""
        for candidate, reason in bans.items():
            context.bans[candidate] = reason
            self.on_ban(context, candidate, reason)

    def rename(self, names: Mapping[str, str]) -> None:
        """Call contexts as the peers do: their kernels are one, though their candidates differ."""
        for old, new in names.items():
            if (context := self.by_name.pop(old, None)) is not None:
                context.name = new
                self.by_name[new] = context

    def forget(self, names: Iterable[str]) -> None:
        """Drop contexts; the next launch admits them anew."""
        gone = set(names)
        self.has_news = True
        self.by_name = {name: context for name, context in self.by_name.items() if name not in gone}
        for tuner, known in list(self._bindings.items()):
            self._bindings[tuner] = {key: b for key, b in known.items() if b.rank_context.name not in gone}

    # -- one run -------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        self.has_news = False
        for context in self.by_name.values():
            context.begin_run()

    def abandon_run(self) -> None:
        for context in self.by_name.values():
            context.samples.abandon_run()
            context.begin_run()

    def launched(self) -> list[str]:
        """Return what this run has launched, as `kernel[key] with config`; any thread may ask.

        Only what runs on the device at this moment, or is being launched, where the clock can tell; else only
        what is on trial, if anything is.
        """
        chosen = []
        for context in list(self.by_name.values()):
            report = context.samples.report  # of the run that is waited for, which may be an earlier one
            candidate = report.ran if report is not None and report.pending else context.choice
            if candidate is not None:
                text = config_label(context.texts.get(candidate, "several configs"))
                chosen.append((context, f"{context.title} with {text}"))
        running = [text for context, text in chosen if context.samples.is_running]
        trials = [text for context, text in chosen if context.search is None or context.search.is_on_trial]
        return running or trials or [text for _, text in chosen]

    def report_run(self, *, waits: bool) -> dict[str, Part]:
        """Return what to tell the peers of this run. `waits`: read every clock now; see `Samples`."""
        reports = {}
        for place, context in enumerate(self.by_name.values()):
            if context.launches and not context.is_settled:
                context.launches_per_run = context.launches
            earlier = context.report_earlier_runs()
            bans = {
                c: (context.rank, why) for c, why in context.bans.items() if c not in context.reported_bans
            }
            is_repeated = context.samples.report is not None
            if not (context.ran or is_repeated or bans or context.compiling or earlier is not None):
                continue
            # While a peer has not read its sample yet, this run's launches are no part of the trial.
            is_waiting = context.search is not None and context.search.waiting
            if is_repeated or (context.ran and not is_waiting):
                ran = None if not context.ran else MIXED if len(context.ran) > 1 else next(iter(context.ran))
                part = context.samples.report_run(ran, waits=waits)
            else:
                part = earlier or Part()
            announcement = None if context.announced else self._announcement(context, place)
            share, launches = context.footprint(part.ran)
            context.report = reports[context.name] = replace(
                part,
                bans=bans,
                announcement=announcement,
                compiling=context.compiling,
                share=share,
                launches=launches,
            )
        return reports

    def _announcement(self, context: RankContext, place: int) -> Announcement:
        self._choose_first(context)  # a context announced for its bans was not launched
        kernel = context.kernel
        return Announcement(
            rank=context.rank,
            kernel=context.source.short_name,
            key=context.key_text,
            order=tuple(context.candidates.items()),
            shared=tuple(sorted(context.texts)),
            is_choice=context.is_choice,
            kernel_id=self.names.alias(kernel),
            family=f"{family_of(kernel)}{kernel.partition('#')[2]}",
            siblings=len(self.names.relatives(kernel)),
            place=place,
            slot=context.slot,
            claim=context.claim,
            like=context.like,
            default=context.default,
            upgrade=context.upgrade,
        )

    def reported(self) -> list[RankContext]:
        """Return the contexts of which the peers hear at the end of this run."""
        return [context for context in self.by_name.values() if context.report is not None]

    def announced_now(self) -> list[RankContext]:
        """Return the contexts that this run announces to the peers."""
        return [context for context in self.reported() if context.report and context.report.announcement]

    def new_sources(self) -> dict[str, str]:
        """Return the source digests of the functions in the kernels that this run announces, by name."""
        new = {name for context in self.announced_now() for name, _ in context.source.texts}
        texts: dict[str, set[str]] = {}
        for context in self.by_name.values():
            for name, text in context.source.texts:
                texts.setdefault(name, set()).add(text)
        return {name: " ".join(sorted(digests)) for name, digests in texts.items() if name in new}

    def apply_outcomes(
        self, searches: Mapping[str, Context], outcomes: Mapping[str, Outcome], *, late_ms: float
    ) -> None:
        """Keep or drop the samples of the reported run; `late_ms`: see `Samples.apply_outcome`."""
        self.has_news = True
        for context in self.by_name.values():
            if context.report is None:
                # Met in a settled call and not launched since: peers may have announced it meanwhile.
                context.search = context.search or searches.get(context.name)
                continue
            search, outcome = searches[context.name], outcomes[context.name]
            context.search, context.announced = search, True
            context.reported_bans.update(context.report.bans)
            counts = outcome.kind == "sample" and outcome.judge == BY_LAUNCH
            context.samples.apply_outcome(waiting=search.waiting, counts=counts, late_ms=late_ms)
