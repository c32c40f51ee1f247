"""Stands in for `Autotuner.run`: launches the kernel with the config that the run plans for it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from triton.runtime.autotuner import Autotuner

from ..compilation import preflight as compiling
from ..compilation.config_failures import config_failure
from ..compilation.pool import Tally, Terms
from ..timing.clock import Clock
from ..triton_api import identity, interception
from ..triton_api.interception import Key
from .fast_path import FastPath
from .kernel_ids import KernelNames
from .rank_contexts import Binding, RankContext, RankContexts
from .registry import Registry
from .tunable import KnownChoices, texts_of


class Dispatcher:
    """The launches of one tuned function on this rank, from any thread.

    busy: entered while this rank compiles, so that its peers wait on. trying: entered around the first launch
    of a trial in a run. passes_single: a kernel with one config is no context, as no peer can have more.
    is_frozen: nothing will ever be tried, so what is not settled now will never be.
    """

    def __init__(
        self,
        names: KernelNames,
        contexts: RankContexts,
        admission: Registry,
        new_candidates: NewCandidates,
        clock: Clock,
        busy: Callable[[], AbstractContextManager[None]],
        trying: Callable[[RankContext, str], AbstractContextManager[None]],
        *,
        passes_single: bool,
        is_frozen: bool,
    ) -> None:
        self.settled = FastPath(self.handle, self._replaces, passes_single=passes_single)
        self._known_choices = KnownChoices()
        self.tunes = False  # True while a launch may be a trial
        self.met: set[str] = set()  # contexts new, or provisional, that were launched while not tuning
        self._names = names
        self._contexts = contexts
        self._admission = admission
        self._new_candidates = new_candidates
        self._clock = clock
        self._busy = busy
        self._trying = trying
        self._is_frozen = is_frozen
        self._passes_single = passes_single
        self._lock = threading.RLock()

    # -- the launch ----------------------------------------------------------------------------------------

    def runner(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to put in place of `stock` while launches may be trials."""

        def run(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
            return self.handle(stock, tuner, args, kwargs)

        return run

    def handle(
        self, stock: Callable[..., Any], tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Launch the kernel once, as `Autotuner.run` would, with the config that this run plans for it."""
        if self._passes_single and len(tuner.configs) == 1:
            return stock(tuner, *args, **kwargs)
        if kwargs.get("warmup"):
            return interception.launch(tuner, self._quiet_config(tuner, args, kwargs), args, kwargs)
        if interception.is_capturing() or interception.is_async_compiling():
            config = self._quiet_config(tuner, args, kwargs)
            interception.run_pre_hook(tuner, config, args, kwargs)
            return interception.launch(tuner, config, args, kwargs)
        binding = self._binding(tuner, args, kwargs)
        local = binding.local
        candidate = self._candidate(binding)
        while True:
            try:
                result = self._launch_once(tuner, binding, candidate, args, kwargs)
                if not self.tunes and (local.is_settled or self._is_frozen):
                    self.settled.learn(tuner, binding.key, binding.configs[candidate])
                return result
            except Exception as error:
                if not self._replaces(tuner, binding.configs[candidate], args, kwargs, error):
                    raise
            candidate = local.chosen(binding)

    def _replaces(
        self,
        tuner: Autotuner,
        config: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
    ) -> bool:
        """Return whether a launch failed because of its config; then that is banned and another chosen."""
        reason = config_failure(error, kwargs.get("grid"), config.pre_hook)
        local = self._binding(tuner, args, kwargs).local
        candidate = identity.candidate_digest(config.all_kwargs())
        if reason is None or candidate not in dict(local.order):
            return False
        with self._lock:  # threads may launch it at once; what stands in for it since then has not failed
            if candidate not in local.bans:
                self._contexts.ban(local, candidate, reason)
            if local.choice in (candidate, None):
                local.choice = local.stand_in()
        self.settled.forget()
        if not self.tunes:
            self.met.add(local.name)  # the peers are to know
        return True

    def choose(self, name: str, options: Sequence[Any], key: Key) -> Any:
        """Answer `tunable`: return the option that this run plans."""
        found = self._known_choices.find(name, options, key)
        if found is not None:
            return found[0]
        texts = texts_of(name, options)
        with self._lock:
            by_text = dict(zip(texts, options, strict=True))
            local = self._admission.choice(name, key, identity.key_text(key), by_text)
        is_capturing = interception.is_capturing()
        candidate = local.stand_in() if is_capturing else self._candidate(local.bindings[0])
        place = texts.index(dict(local.order)[candidate])
        if not is_capturing:
            local.ran.add(candidate)
            local.launches += 1
            if not self.tunes and (local.is_settled or self._is_frozen):
                self._known_choices.learn(name, options, key, place)
        return options[place]  # of this call: an earlier one may have given equal ones of other types

    def _candidate(self, binding: Binding) -> str:
        """Return the candidate of this run, the same for all launches of it."""
        candidate = binding.local.chosen(binding)
        if not self.tunes and not binding.local.is_settled:
            self.met.add(binding.local.name)
        return candidate

    def _launch_once(
        self,
        tuner: Autotuner,
        binding: Binding,
        candidate: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        local = binding.local
        if self.tunes and local.launches == 0 and local.tries(candidate):
            with self._trying(local, candidate):
                return self._launch_now(tuner, binding, candidate, args, kwargs)
        return self._launch_now(tuner, binding, candidate, args, kwargs)

    def _launch_now(
        self,
        tuner: Autotuner,
        binding: Binding,
        candidate: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        local, config = binding.local, binding.configs[candidate]
        interception.run_pre_hook(tuner, config, args, kwargs)
        if self.tunes:
            self._ensure_loaded(tuner, binding, candidate, args, kwargs)
        if self.tunes and local.measures:
            mark = local.samples.start()
            result = interception.launch(tuner, config, args, kwargs)
            local.samples.stop(mark)
        else:
            result = interception.launch(tuner, config, args, kwargs)
        local.ran.add(candidate)
        local.launches += 1
        return result

    def _ensure_loaded(
        self,
        tuner: Autotuner,
        binding: Binding,
        candidate: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Compile and load before the first launch, so that no timed interval holds a compilation."""
        device = compiling.current_device()
        if device < 0 or (candidate, device) in binding.loaded:
            return
        with self._busy():
            interception.load(interception.compiled(tuner, binding.configs[candidate], args, kwargs))
        binding.loaded.add((candidate, device))

    def _quiet_config(self, tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the incumbent's config without admitting a context."""
        key = self._admission.key_of(tuner, args, kwargs)
        binding = self._admission.find(tuner, key) or self._admission.look(tuner, key, args, kwargs)
        return binding.configs[binding.local.stand_in(binding.configs)]

    def _binding(self, tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Binding:
        """Return what the launch belongs to; a context that is new is to be preflighted after the run."""
        key = self._admission.key_of(tuner, args, kwargs)
        binding = self._admission.find(tuner, key)
        if binding is not None:
            self._names.launched(tuner)
            return binding
        with self._lock:
            binding = self._admission.find(tuner, key)
            if binding is None:
                for known in self.settled.launched():
                    self._names.launched(known)
                binding = self._admission.admit(tuner, key, args, kwargs)
                if self.tunes and binding.local.measures and not interception.is_interpreted():
                    self._new_candidates.add(binding, args, kwargs)
            return binding

    # -- one run -------------------------------------------------------------------------------------------

    def begin_run(self, *, tunes: bool) -> None:
        """Forget the last run. `tunes`: launches may be trials."""
        self._names.begin_run()
        self.settled.begin_call()
        if not tunes and not self.tunes and not self._contexts.has_news:
            return  # one settled call after another: the choices stand
        self.tunes = tunes
        self.settled.forget()
        self._known_choices.forget()
        self._contexts.begin_run()
        if tunes and hasattr(self._clock, "prepare"):  # of `EventClock`: before a kernel may wait for a peer
            self._clock.prepare()

    def abandon_run(self) -> None:
        """Drop what the run under way has measured: it raised."""
        self._new_candidates.clear()
        self._contexts.abandon_run()

    def forget(self, names: Iterable[str]) -> None:
        """Drop contexts; the next launch admits them anew."""
        self._admission.forget(names)


class NewCandidates:
    """The candidates of the contexts that appeared in the run under way, on this rank.

    loading: entered around the loading of each.
    """

    def __init__(
        self, contexts: RankContexts, loading: Callable[[RankContext, str], AbstractContextManager[None]]
    ) -> None:
        self._contexts = contexts
        self._loading = loading
        # The first launches of the contexts: arguments are held no longer than the run.
        self._launches: list[tuple[Binding, tuple[Any, ...], dict[str, Any]]] = []

    def __bool__(self) -> bool:
        return bool(self._launches)

    def add(self, binding: Binding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in the first launch of a context."""
        self._launches.append((binding, args, kwargs))

    def clear(self) -> None:
        """Forget them: the run raised."""
        self._launches.clear()

    def preflight(self, terms: Terms) -> Iterator[tuple[RankContext, Tally]]:
        """Compile and load them, ban what fails, and yield how it went, context by context."""
        launches, self._launches = self._launches, []
        for binding, args, kwargs in launches:
            tuner, local = binding.tuner(), binding.local
            if tuner is None or local.announced:
                continue
            tried = {local.choice, *local.bans}
            untried = {digest: config for digest, config in binding.configs.items() if digest not in tried}
            loading = functools.partial(self._loading, local)
            found = compiling.preflight(tuner, untried, args, kwargs, terms, loading)
            if found.tally is not None:
                yield local, found.tally
            for candidate, reason in found.reasons.items():
                self._contexts.ban(local, candidate, reason)
