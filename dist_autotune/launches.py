"""Stands in for `Autotuner.run`: which context a launch belongs to, and which config it gets."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from triton.runtime.autotuner import Autotuner

from . import compile as compiling
from . import identity, intercept
from .clock import Clock
from .errors import TuningError
from .identity import KernelSource
from .intercept import Key
from .local import Binding, Claim, Local
from .payload import MIXED, Part
from .protocol import context_name
from .search import BY_LAUNCH, Context, Outcome
from .settings import digest
from .settled import SettledLaunches
from .stopwatch import Stopwatch


class Launches:
    """Stands in for `Autotuner.run`, and keeps the contexts that this rank has launched."""

    def __init__(
        self,
        clock: Clock,
        agree: str,
        statistic: str,
        rank: int,
        shared: Mapping[str, Context],
        aliases: Mapping[str, str],
        find_claim: Callable[[Local, Autotuner | None], Claim | None],
        on_ban: Callable[[Local, str, str], None],
        busy: Callable[[], AbstractContextManager[None]],
        *,
        passes_single: bool,
        is_frozen: bool,
    ) -> None:
        self.contexts: dict[str, Local] = {}
        self.clock = clock
        self.settled = SettledLaunches(self.handle, self._replaces, passes_single=passes_single)
        self.tunes = False  # True while a launch may be a trial
        self.met: set[str] = set()  # contexts new, or provisional, that were launched while not tuning
        self._agree = agree
        self._statistic = statistic
        self._rank = rank
        self._shared = shared
        self._aliases = aliases
        self._find_claim = find_claim
        self._on_ban = on_ban
        self._busy = busy  # while this rank compiles, its peers are to wait on
        self._is_frozen = is_frozen  # nothing will ever be tried: what is not settled now will never be
        self._passes_single = passes_single  # a kernel with one config is no context: no peer can have more
        self._bindings: weakref.WeakKeyDictionary[Autotuner, dict[Key, Binding]] = weakref.WeakKeyDictionary()
        self._ordinals: weakref.WeakKeyDictionary[Autotuner, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._taken: dict[str, set[int]] = {}  # kernel -> ordinals of Autotuners launched in this run
        self._families: dict[str, set[str]] = {}  # function and keys -> kernels launched
        self._lock = threading.RLock()
        # First launches of contexts of the run under way: arguments are held no longer than that.
        self._pending_preflight: list[tuple[Binding, tuple[Any, ...], dict[str, Any]]] = []

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
            return intercept.launch(tuner, self._quiet_config(tuner, args, kwargs), args, kwargs)
        if intercept.is_capturing() or intercept.is_async_compiling():
            config = self._quiet_config(tuner, args, kwargs)
            intercept.run_pre_hook(tuner, config, args, kwargs)
            return intercept.launch(tuner, config, args, kwargs)
        binding = self._binding(tuner, args, kwargs)
        local = binding.local
        candidate = self._candidate(local)
        while True:
            try:
                result = self._launch_once(tuner, binding, candidate, args, kwargs)
                if not self.tunes and (local.is_settled or self._is_frozen):
                    self.settled.learn(tuner, binding.key, binding.configs[candidate])
                return result
            except Exception as error:
                if not self._replaces(tuner, args, kwargs, error):
                    raise
            candidate = local.choice or local.stand_in()

    def _replaces(
        self, tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> bool:
        """Return whether a launch failed because of its config; then that is banned and another chosen."""
        binding = self._binding(tuner, args, kwargs)
        local = binding.local
        candidate = local.choice or local.choose()
        hook = binding.configs[candidate].pre_hook
        reason = intercept.load_failure(error, kwargs.get("grid"), hook)
        if reason is None:
            return False
        self._ban(local, candidate, reason)
        self.settled.forget()
        if not self.tunes:
            self.met.add(local.name)  # the peers are to know
        local.choice = local.stand_in()
        return True

    def choose(self, name: str, key: Key, key_text: str, options: dict[str, Any]) -> Any:
        """Answer `tunable`: return the option that this run plans."""
        kernel = digest(f"tunable|{name}|{list(options)}")
        with self._lock:
            local, slot = self._known(kernel, key_text)
            if local is None:
                source = KernelSource(name, name, "", "")
                local = self._admit_choice(context_name(kernel, slot), kernel, source, key, key_text, options)
                local.slot = slot
        if intercept.is_capturing():
            return local.bindings[0].configs[local.stand_in()]
        candidate = self._candidate(local)
        local.ran.add(candidate)
        local.launches += 1
        return local.bindings[0].configs[candidate]

    def _candidate(self, local: Local) -> str:
        """Return the candidate of this run, the same for all launches of it."""
        if local.choice is None:
            local.choice = local.choose()
        if not self.tunes and not local.is_settled:
            self.met.add(local.name)
        return local.choice

    def _launch_once(
        self,
        tuner: Autotuner,
        binding: Binding,
        candidate: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        local, config = binding.local, binding.configs[candidate]
        intercept.run_pre_hook(tuner, config, args, kwargs)
        if self.tunes:
            self._ensure_loaded(tuner, binding, candidate, args, kwargs)
        if self.tunes and local.measures:
            mark = local.stopwatch.start()
            result = intercept.launch(tuner, config, args, kwargs)
            local.stopwatch.stop(mark)
        else:
            result = intercept.launch(tuner, config, args, kwargs)
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
            intercept.load(intercept.compiled(tuner, binding.configs[candidate], args, kwargs))
        binding.loaded.add((candidate, device))

    def _quiet_config(self, tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the incumbent's config without admitting a context."""
        key = self._key(tuner, args, kwargs)
        binding = self._bindings.get(tuner, {}).get(key)
        if binding is None:
            configs = intercept.candidates_of(tuner, args, kwargs)
            kernel = self._kernel_id(tuner, intercept.source_of(tuner), launches=False)
            local = self._local(tuner, kernel, key, configs, args, kwargs)
            binding = Binding(weakref.ref(tuner), key, configs, local)
            local.bindings = local.bindings or [binding]
        candidate = binding.local.stand_in()
        return binding.configs.get(candidate) or next(iter(binding.configs.values()))

    def _ban(self, local: Local, candidate: str, reason: str) -> None:
        local.bans[candidate] = reason
        self._on_ban(local, candidate, reason)

    # -- which context a launch belongs to -----------------------------------------------------------------

    def _key(self, tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
        key = intercept.key_of(tuner, args, kwargs)
        try:
            hash(key)
        except TypeError as error:
            raise TuningError(
                f"{tuner.base_fn.__name__}: a value of its autotune key ({', '.join(tuner.keys)}) cannot be "
                f"hashed ({error}), and neither can stock Triton. Pass a tuple or a number instead."
            ) from None
        return key

    def _binding(self, tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Binding:
        by_key = self._bindings.get(tuner)
        key = self._key(tuner, args, kwargs)
        binding = by_key.get(key) if by_key is not None else None
        if binding is not None:
            return binding
        with self._lock:
            by_key = self._bindings.setdefault(tuner, {})
            if key not in by_key:
                by_key[key] = self._bind(tuner, key, args, kwargs)
                if self.tunes and by_key[key].local.measures and not intercept.is_interpreted():
                    self._pending_preflight.append((by_key[key], args, kwargs))
            return by_key[key]

    def _bind(self, tuner: Autotuner, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Binding:
        configs = intercept.candidates_of(tuner, args, kwargs)
        kernel = self._kernel_id(tuner, intercept.source_of(tuner))
        local = self._local(tuner, kernel, key, configs, args, kwargs)
        self.contexts[local.name] = local
        binding = Binding(weakref.ref(tuner), key, configs, local)
        local.bindings = [known for known in local.bindings if known.tuner() is not None]
        local.bindings.insert(0, binding)
        return binding

    def _local(
        self,
        tuner: Autotuner,
        kernel: str,
        key: Key,
        configs: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Local:
        """Return the context of a launch, the known one or a new one.

        A config that `Autotuner.cache` holds and that is none of the candidates is added to `configs`.
        """
        key_text = identity.key_text(key)
        known, slot = self._known(kernel, key_text)
        if known is not None:
            return known
        name = context_name(self._alias(kernel), slot)
        if name in self.contexts:  # of another Autotuner, one that shares its contexts with those of peers
            name = context_name(f"{kernel}!", slot)
        source, constants = intercept.source_of(tuner), intercept.constants_of(tuner, args, kwargs)
        order = tuple(zip(configs, intercept.texts_of(list(configs.values())), strict=True))
        stopwatch = Stopwatch(self.clock, self._statistic)
        local = Local(
            name=name,
            kernel=kernel,
            source=source,
            key=key,
            key_text=key_text,
            constants=constants,
            stopwatch=stopwatch,
            order=order,
            rank=self._rank,
            family=f"{self._family_of(kernel)}{kernel.partition('#')[2]}",
            slot=slot,
        )
        local.context = self._shared.get(name)
        local.claim = self._find_claim(local, tuner)
        if local.claim is not None and local.claim.candidate not in configs:
            cached = tuner.cache.get(key)
            if cached is not None and identity.candidate_digest(cached.all_kwargs()) == local.claim.candidate:
                configs[local.claim.candidate] = cached
                local.order += ((local.claim.candidate, str(cached)),)
            else:
                local.claim = None
        return local

    def _known(self, kernel: str, key_text: str) -> tuple[Local | None, str]:
        """Return the context of a kernel's key, if there is one, and what tells it from others of the kernel.

        That is the key, or with `agree="ordinal"` its order among those launched here.
        """
        own = [local for local in self.contexts.values() if local.kernel == kernel]
        for local in own:
            if local.key_text == key_text:
                return local, local.slot
        if self._agree == "key":
            return None, key_text
        taken = {local.slot for local in own}
        return None, next(slot for n in range(len(own) + 1) if (slot := f"@{n}") not in taken)

    def _admit_choice(
        self, name: str, kernel: str, source: KernelSource, key: Key, key_text: str, options: dict[str, Any]
    ) -> Local:
        order = tuple((digest(text), text) for text in options)
        stopwatch = Stopwatch(self.clock, self._statistic)
        local = Local(name, kernel, source, key, key_text, "", stopwatch, order, self._rank, is_choice=True)
        local.context = self._shared.get(name)
        configs = {digest(text): option for text, option in options.items()}
        local.bindings.append(Binding(lambda: None, key, configs, local))
        local.claim = self._find_claim(local, None)
        self.contexts[name] = local
        return local

    def _alias(self, kernel: str) -> str:
        """Return the id by which peers know a kernel, unless this rank has a kernel of that id itself."""
        alias = self._aliases.get(kernel, kernel)
        own = self._families.get(self._family_of(kernel), set())
        return kernel if alias.partition("#")[0] in own else alias

    @staticmethod
    def _family_of(kernel: str) -> str:
        return kernel.partition(".")[0]

    def _kernel_id(self, tuner: Autotuner, source: KernelSource, *, launches: bool = True) -> str:
        """Return the kernel's identity; see "kernel" in the vocabulary.

        Autotuners that share source and keys are told apart by their sets of configs, then by the
        order of first launch. One made anew for every call is new each time: it takes the lowest
        order that no other Autotuner has taken in this run. `launches=False` takes nothing.
        """
        family = digest(f"{source.digest}|{','.join(tuner.keys)}")
        if tuner in self._ordinals:
            kernel, ordinal = self._ordinals[tuner]
        else:
            digests = sorted(identity.candidate_digest(config.all_kwargs()) for config in tuner.configs)
            kernel = f"{family}.{digest(chr(10).join(digests))[:8]}"
            taken = self._taken.get(kernel, set())
            ordinal = next(n for n in range(len(taken) + 1) if n not in taken)
            if launches:
                self._families.setdefault(family, set()).add(kernel)
                self._ordinals[tuner] = (kernel, ordinal)
        if launches:
            self._taken.setdefault(kernel, set()).add(ordinal)
        return kernel if ordinal == 0 else f"{kernel}#{ordinal}"

    # -- one run -------------------------------------------------------------------------------------------

    def begin_run(self, *, tunes: bool) -> None:
        """Forget the last run. `tunes`: launches may be trials."""
        self._taken.clear()
        if not tunes and not self.tunes:
            return  # one settled call after another: the choices stand
        self.tunes = tunes
        self.settled.forget()
        for local in self.contexts.values():
            local.begin_run()

    def end_run(self, *, waits: bool) -> dict[str, Part]:
        """Return what is to be told the peers of this run.

        `waits`: read every clock now; otherwise only those whose device work is done.
        """
        return {local.name: self._tell(local, waits) for local in list(self._to_tell())}

    @property
    def has_new(self) -> bool:
        """Return whether `preflight_new` has work to do."""
        return bool(self._pending_preflight)

    def preflight_new(self) -> None:
        """Compile and load every candidate of the contexts that appeared in this run."""
        pending, self._pending_preflight = self._pending_preflight, []
        for binding, args, kwargs in pending:
            tuner, local = binding.tuner(), binding.local
            if tuner is None or local.announced:
                continue
            untried = {
                c: config for c, config in binding.configs.items() if c not in local.bans | {local.choice: ""}
            }
            for candidate, reason in compiling.preflight(tuner, untried, args, kwargs).items():
                self._ban(local, candidate, reason)

    def new_sources(self) -> dict[str, str]:
        """Return the source digests of the functions in the kernels that this run announces, by name."""
        locals_ = self.contexts.values()
        new = {
            local.source
            for local in locals_
            if local.told is not None and local.told.announcement is not None
        }
        told = {name for source in new for name, _ in source.texts}
        texts: dict[str, set[str]] = {}
        for name, text in (pair for local in locals_ for pair in local.source.texts):
            if name in told:
                texts.setdefault(name, set()).add(text)
        return {name: " ".join(sorted(digests)) for name, digests in texts.items()}

    def abandon_run(self) -> None:
        """Drop what the run under way has measured: it raised."""
        self._pending_preflight.clear()
        for local in self.contexts.values():
            local.stopwatch.abandon()
            local.begin_run()

    def take(self, contexts: Mapping[str, Context], outcomes: Mapping[str, Outcome]) -> None:
        """Take in what the ranks agreed of the run that `end_run` told."""
        for local in self.contexts.values():
            if local.told is None:
                continue
            context = local.context = contexts[local.name]
            local.announced = True
            local.told_bans.update(local.told.bans)
            by_launch = outcomes[local.name].judge == BY_LAUNCH
            counts = outcomes[local.name].kind == "sample" and by_launch
            local.stopwatch.take(waiting=context.waiting, counts=counts)

    def rename(self, names: Mapping[str, str]) -> None:
        """Call contexts as the peers do: their kernels are one, though their candidates differ."""
        for old, new in names.items():
            local = self.contexts.pop(old, None)
            if local is not None:
                local.name = new
                self.contexts[new] = local

    def forget(self, names: Iterable[str]) -> None:
        """Drop contexts; the next launch admits them anew."""
        gone = set(names)
        self.contexts = {name: local for name, local in self.contexts.items() if name not in gone}
        for tuner in list(self._bindings):
            by_key = self._bindings[tuner]
            self._bindings[tuner] = {key: b for key, b in by_key.items() if b.local.name not in gone}

    def _to_tell(self) -> Iterator[Local]:
        for local in self.contexts.values():
            has_run = local.ran or local.stopwatch.report is not None
            if has_run or local.bans.keys() - local.told_bans or local.retold() is not None:
                yield local

    def _tell(self, local: Local, waits: bool) -> Part:
        ran = None if not local.ran else next(iter(local.ran)) if len(local.ran) == 1 else MIXED
        has_run = local.ran or local.stopwatch.report is not None
        report = (None if has_run else local.retold()) or local.stopwatch.tell(ran, waits=waits)
        untold = {c: (self._rank, reason) for c, reason in local.bans.items() if c not in local.told_bans}
        kernel_id = self._alias(local.kernel) if local.family else ""
        siblings = len(self._families.get(self._family_of(local.kernel), ()))
        announcement = None if local.announced else local.announcement(kernel_id, siblings)
        local.told = replace(report, bans=untold, announcement=announcement)
        return local.told
