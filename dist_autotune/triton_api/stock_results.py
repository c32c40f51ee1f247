"""Writes results where stock Triton keeps them: in the Autotuner; and names the files of its own cache."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import make_backend
from triton.runtime.autotuner import Autotuner
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from . import identity
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


def arguments_of(config: Any) -> dict[str, Any]:
    """Return the arguments of `triton.Config` that make a config; {}: it has a hook, or is not JSON."""
    arguments = {name: value for name, value in vars(config).items() if name != "pre_hook"}
    return arguments if config.pre_hook is None and is_plain(arguments) else {}


def is_plain(value: Any) -> bool:
    """Return whether JSON can hold a value."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def result_file(tuner: Autotuner, key: Key, configs: Mapping[str, Any]) -> str:
    """Return where stock Triton keeps a result with `cache_results=True`, below its cache directory.

    configs: the candidates after pruning, by digest. "": it keeps none, as a config has a hook or kernels are
    interpreted; or the name cannot be known, as equal configs were pruned or the driver cannot be asked.
    """
    function = tuner.fn
    while not isinstance(function, JITFunction) and hasattr(function, "fn"):
        function = function.fn
    candidates = list(configs.values())
    if not isinstance(function, JITFunction) or not key or any(config.pre_hook for config in candidates):
        return ""
    if len(_digests(tuner.configs)) < len(tuner.configs):
        if len(candidates) < len(_digests(tuner.configs)):
            return ""
        candidates = tuner.configs
    try:
        compiler = make_backend(driver.active.get_current_target()).hash()
    except (RuntimeError, OSError):  # no driver, no ptxas: no reason to end a session
        return ""
    parts = [
        triton_key(),
        compiler,
        function.cache_key,
        str(sorted(get_cache_invalidating_env_vars().items())),
        str(key),
        *map(str, candidates),
    ]
    made_of = hashlib.sha256("-".join(parts).encode()).digest()
    folder = base64.b32encode(made_of).decode().rstrip("=")
    return f"{folder}/{function.__name__[:150]}.autotune.json"


def _digests(configs: Iterable[Any]) -> set[str]:
    return {identity.config_digest(config) for config in configs}
