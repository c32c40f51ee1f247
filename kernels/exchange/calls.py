"""Asks all open operations at once whether their calls went well: before a step, or a checkpoint.

`StepTuner` and `dist-autotune run` ask before each step of an optimizer, without waiting for the device.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from dist_autotune.launch.step_checks import register_step_check

POLL_S = 1e-4  # of the host that waits for the device


class Caller(Protocol):
    """An operation with calls that may have failed."""

    device: torch.device

    def raise_known_failure(self) -> None:
        """Raise the failures that the host can see now."""

    def has_failed(self) -> bool:
        """Return whether there are any in calls that have reached the device."""

    def mark(self) -> Callable[[], bool]:
        """Return what tells whether its calls so far are done, and all before them."""

    def longest_wait_s(self) -> float:
        """Return how long its calls may go on behind a failed one."""


_OPEN: weakref.WeakSet[Caller] = weakref.WeakSet()
_LEFT: list[Callable[[], bool]] = []  # marks of operations that were closed after a failure


def watch(caller: Caller) -> None:
    """Have `check_calls` ask this operation too, as long as it lives."""
    _OPEN.add(caller)


def leave(caller: Caller) -> None:
    """Remember what a failed operation that is about to close may have left on the device."""
    if caller.has_failed():
        with contextlib.suppress(RuntimeError):  # it must close
            _LEFT.append(caller.mark())


def wait_for_device(first: Caller | None = None) -> None:
    """Wait for the calls of all operations and for the device, behind a failed call not for ever.

    Then side streams may wait for ever: a peer that has given this rank up gives no further permits. What is
    enqueued behind them, and the device as a whole, does not end, whichever operation asks. The failures are
    raised, those of `first` before others.
    """
    others = (each for each in tuple(_OPEN) if each is not first)
    callers = [*others] if first is None else [first, *others]
    marks, deadline = [*(each.mark() for each in callers), *_LEFT], math.inf
    while not all(is_done() for is_done in marks):
        now = time.monotonic()
        if now > deadline:
            for each in callers:
                each.raise_known_failure()
            raise TimeoutError(
                "the device does not end what it was given behind a call that failed, of an operation that "
                "is closed now. Begin anew in another process"
            )
        if deadline == math.inf and (_LEFT or any(each.has_failed() for each in callers)):
            deadline = now + max(each.longest_wait_s() for each in callers)
        time.sleep(POLL_S)
    _LEFT.clear()
    for device in {each.device for each in callers if each.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def check_calls(*, wait: bool = True) -> None:
    """Raise the failures in calls of all open operations; to be called before results are kept.

    wait: wait for the device first, so that no call is under way. Without it, failures so far are raised.
    """
    if wait and _OPEN:
        wait_for_device()
    for caller in tuple(_OPEN):
        caller.raise_known_failure()


def _check_without_waiting() -> None:
    check_calls(wait=False)


register_step_check(_check_without_waiting)
