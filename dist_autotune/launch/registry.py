"""The contexts that this rank has launched: finds the context of a launch, and reports all of them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from triton.runtime.autotuner import Autotuner

from ..compilation import preflight
from ..formatting import config_label
from ..search.expectation.fields import Fills, filled
from ..search.expectation.order import FEWEST
from ..search.kernel_families import context_name
from ..search.messages import Announcement, Part
from ..search.orders import ContextOrder
from ..search.rules import BY_LAUNCH
from ..search.shared_context import Outcome
from ..storage.known_results import KnownResults
from ..storage.scope import ContextIdentity
from ..timing.clock import Clock
from ..timing.samples import Samples
from ..triton_api import footprint, identity
from ..triton_api.identity import KernelIdentity, family_of
from ..triton_api.interception import INTERCEPTION, fork_safe_lock
from ..triton_api.launch import Key, Launch, config_texts
from .kernel_names import KernelNames
from .rank_context import Binding, RankContext, Stage
from .tunable import OptionTexts


class Registry:
    """The contexts of this rank, by name.

    Any thread may read. `by_name` grows: iterate over `contexts`, as others may add to it.
    lock: taken to replace it, or to admit a launch.
    """

    def __init__(self, names: KernelNames, clock: Clock, rank: int, known: KnownResults) -> None:
        self.by_name: dict[str, RankContext] = {}
        self.lock = fork_safe_lock()
        self.has_news = False  # contexts have changed since a run began: a settled call has them choose anew
        self.names, self.known = names, known
        self._rank = rank
        self._samples_of_choices = functools.partial(Samples, clock)
        self._samples_of_kernels = functools.partial(Samples, clock, flags_gaps=True)
        self._by_key: dict[tuple[str, str], RankContext] = {}  # by kernel and key
        # Contexts that are launched in this run, or not settled: a run costs nothing for others.
        self._active: dict[RankContext, None] = {}
        self._met_apart: set[RankContext] = set()  # new, in runs of which nothing was reported
        self._bindings: weakref.WeakKeyDictionary[Autotuner, dict[Key, Binding]] = weakref.WeakKeyDictionary()

    def find(self, launch: Launch) -> Binding | None:
        """Return the binding of a launch's key; None: this Autotuner has not launched it."""
        key = launch.key()  # raises for an Autotuner that was never seen, too
        binding = self._bindings.get(launch.tuner, {}).get(key)
        if binding is not None:
            self._active[binding.rank_context] = None
            self._choose_first(binding.rank_context)
        return binding

    @property
    def contexts(self) -> list[RankContext]:
        return list(self.by_name.values())  # one step, in which no other thread adds one

    def active(self) -> tuple[RankContext, ...]:
        """Return the contexts that are launched in this run, or not settled."""
        return tuple(self._active)

    def _register(self, context: RankContext) -> None:
        about = context.identity
        self.by_name[context.name] = context
        self._by_key[about.kernel, about.key_text] = context
        self._active[context] = None

    def admit(self, launch: Launch) -> Binding:
        """Bind a launch that is new to its context, and register both; the caller has the lock."""
        binding = self.binding_of(launch, admits=True)
        context = binding.rank_context
        self._register(context)
        context.bindings = [binding, *(known for known in context.bindings if known.tuner() is not None)]
        self._bindings.setdefault(launch.tuner, {})[binding.key] = binding
        return binding

    def binding_of(self, launch: Launch, *, admits: bool = False) -> Binding:
        """Return the binding that `admit` would register. admits: the kernel keeps its name in this run."""
        configs, key, tuner = launch.candidates(), launch.key(), launch.tuner
        about = ContextIdentity(
            self.names.name_of(tuner, launches=admits),
            identity.kernel_identity(tuner),
            key,
            identity.key_text(key, tuner.base_fn.__name__),
            dict(zip(configs, config_texts(list(configs.values())), strict=True)),
            launch.constants_text(),
            launch.key_names(),
        )
        context = self._find_context(about) or self._new(about, configs, tuner, launch)
        earlier = next(iter(self._bindings.get(tuner, {}).values()), None)
        if earlier is not None and [*earlier.configs.items()] == [*configs.items()]:
            configs = earlier.configs  # one for all keys
        return Binding(weakref.ref(tuner), key, configs, context)

    def choice(
        self, name: str, key: Key, options: Sequence[Any], texts: OptionTexts, *, is_joint: bool
    ) -> RankContext:
        """Return the context of a `tunable`; the caller has the lock."""
        kernel = self.names.name_of_choice(name, texts.set_digest, is_joint=is_joint)
        source, text = KernelIdentity(name, digest=""), identity.key_text(key, f"tunable({name!r})")
        about = ContextIdentity(kernel, source, key, text, texts.texts, is_choice=True, is_joint=is_joint)
        if (context := self._find_context(about)) is None:
            configs = {each: options[place] for each, place in texts.places.items()}
            context = self._new(about, configs, None)
            context.bindings.append(Binding(lambda: None, key, configs, context))
            self._register(context)
        self._active[context] = None
        return context

    def _find_context(self, about: ContextIdentity) -> RankContext | None:
        found = self._by_key.get((about.kernel, about.key_text))
        if found is not None:
            self._choose_first(found)
        return found

    def _new(
        self,
        about: ContextIdentity,
        configs: dict[str, Any],
        tuner: Autotuner | None,
        launch: Launch | None = None,
    ) -> RankContext:
        """Return a new context.

        A config that `Autotuner.cache` holds and that is none of the candidates is added to `configs`.
        """
        known, key = self.known, about.key
        claim = known.find_claim(about, tuner)
        if claim is not None and claim[1] not in configs:
            cached = None if tuner is None else tuner.cache.get(key)
            if cached is not None and identity.config_digest(cached) == claim[1]:
                configs[claim[1]] = cached
                about = replace(about, texts={**about.texts, claim[1]: str(cached)})
            else:
                claim = None
        new_samples = self._samples_of_choices if tuner is None else self._samples_of_kernels
        context = RankContext(self._free_name(about), about, new_samples, self._rank, claim)
        context.holds_claim_back = claim is not None and known.holds_back(about)
        context.order = known.orders.contexts.get(context.name)
        if launch is not None and len(configs) >= FEWEST and known.function.keys_teach:
            context.fills = _fills(launch, configs, about.texts)
        self._choose_first(context)
        bans = {} if context.order is not None else known.orders.crash_bans.get(context.name, {})
        context.bans.update((each, reason) for each, (_, reason) in bans.items() if each in about.texts)
        return context

    def _free_name(self, about: ContextIdentity) -> str:
        """Return the name of a new context, which no other one has."""
        name = context_name(self.names.alias(about.kernel), about.key_text)
        if name in self.by_name:  # of another Autotuner, one that shares its contexts with peers'
            name = context_name(f"{about.kernel}!", about.key_text)
        return name

    def _choose_first(self, context: RankContext) -> None:
        """Choose the candidate that a context begins with, if no rank has announced the context.

        The first launch of each run chooses anew, so ranks that announce a context together choose alike.
        """
        if context.stage is Stage.NEW and context.run.choice is None and len(context.texts) > 1:
            known = self.known.of_kernel(context.identity, self.names.alias(context.identity.kernel))
            is_alone = self.known.function.is_alone
            context.begin_with(
                known,
                tries_few=self._tries_few(context),
                is_alone=is_alone,
                is_online=self.known.orders.rules.mode == "online",
            )

    def _tries_few(self, context: RankContext) -> bool:
        about = context.identity
        return self.known.orders.rules.tries_few(len(context.texts), is_choice=about.is_choice)

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename contexts as the ranks have agreed, where kernels differ only in their candidates."""
        if not names:
            return
        with self.lock:
            for context in self.contexts:
                context.name = names.get(context.name, context.name)
            self.by_name = {context.name: context for context in self.by_name.values()}

    def forget(self, names: Iterable[str]) -> None:
        """Drop contexts; the next launch admits them anew."""
        gone = set(names)
        with self.lock:
            self.has_news = True
            self.by_name = {name: context for name, context in self.by_name.items() if name not in gone}
            self._active = {context: None for context in self._active if context.name not in gone}
            found = self._by_key.items()
            self._by_key = {key: context for key, context in found if context.name not in gone}
            for tuner, known in list(self._bindings.items()):
                kept = {key: each for key, each in known.items() if each.rank_context.name not in gone}
                self._bindings[tuner] = kept

    # -- one session ---------------------------------------------------------------------------------------

    def open(self) -> None:
        """Give contexts that settled calls have met the results that the ranks have agreed to use."""
        for context in self.active():
            if context.stage is Stage.NEW:
                context.claim = self.known.claim_on_disk(context.identity)
                context.holds_claim_back = self.known.holds_back(context.identity)

    def untuned(self) -> tuple[RankContext, ...]:
        """Return the contexts without a result."""
        return tuple(each for each in self.contexts if each.tuned is None)

    def drop_unshared(self, dropped: set[str]) -> None:
        """Drop `dropped`, contexts that no rank has announced, and bans that the peers do not know."""
        contexts = self.contexts
        self.forget(dropped | {context.name for context in contexts if context.order is None})
        for context in contexts:
            for candidate in context.unreported_bans:  # a launch finds it again
                del context.bans[candidate]

    # -- one run -------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        self.has_news = False
        for context in self.active():
            context.begin_run()
            if context.is_idle:
                del self._active[context]
                context.drop_samples()

    def abandon_run(self) -> None:
        for context in self.active():
            context.samples.abandon_run()
            context.begin_run()

    def launched(self) -> list[str]:
        """Return the launches of this run, as `kernel[key] with config`; any thread may ask.

        Those that have not ended, if the clock knows them; else the trials; else all.
        """
        chosen = []
        for context in self.active():
            report = context.samples.report  # of the run that is waited for, which may be an earlier one
            candidate = report.ran if report is not None and report.is_pending else context.run.choice
            if candidate is not None:
                text = config_label(context.texts.get(candidate, "several configs"))
                chosen.append((context, f"{context.title} with {text}"))
        running = [text for context, text in chosen if context.samples.is_running]
        trials = [text for context, text in chosen if context.order is None or context.order.is_on_trial]
        return running or trials or [text for _, text in chosen]

    def meet_apart(self, contexts: Iterable[RankContext]) -> None:
        """Let the next report announce new contexts that only earlier runs have launched."""
        self._met_apart.update(each for each in contexts if each.order is None and len(each.texts) > 1)

    def report_run(self, *, waits: bool) -> dict[str, Part]:
        """Return this rank's parts of the run's report, by context. waits: wait until every clock is read."""
        reports = {}
        for place, context in enumerate(self.active()):
            run = context.run
            if run.count and context.counts_launches:
                context.launches_per_run = run.count
            part = context.report_run(waits=waits)
            bans = context.unreported_bans
            if part is None and not (bans or context.compile.left or context in self._met_apart):
                continue
            announcement = None if context.announced else self._announcement(context, place)
            share, launches = context.footprint(None if part is None else part.ran)
            run.report = reports[context.name] = replace(
                part or Part(),
                bans=bans,
                announcement=announcement,
                compiling=context.compile.left,
                share=share,
                launches=launches,
            )
        self._met_apart.clear()
        return reports

    def _announcement(self, context: RankContext, place: int) -> Announcement:
        self._choose_first(context)  # a context announced for its bans was not launched
        about, first = context.identity, context.first_candidate
        places = {text: str(place) for place, text in enumerate(context.candidates.values())}
        told = (first.other_times or {}) if self._tries_few(context) else {}
        of_time = filled if context.fills else float
        return Announcement(
            rank=context.rank,
            kernel=about.source.short_name,
            key=about.key_text,
            order=tuple(context.candidates.items()),
            shared=tuple(sorted(about.texts)),
            is_choice=about.is_choice,
            kernel_id=self.names.alias(about.kernel),
            family=f"{family_of(about.kernel)}{about.kernel.partition('#')[2]}",
            siblings=len(self.names.relatives(about.kernel)),
            place=place,
            claim=context.claim,
            nearest_key=first.nearest_key,
            default=next(iter(about.texts), ""),
            upgrade=first.upgrade,
            ms_by_key={
                key: {places[t]: of_time(ms) for t, ms in each.items() if t in places}
                for key, each in told.items()
            },
            fills=tuple(context.fills[text] for text in context.candidates.values()) if context.fills else (),
        )

    def reported(self) -> list[RankContext]:
        """Return the contexts in this run's report."""
        return [context for context in self._active if context.run.report is not None]

    def new_sources(self) -> dict[str, str]:
        """Return the source digests of the functions in the kernels that this run announces, by name."""
        texts: dict[str, set[str]] = {}
        for context in self.reported():
            if context.run.report is not None and context.run.report.announcement is not None:
                for name, text in context.identity.source.texts:
                    texts.setdefault(name, set()).add(text)
        return {name: " ".join(sorted(digests)) for name, digests in texts.items()}

    def apply_outcomes(
        self, orders: Mapping[str, ContextOrder], outcomes: Mapping[str, Outcome], *, late_ms: float
    ) -> None:
        """Keep or drop the samples of the reported run; `late_ms`: see `Samples.apply_outcome`."""
        self.has_news = True
        for context in self.active():
            if (report := context.run.report) is None:
                # Met in a settled call and not launched since: peers may have announced it meanwhile.
                context.order = context.order or orders.get(context.name)
                continue
            order, outcome = orders[context.name], outcomes[context.name]
            context.announce(order, report.bans)
            counts = outcome.kind == "sample" and outcome.judge == BY_LAUNCH
            context.samples.apply_outcome(waiting=order.next_launch.waiting, counts=counts, late_ms=late_ms)


def _fills(launch: Launch, configs: Mapping[str, Any], texts: Mapping[str, str]) -> Fills:
    """Return the share of the SMs' time that a launch with each config fills; {}: its grid does not tell."""
    index = preflight.current_device()
    if index < 0 or (device := footprint.device_properties(index)) is None:
        return {}
    fills = {}
    with INTERCEPTION.standing_by(_LAUNCH_REFUSER):
        for each, config in configs.items():
            if (programs := launch.programs(config)) <= 0:
                return {}
            fills[texts[each]] = footprint.fill(programs, device.multi_processor_count)
    return fills


class _LaunchRefuser:
    """Refuses launches while a grid's function is asked about configs that are not launched."""

    settled: Mapping[int, Any] = {}
    passes_single = False

    @property
    def launcher(self) -> _LaunchRefuser:
        return self

    def launch(self, *about: object) -> None:
        raise RuntimeError("a grid's function launches a kernel, so it is not asked about other configs")


_LAUNCH_REFUSER = _LaunchRefuser()
