"""Asks all open operations at once whether their calls went well: before a step, or a checkpoint.

`StepTuner` and `dist-autotune run` ask before each step of an optimizer, without waiting for the device.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from dist_autotune.launch.step_checks import register_step_check


class Caller(Protocol):
    """An operation with calls that may have failed."""

    def raise_known_failure(self) -> None:
        """Raise the failures that the host can see now."""

    def wait_for_device(self) -> None:
        """Wait for the calls so far, behind a failed one not for ever."""


_OPEN: weakref.WeakSet[Caller] = weakref.WeakSet()


def watch(caller: Caller) -> None:
    """Have `check_calls` ask this operation too, as long as it lives."""
    _OPEN.add(caller)


def check_calls(*, wait: bool = True) -> None:
    """Raise the failures in calls of all open operations; to be called before results are kept.

    wait: wait for the device first, so that no call is under way. Without it, failures so far are raised.
    """
    for caller in tuple(_OPEN):
        if wait:
            caller.wait_for_device()
        caller.raise_known_failure()


def _check_without_waiting() -> None:
    check_calls(wait=False)


register_step_check(_check_without_waiting)
