"""The launch path once everything is settled: one look-up, then the launch that stock Triton would make."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from triton.runtime.autotuner import Autotuner

from .intercept import Handler, Key, key_of


class SettledLaunches:
    """Stands in for `Autotuner.run` in settled calls.

    It knows the configs that `learn` told it; every other launch goes to the slow handler, which admits
    what is new. Measured costs: docs/benchmarks.
    """

    def __init__(self, slow: Handler) -> None:
        self._slow = slow
        self._ready: weakref.WeakKeyDictionary[Autotuner, dict[Key, tuple[Any, dict[str, Any]]]]
        self._ready = weakref.WeakKeyDictionary()

    def learn(self, tuner: Autotuner, key: Key, config: Any) -> None:
        self._ready.setdefault(tuner, {})[key] = (config, config.all_kwargs())

    def forget(self) -> None:
        self._ready.clear()

    def runner(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to put in place of `stock`."""
        ready, slow = self._ready, self._slow

        def run(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
            try:
                config, options = ready[tuner][key_of(tuner, args, kwargs)]
            except (KeyError, TypeError):  # new, or a key that cannot be hashed
                return slow(stock, tuner, args, kwargs)
            if kwargs.get("warmup"):
                return slow(stock, tuner, args, kwargs)
            tuner.best_config = config
            if config.pre_hook is not None:
                named = dict(zip(tuner.arg_names, args, strict=False))
                config.pre_hook({**named, **kwargs, **options})
            return tuner.fn.run(*args, **kwargs, **options)

        return run
