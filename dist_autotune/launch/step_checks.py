"""Checks before an optimizer's step: whether kernels that wait for peers have failed.

A kernel that waits for a peer gives it up after a bounded time, and its host learns of that later. The owner
of such kernels registers a check; `StepTuner` and `dist-autotune run` run all checks before each step of an
optimizer. A check does not wait for the device: the next one finds later failures.
"""

from __future__ import annotations

from collections.abc import Callable

_CHECKS: dict[Callable[[], None], None] = {}  # in the order of registration


def register_step_check(check: Callable[[], None]) -> Callable[[], None]:
    """Call `check`, which raises failures, before each step; return a function that removes it."""
    _CHECKS[check] = None
    return lambda: _CHECKS.pop(check, None)


def check_before_step() -> None:
    """Call all registered checks."""
    for check in tuple(_CHECKS):
        check()
