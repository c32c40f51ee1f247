"""The launch path once everything is settled: one look-up, then the launch that stock Triton would make."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from triton.runtime.autotuner import Autotuner

from ..triton_api.launch import Key, Launch, key_of


class _Known:
    """The settled keys of one Autotuner, and the last call that launched it here."""

    __slots__ = ("by_key", "call")

    def __init__(self) -> None:
        self.by_key: dict[Key, tuple[Any, dict[str, Any]]] = {}
        self.call = 0


class FastPath:
    """Stands in for `Autotuner.run` in settled calls: launches the configs that `add` was given.

    slow: makes every other launch, all of them while trials are made; it leaves out what has failed in a
    launch. failure: the candidate that has failed by an exception, with the reason; {}: that is the user's.
    passes_single: leave a kernel with one config to stock. Measured costs: docs/benchmarks.
    """

    def __init__(
        self,
        slow: Callable[..., Any],
        failure: Callable[[Launch, Any, Exception], dict[str, str]],
        *,
        passes_single: bool,
    ) -> None:
        self._slow, self._failure, self._passes_single = slow, failure, passes_single
        self._ready: weakref.WeakKeyDictionary[Autotuner, _Known] = weakref.WeakKeyDictionary()
        self._call = 0

    def add(self, tuner: Autotuner, key: Key, config: Any) -> None:
        self._ready.setdefault(tuner, _Known()).by_key[key] = (config, config.all_kwargs())

    def clear(self) -> None:
        self._ready.clear()

    def launched(self) -> list[Autotuner]:
        """Return the Autotuners that the call under way has launched here."""
        return [tuner for tuner, known in list(self._ready.items()) if known.call == self._call]

    def begin_call(self) -> None:
        self._call += 1

    def runner(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to put in place of `stock` for one call."""
        call = self._call
        ready, slow, failure, passes_single = self._ready, self._slow, self._failure, self._passes_single

        def run(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
            known = ready.get(tuner)
            if known is None:
                if passes_single and len(tuner.configs) == 1:
                    return stock(tuner, *args, **kwargs)
                return slow(Launch(tuner, args, kwargs))
            known.call = call
            try:
                config, options = known.by_key[key_of(tuner, args, kwargs)]
            except (KeyError, TypeError):  # new, or a key that cannot be hashed
                return slow(Launch(tuner, args, kwargs))
            if kwargs.get("warmup"):
                return slow(Launch(tuner, args, kwargs))
            tuner.best_config = config
            try:
                if config.pre_hook is not None:
                    named = dict(zip(tuner.arg_names, args, strict=False))
                    config.pre_hook({**named, **kwargs, **options})
                return tuner.fn.run(*args, **kwargs, **options)
            except Exception as error:
                if not (failed := failure(Launch(tuner, args, kwargs), config, error)):
                    raise
            return slow(Launch(tuner, args, kwargs), failed)

        return run
