"""Tune Triton kernels where they run: in their function, on every rank, to one agreed config."""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    AgreementTimeout,
    CacheWarning,
    NotTuned,
    NoValidConfig,
    PeerFailed,
    RankMismatch,
    TuningError,
)
from .version import __version__

if TYPE_CHECKING:
    from .launch.tunable import tunable
    from .timing.clock import Clock, EventClock, WallClock
    from .triton_api.interception import is_tuning
    from .tuner.decorator import ContextualAutotuner, contextual_autotune
    from .tuner.report import TunedContext, TuningReport
    from .tuner.step_tuner import StepTuner

__all__ = [
    "AgreementTimeout",
    "CacheWarning",
    "Clock",
    "ContextualAutotuner",
    "EventClock",
    "NoValidConfig",
    "NotTuned",
    "PeerFailed",
    "RankMismatch",
    "StepTuner",
    "TunedContext",
    "TuningError",
    "TuningReport",
    "WallClock",
    "__version__",
    "contextual_autotune",
    "is_tuning",
    "tunable",
]

# Imported when first asked for, with torch and Triton: the command line reads logs without them, and a
# program under `dist-autotune run` may still set the environment that they read.
_MODULES = {
    "Clock": "timing.clock",
    "ContextualAutotuner": "tuner.decorator",
    "EventClock": "timing.clock",
    "StepTuner": "tuner.step_tuner",
    "TunedContext": "tuner.report",
    "TuningReport": "tuner.report",
    "WallClock": "timing.clock",
    "contextual_autotune": "tuner.decorator",
    "is_tuning": "triton_api.interception",
    "tunable": "launch.tunable",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
