"""Which context a launch belongs to: the known one of its kernel and key, or a new one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from triton.runtime.autotuner import Autotuner

from ..codec import digest
from ..search.kernel_families import context_name
from ..timing.clock import Clock
from ..timing.samples import Samples
from ..triton_api import identity
from ..triton_api.identity import KernelSource
from ..triton_api.launch import Key, Launch, texts_of
from .kernel_names import KernelNames, family_of
from .rank_context import Binding, Claim, RankContext
from .rank_contexts import RankContexts


class Registry:
    """Finds the context of a launch, and makes it at the first one. Not for several threads at once.

    find_claim: the result that memory or disk has for a new context. recall: gives a new context what the
    ranks share of it, and returns what it must not launch, with reasons.
    """

    def __init__(
        self,
        contexts: RankContexts,
        names: KernelNames,
        clock: Clock,
        statistic: str,
        rank: int,
        find_claim: Callable[[RankContext, Autotuner | None], Claim | None],
        recall: Callable[[RankContext], Mapping[str, str]],
    ) -> None:
        self._contexts = contexts
        self._names = names
        self._clock = clock
        self._statistic = statistic
        self._rank = rank
        self._find_claim = find_claim
        self._recall = recall
        self._bindings: weakref.WeakKeyDictionary[Autotuner, dict[Key, Binding]] = weakref.WeakKeyDictionary()

    def find(self, launch: Launch) -> Binding | None:
        """Return how the key was launched through the Autotuner before; None: it was not."""
        key = launch.key()  # raises for an Autotuner that was never seen, too
        return self._bindings.get(launch.tuner, {}).get(key)

    def admit(self, launch: Launch) -> Binding:
        """Return the binding of a launch that `find` does not know, from now on known."""
        binding = self._bound(launch, admits=True)
        context = binding.rank_context
        self._contexts.by_name[context.name] = context
        context.bindings = [binding, *(known for known in context.bindings if known.tuner() is not None)]
        self._bindings.setdefault(launch.tuner, {})[binding.key] = binding
        return binding

    def look(self, launch: Launch) -> Binding:
        """Return what `admit` would, and admit nothing."""
        binding = self._bound(launch, admits=False)
        binding.rank_context.bindings = binding.rank_context.bindings or [binding]
        return binding

    def choice(self, name: str, key: Key, options: dict[str, Any]) -> RankContext:
        """Return the context of a `tunable`, whose options are given by their texts."""
        kernel, key_text = self._names.name_of_choice(name, options), identity.key_text(key)
        known, slot = self._contexts.find(kernel, key_text)
        if known is not None:
            return known
        configs = {digest(text): option for text, option in options.items()}
        context = RankContext(
            name=self._name(kernel, slot),
            kernel=kernel,
            source=KernelSource(name, digest=""),
            key=key,
            key_text=key_text,
            texts={digest(text): text for text in options},
            samples=Samples(self._clock, self._statistic),
            rank=self._rank,
            family=family_of(kernel),
            slot=slot,
            is_choice=True,
        )
        context.bindings.append(Binding(lambda: None, key, configs, context))
        self._introduce(context, None, configs)
        self._contexts.by_name[context.name] = context
        return context

    def forget(self, names: Iterable[str]) -> None:
        """Drop contexts; the next launch admits them anew."""
        gone = set(names)
        self._contexts.forget(gone)
        for tuner, known in list(self._bindings.items()):
            self._bindings[tuner] = {key: b for key, b in known.items() if b.rank_context.name not in gone}

    def _bound(self, launch: Launch, *, admits: bool) -> Binding:
        tuner, key, configs = launch.tuner, launch.key(), launch.candidates()
        kernel, key_text = self._names.name_of(tuner, launches=admits), identity.key_text(key)
        context, slot = self._contexts.find(kernel, key_text)
        if context is None:
            context = RankContext(
                name=self._name(kernel, slot),
                kernel=kernel,
                source=identity.kernel_source(tuner.base_fn),
                key=key,
                key_text=key_text,
                texts=dict(zip(configs, texts_of(list(configs.values())), strict=True)),
                samples=Samples(self._clock, self._statistic, flags_gaps=True),
                rank=self._rank,
                family=f"{family_of(kernel)}{kernel.partition('#')[2]}",
                slot=slot,
                constants=launch.constants_text(),
            )
            self._introduce(context, tuner, configs)
        return Binding(weakref.ref(tuner), key, configs, context)

    def _introduce(self, context: RankContext, tuner: Autotuner | None, configs: dict[str, Any]) -> None:
        """Give a new context what is known of it: its search, its claim, its bans.

        A config that `Autotuner.cache` holds and that is none of the candidates is added to `configs`.
        """
        bans = self._recall(context)
        claim = context.claim = self._find_claim(context, tuner)
        if tuner is not None and claim is not None and claim.candidate not in configs:
            cached = tuner.cache.get(context.key)
            if cached is not None and identity.candidate_digest(cached.all_kwargs()) == claim.candidate:
                configs[claim.candidate] = cached
                context.texts[claim.candidate] = str(cached)
            else:
                context.claim = None
        self._contexts.ban(context, bans)

    def _name(self, kernel: str, slot: str) -> str:
        """Return what a new context is called."""
        name = context_name(self._names.alias(kernel), slot)
        if name in self._contexts.by_name:  # of another Autotuner, one that shares its contexts with peers'
            name = context_name(f"{kernel}!", slot)
        return name
