"""Tune Triton kernels where they run: in their function, on every rank, to one agreed config."""

from .autotuner import ContextualAutotuner, contextual_autotune, is_tuning
from .clock import Clock, EventClock, WallClock
from .errors import (
    AgreementTimeout,
    CacheWarning,
    NoValidConfig,
    PeerFailed,
    RankMismatch,
    TuningError,
)
from .report import TunedContext, TuningReport
from .tunable import tunable
from .version import __version__

__all__ = [
    "AgreementTimeout",
    "CacheWarning",
    "Clock",
    "ContextualAutotuner",
    "EventClock",
    "NoValidConfig",
    "PeerFailed",
    "RankMismatch",
    "TunedContext",
    "TuningError",
    "TuningReport",
    "WallClock",
    "__version__",
    "contextual_autotune",
    "is_tuning",
    "tunable",
]
