"""What stock Triton and tools built on it need of a result, to find it in files of their own."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import make_backend
from triton.runtime.autotuner import Autotuner
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from . import identity
from .launch import Key


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
    return {identity.candidate_digest(config.all_kwargs()) for config in configs}
