"""Replaces `Autotuner.run` while a call of a tuned function is active, and says how launches run."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton import knobs
from triton.runtime import _async_compile
from triton.runtime.autotuner import Autotuner

from . import other_launchers
from .active_call import ActiveCall
from .other_launchers import Run

_IS_CAPTURING = torch.cuda.is_current_stream_capturing


class Interception:
    """Puts a runner in place of `Autotuner.run` while a decorated call is active.

    One place to patch, so one active call: others wait for `turn`. A forked child finds the stock function.
    """

    def __init__(self) -> None:
        self.turn = ActiveCall()
        self.active = False
        self.tuning = False  # a launch may be a trial
        self.chooser: Callable[..., Any] | None = None  # answers `tunable` during the active call
        self._replaced: Sequence[tuple[Any, Run]] = ()  # classes, and their `run` before

    def installed(self, runner: Callable[[Run], Run], chooser: Callable[..., Any]) -> Interception:
        """Replace each `run` by `runner` of it until the `with` block ends; `chooser` answers `tunable`."""
        _watch_forks()
        stock, others = vars(Autotuner)["run"], other_launchers.replacements(runner)
        # Before anything is replaced: a Ctrl-C may come between any two lines.
        self._replaced = [(Autotuner, stock), *((owner, before) for owner, before, _ in others)]
        self.chooser = chooser
        Autotuner.run = runner(stock)
        for owner, _, replacement in others:
            owner.run = replacement  # type: ignore[attr-defined]
        self.active = True
        return self

    # No generator, whose end could come when another call is active.
    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        """Put back what was replaced, if anything is."""
        for owner, before in self._replaced:
            owner.run = before
        self._replaced, self.active, self.chooser = (), False, None

    def restore(self) -> None:
        self.__exit__()
        self.tuning = False


INTERCEPTION = Interception()
PROGRAM = Interception()  # of a program that is tuned as a whole; calls of tuned functions lie above it


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    INTERCEPTION.restore()
    PROGRAM.restore()
    INTERCEPTION.turn.end()
    INTERCEPTION.turn.lock = threading.RLock()


def is_tuning() -> bool:
    """Return whether a launch may be a trial now: fast launch paths are for False only."""
    return INTERCEPTION.tuning or (PROGRAM.tuning and not INTERCEPTION.active)


def is_interpreted() -> bool:
    return bool(knobs.runtime.interpret)


def is_capturing() -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    predicate = torch.cuda.is_current_stream_capturing
    # Torch's own raises where there is no CUDA; another one, put there to pretend a capture, is believed.
    return (predicate is not _IS_CAPTURING or torch.cuda.is_initialized()) and predicate()


def is_async_compiling() -> bool:
    return _async_compile.active_mode.get() is not None
