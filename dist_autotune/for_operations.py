"""Names that operations of `dist_autotune.kernels` use beside the public ones."""

from __future__ import annotations

from typing import Any

from .errors import warn
from .launch.step_checks import register_step_check
from .launch.tunable import CachedChoice
from .launch.written_tensors import leave_unchecked
from .triton_api.interception import INTERCEPTION, settled_config

__all__ = [
    "CachedChoice",
    "announce",
    "leave_unchecked",
    "mark_provisional",
    "register_step_check",
    "settled_config",
    "warn",
]


def announce(line: str) -> None:
    """Add a line about an operation to the report of the session under way."""
    call = INTERCEPTION.call_here() if INTERCEPTION.calls else None
    if call is not None and call.announced is not None:
        call.announced[line] = None


def mark_provisional(tuner: Any, key: Any) -> None:
    """Mark a config in `Autotuner.cache` that nobody has timed: sessions tune its key."""
    from .launch import results  # it loads what only sessions need

    results.mark_provisional(tuner, key)
