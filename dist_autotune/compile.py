"""Compiling and loading configs before they are timed, and telling their failures from the user's.

A launch that compiles inside its timed interval would be charged seconds for it, so a config is loaded
before its first sample; and a config that does not load on some rank must be known before it is tried.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.autotuner import Autotuner

from . import intercept


def current_device() -> int:
    """Return the index of the device that Triton launches on; -1 in the interpreter."""
    return -1 if intercept.is_interpreted() else torch.cuda.current_device()


def preflight(
    tuner: Autotuner, configs: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, str]:
    """Compile all `configs` in parallel, load each; return the reasons of those that fail, by digest.

    Configs with a `pre_hook` are left out: the hook may change the arguments that the kernel is compiled
    for, and it must run only for a launch. They are compiled at their first launch.
    """
    chosen = {digest: config for digest, config in configs.items() if config.pre_hook is None}
    if intercept.is_interpreted() or not chosen:
        return {}
    reasons: dict[str, str] = {}
    kernels: dict[str, Any] = {}
    with ThreadPoolExecutor(os.cpu_count() or 1) as executor, AsyncCompileMode(executor, ignore_errors=True):
        for digest, config in chosen.items():
            with Reasons(reasons, digest):
                kernels[digest] = intercept.compiled(tuner, config, args, kwargs)
        for digest, kernel in kernels.items():  # before the mode ends, which would swallow what went wrong
            with Reasons(reasons, digest):
                kernels[digest] = intercept.finished(kernel)
    for digest, kernel in kernels.items():
        if digest not in reasons:
            with Reasons(reasons, digest):
                intercept.load(kernel)
    return reasons


class Reasons:
    """Swallows the failure of one config and notes why; other exceptions pass."""

    def __init__(self, reasons: dict[str, str], digest: str) -> None:
        self._reasons = reasons
        self._digest = digest

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        reason = None if error is None else intercept.load_failure(error)
        if reason is None:
            return False
        self._reasons[self._digest] = reason
        return True
