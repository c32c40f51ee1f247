"""Which context a launch belongs to: the known one of its kernel and key, or a new one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from triton.runtime.autotuner import Autotuner

from ..codec import digest
from ..errors import TuningError
from ..search.state import context_name
from ..timing.clock import Clock
from ..timing.samples import Samples
from ..triton_api import identity, interception
from ..triton_api.identity import KernelSource
from ..triton_api.interception import Key
from .kernel_ids import KernelNames, family_of
from .rank_contexts import Binding, Claim, RankContext, RankContexts


class Registry:
    """Finds the context of a launch, and makes it at the first one. Not for several threads at once.

    find_claim: the result that memory or disk has for a new context. recall: gives a new context what is
    known of it from an earlier process, and returns what it must not launch, with reasons.
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

    def key_of(self, tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
        """Return the key of a launch; raises TuningError if it cannot be hashed."""
        key = interception.key_of(tuner, args, kwargs)
        try:
            hash(key)
        except TypeError as error:
            raise TuningError(
                f"{tuner.base_fn.__name__}: a value of its autotune key ({', '.join(tuner.keys)}) cannot be "
                f"hashed ({error}), and neither can stock Triton. Pass a tuple or a number instead."
            ) from None
        return key

    def find(self, tuner: Autotuner, key: Key) -> Binding | None:
        """Return how a key was launched through an Autotuner before; None: it was not."""
        by_key = self._bindings.get(tuner)
        return None if by_key is None else by_key.get(key)

    def admit(self, tuner: Autotuner, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Binding:
        """Take up a launch that `find` does not know."""
        binding = self._bound(tuner, key, args, kwargs, launches=True)
        local = binding.local
        self._contexts.by_name[local.name] = local
        local.bindings = [known for known in local.bindings if known.tuner() is not None]
        local.bindings.insert(0, binding)
        self._bindings.setdefault(tuner, {})[key] = binding
        return binding

    def look(self, tuner: Autotuner, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Binding:
        """Return what `admit` would, and admit nothing."""
        binding = self._bound(tuner, key, args, kwargs, launches=False)
        binding.local.bindings = binding.local.bindings or [binding]
        return binding

    def choice(self, name: str, key: Key, key_text: str, options: dict[str, Any]) -> RankContext:
        """Return the context of a `tunable`."""
        kernel = self._names.name_of_choice(name, options)
        known, slot = self._contexts.find(kernel, key_text)
        if known is not None:
            return known
        local = RankContext(
            name=self._name(kernel, slot),
            kernel=kernel,
            source=KernelSource(name, name, "", ""),
            key=key,
            key_text=key_text,
            constants="",
            samples=Samples(self._clock, self._statistic),
            order=tuple((digest(text), text) for text in options),
            rank=self._rank,
            family=family_of(kernel),
            slot=slot,
            is_choice=True,
        )
        bans = self._recall(local)
        configs = {digest(text): option for text, option in options.items()}
        local.bindings.append(Binding(lambda: None, key, configs, local))
        local.claim = self._find_claim(local, None)
        for candidate, reason in bans.items():
            self._contexts.ban(local, candidate, reason)
        self._contexts.by_name[local.name] = local
        return local

    def forget(self, names: Iterable[str]) -> None:
        """Drop contexts; the next launch admits them anew."""
        gone = set(names)
        self._contexts.forget(gone)
        for tuner in list(self._bindings):
            by_key = self._bindings[tuner]
            self._bindings[tuner] = {key: b for key, b in by_key.items() if b.local.name not in gone}

    def _bound(
        self, tuner: Autotuner, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], *, launches: bool
    ) -> Binding:
        configs = interception.candidates_of(tuner, args, kwargs)
        kernel = self._names.name_of(tuner, launches=launches)
        key_text = identity.key_text(key)
        local, slot = self._contexts.find(kernel, key_text)
        if local is None:
            constants = interception.constants_of(tuner, args, kwargs)
            local = self._new_local(tuner, kernel, slot, key, key_text, configs, constants)
        return Binding(weakref.ref(tuner), key, configs, local)

    def _new_local(
        self,
        tuner: Autotuner,
        kernel: str,
        slot: str,
        key: Key,
        key_text: str,
        configs: dict[str, Any],
        constants: str,
    ) -> RankContext:
        """Return a new context.

        A config that `Autotuner.cache` holds and that is none of the candidates is added to `configs`.
        """
        local = RankContext(
            name=self._name(kernel, slot),
            kernel=kernel,
            source=interception.source_of(tuner),
            key=key,
            key_text=key_text,
            constants=constants,
            samples=Samples(self._clock, self._statistic, flags_gaps=True),
            order=tuple(zip(configs, interception.texts_of(list(configs.values())), strict=True)),
            rank=self._rank,
            family=f"{family_of(kernel)}{kernel.partition('#')[2]}",
            slot=slot,
        )
        bans = self._recall(local)
        local.claim = self._find_claim(local, tuner)
        if local.claim is not None and local.claim.candidate not in configs:
            cached = tuner.cache.get(key)
            if cached is not None and identity.candidate_digest(cached.all_kwargs()) == local.claim.candidate:
                configs[local.claim.candidate] = cached
                local.order += ((local.claim.candidate, str(cached)),)
            else:
                local.claim = None
        for candidate, reason in bans.items():
            self._contexts.ban(local, candidate, reason)
        return local

    def _name(self, kernel: str, slot: str) -> str:
        """Return what a new context is called."""
        name = context_name(self._names.alias(kernel), slot)
        if name in self._contexts.by_name:  # of another Autotuner, one that shares its contexts with peers'
            name = context_name(f"{kernel}!", slot)
        return name
