"""Lists the compilations that the candidates of a launch need, and keeps the reason of each failure.

A launch that compiles inside its timed interval would be charged seconds for it, so a candidate is loaded
before its first sample; and one that does not load on some rank must be known before it is tried.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime._async_compile import AsyncCompileMode

from ..errors import TuningError
from ..formatting import counted, one_line
from ..triton_api import interception
from ..triton_api.launch import Launch, keep, withdraw
from .config_failures import config_failure
from .pre_hooks import rehearse


@dataclass(frozen=True, eq=False)
class Compilation:
    """How Triton compiles one candidate for a launch; holds none of the launch's arguments."""

    key: str  # names the binary in Triton's cache
    compile: Callable[[], Any]  # finds the binary there, or compiles it; returns the kernel
    keep: Callable[[Any], Any]  # puts the kernel where launches find it; returns the one they find


@dataclass(frozen=True)
class Planned:
    """How the candidates of a launch are compiled, by digest. Holds none of the launch's arguments."""

    compilations: Mapping[str, Compilation] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)  # compiled before, to be loaded
    reasons: Mapping[str, str] = field(default_factory=dict)  # of those that failed already
    remark: str = ""  # on those that are left to their first launch


def current_device() -> int:
    """Return the index of the device that Triton launches on; -1 in the interpreter."""
    if interception.is_interpreted():
        return -1
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        if torch.cuda.is_available():
            raise
        raise TuningError(
            f"there is no GPU to launch on ({one_line(str(error))}). To run kernels on the CPU, in Triton's "
            "interpreter, set TRITON_INTERPRET=1 before Python starts."
        ) from None


def on_device(device: int) -> AbstractContextManager[Any]:
    """Return a block in which Triton loads on a device of `current_device`."""
    return nullcontext() if device == current_device() else torch.cuda.device(device)


def plan(launch: Launch, configs: Mapping[str, Any], hooks_s: float) -> Planned:
    """Return the compilations that a launch needs; compile nothing.

    A `pre_hook` may change the arguments that the kernel is compiled for. So it is rehearsed in a child,
    within `hooks_s`. Where that fails, the first launch compiles the config, and the remark says why.
    """
    hooked = {digest: config for digest, config in configs.items() if config.pre_hook is not None}
    rehearsed = rehearse(launch, hooked, hooks_s)
    reasons: dict[str, str] = {}
    kernels: dict[str, Any] = {}
    compilations: dict[str, Compilation] = {}
    queue = _RecordingExecutor()
    # The queue is left first: the mode, when it is left, waits for all that it has asked for.
    with AsyncCompileMode(queue, ignore_errors=True), queue:
        for digest, config in configs.items():
            as_hooked = rehearsed.get(digest, launch)
            if isinstance(as_hooked, Launch):
                with keeping_reason(reasons, digest):
                    kernel = kernels[digest] = as_hooked.compile(config)
                    if hasattr(kernel, "result"):
                        withdraw(kernel)  # a launch on another thread would wait for it, and fail
                        compilations[digest] = queue.compilation_of(kernel)
    queue.left.__traceback__ = None  # it leads to this frame, and the launch
    remark = ""
    if left_out := [why for why in rehearsed.values() if isinstance(why, str)]:
        left = f"{counted(len(left_out), 'candidate')} left to the first launch"
        remark = f"{left}, as pre_hook could not be rehearsed: {left_out[0]}"
    there = {digest: kernel for digest, kernel in kernels.items() if digest not in compilations}
    return Planned(compilations, there, reasons, remark)


class _RecordingExecutor:
    """An executor for Triton's AsyncCompileMode that records the work and runs none."""

    def __init__(self) -> None:
        self._work: dict[Future[Any], Callable[[], Any]] = {}
        self._compilations: dict[Future[Any], Compilation] = {}
        self.left = CancelledError("not compiled yet")  # the mode finds it for all its requests

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work[future] = work
        return future

    def compilation_of(self, kernel: Any) -> Compilation:
        """Return the compilation of a `FutureKernel`; configs that make one binary share it."""
        future = kernel.future
        if future not in self._compilations:
            key = str(future._key)  # put there by AsyncCompileMode
            self._compilations[future] = Compilation(
                key, self._work[future], functools.partial(keep, kernel.finalize_compile)
            )
        return self._compilations[future]

    def __enter__(self) -> _RecordingExecutor:
        return self

    def __exit__(self, *exception: object) -> None:
        for future in self._work:  # so the mode forgets it, and a launch does not find it
            future.set_exception(self.left)


@contextlib.contextmanager
def keeping_reason(reasons: dict[str, str], digest: str) -> Iterator[None]:
    """Swallow the failure of one config and keep why; other exceptions pass."""
    try:
        yield
    except Exception as error:
        reason = config_failure(error)
        if reason is None:
            raise
        reasons[digest] = reason
        error.__traceback__ = None  # a frame of Triton's holds the error, and the trace the launch
