"""Results where stock Triton keeps them, so that launches elsewhere use them; its listeners hear of them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any

from triton import knobs
from triton.runtime.autotuner import Autotuner

from .launch import Key


def publish(
    tuner: Autotuner, key: Key, config: Any, timings: Iterable[tuple[Any, float]], seconds: float
) -> None:
    """Write a result into the Autotuner, in stock types.

    Stock timings are (median, 20 %, 80 %) of one benchmark; the agreed time stands for all three.
    """
    tuner.cache[key] = config
    tuner.best_config = config
    with contextlib.suppress(TypeError):  # a config that holds a list cannot be a key, in stock neither
        tuner.configs_timings = {candidate: [ms, ms, ms] for candidate, ms in timings}
    tuner.bench_time = seconds


def announce(tuner: Autotuner, key: Key, *, cache_hit: bool) -> None:
    """Print a published result, and call the listener, where stock Triton would."""
    if knobs.autotuning.print and not cache_hit:
        print(
            f"Triton autotuning for function {tuner.base_fn.__name__},\nwith key as {key},\n"
            f"finished after {tuner.bench_time:.2f}s,\nbest config selected: {tuner.best_config};"
        )
    listener = getattr(knobs.autotuning, "listener", None)  # Triton 3.8 and later
    if listener is not None:
        function = tuner.fn  # the `@jit` function under heuristics and the like
        while not inspect.isfunction(function.fn):
            function = function.fn
        timings, seconds = getattr(tuner, "configs_timings", {}), None if cache_hit else tuner.bench_time
        found = {"best_config": tuner.best_config, "configs_timings": timings}
        listener(fn=function, key=key, **found, duration=seconds, cache_hit=cache_hit)
