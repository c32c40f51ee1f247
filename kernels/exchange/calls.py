"""Asks all open operations at once whether their calls went well: before a step, or a checkpoint.

`StepTuner` and `dist-autotune run` ask before each step of an optimizer, without waiting for the device.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from dist_autotune.for_operations import register_step_check

if TYPE_CHECKING:
    from .operation import Operation

POLL_S = 1e-4  # of the host that waits for the device


class UnderWay(NamedTuple):
    """The calls of an operation so far, and all before them on their streams."""

    is_done: Callable[[], bool]
    has_failed: Callable[[], bool]  # as far as the host can see; may be asked after closing
    longest_wait_s: float  # how long they may go on after a failure


_OPEN: weakref.WeakSet[Operation] = weakref.WeakSet()
_LEFT: list[UnderWay] = []  # of operations that did not meet their peers to close


def watch(operation: Operation) -> None:
    """Have `check_calls` ask this operation too, as long as it lives."""
    _OPEN.add(operation)


def leave(operation: Operation) -> None:
    """Remember the calls that an operation leaves on the device when it is abandoned."""
    with contextlib.suppress(RuntimeError):  # it must close
        if operation.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        _LEFT[:] = [*(each for each in _LEFT if not each.is_done()), operation.under_way()]


def wait_for_device(first: Operation | None = None) -> None:
    """Wait for the calls of all operations and for the device, for a bounded time if a call has failed.

    After a failure side streams may never end, as a peer that has given this rank up gives no more permits,
    and so the device may never be idle, whichever operation asks. Then the failures are raised, those of
    `first` before others.
    """
    others = (each for each in tuple(_OPEN) if each is not first)
    operations = [*others] if first is None else [first, *others]
    calls, deadline = [*(each.under_way() for each in operations), *_LEFT], math.inf
    while not all(each.is_done() for each in calls):
        now = time.monotonic()
        if now > deadline:
            for each in operations:
                each.raise_known_failure()
            raise TimeoutError(
                "the device does not end what it was given behind a call that failed, of an operation that "
                "is closed now. Begin anew in another process"
            )
        if deadline == math.inf and any(each.has_failed() for each in calls):
            deadline = now + max(each.longest_wait_s for each in calls)
        time.sleep(POLL_S)
    _LEFT[:] = [each for each in _LEFT if each not in calls]
    for device in {each.device for each in operations if each.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def check_calls(*, wait: bool = True) -> None:
    """Raise failures in calls of all open operations; call it before results are saved.

    wait: for the device first, so that no call is under way; else only failures so far are raised.
    """
    if wait and _OPEN:
        wait_for_device()
    for operation in tuple(_OPEN):
        operation.raise_known_failure()


register_step_check(functools.partial(check_calls, wait=False))
