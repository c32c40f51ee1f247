"""Compiles and loads configs before they are timed, and tells their failures from the user's.

A launch that compiles inside its timed interval would be charged seconds for it, so a config is loaded
before its first sample; and a config that does not load on some rank must be known before it is tried.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime._async_compile import AsyncCompileMode

from ..formatting import counted
from ..triton_api import interception
from ..triton_api.launch import Launch, load
from .config_failures import config_failure
from .pool import NotCompiled, Pool, Tally, Terms
from .pre_hooks import rehearse


@dataclass(frozen=True)
class Preflight:
    """What compiling and loading the candidates of a context has shown."""

    reasons: Mapping[str, str] = field(default_factory=dict)  # of those that failed, by digest
    tally: Tally | None = None  # None: there was nothing to compile


def current_device() -> int:
    """Return the index of the device that Triton launches on; -1 in the interpreter."""
    return -1 if interception.is_interpreted() else torch.cuda.current_device()


def preflight(
    launch: Launch,
    configs: Mapping[str, Any],
    terms: Terms,
    loading: Callable[[str], AbstractContextManager[None]] = lambda digest: nullcontext(),
) -> Preflight:
    """Compile all `configs` in child processes, together with the other ranks of this host; load each here.

    loading: entered around the loading of each candidate. A config with a `pre_hook`, which may change what
    the kernel is compiled for, is compiled for what the hook makes of the arguments in a child. Where that
    cannot be found out, the config is left to its first launch, and the tally's remark says why.
    """
    if interception.is_interpreted() or not configs:
        return Preflight()
    began = time.monotonic()
    hooked = {digest: config for digest, config in configs.items() if config.pre_hook is not None}
    rehearsed = rehearse(launch, hooked, min(terms.limit_s, terms.until - began))
    reasons: dict[str, str] = {}
    kernels: dict[str, Any] = {}
    pool = Pool(terms)
    # The pool is left first: the mode, when it is left, waits for every compilation that it has asked for.
    with AsyncCompileMode(pool, ignore_errors=True), pool:
        for digest, config in configs.items():
            as_hooked = rehearsed.get(digest, launch)
            if isinstance(as_hooked, Launch):
                with _keeping_reason(reasons, digest):
                    kernels[digest] = as_hooked.compile(config)
        tally = pool.run()
        for digest, kernel in kernels.items():  # before the mode ends, which would swallow what went wrong
            with _keeping_reason(reasons, digest):
                kernels[digest] = kernel.result() if hasattr(kernel, "result") else kernel
    for digest, kernel in kernels.items():
        if digest not in reasons:
            with _keeping_reason(reasons, digest), loading(digest):
                load(kernel)
    tally.seconds = time.monotonic() - began
    if left_out := [why for why in rehearsed.values() if isinstance(why, str)]:
        left = f"{counted(len(left_out), 'candidate')} left to the first launch"
        remark = f"{left}, as pre_hook could not be rehearsed: {left_out[0]}"
        tally.remark = f"{tally.remark}; {remark}" if tally.remark else remark
    return Preflight(reasons, tally)


@contextlib.contextmanager
def _keeping_reason(reasons: dict[str, str], digest: str) -> Iterator[None]:
    """Swallow the failure of one config and keep why; other exceptions pass."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, NotCompiled) else config_failure(error)
        if reason is None:
            raise
        reasons[digest] = reason
