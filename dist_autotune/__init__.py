"""Tune Triton kernels where they run: in their function, on every rank, to one agreed config."""

from .errors import (
    AgreementTimeout,
    CacheWarning,
    NotTuned,
    NoValidConfig,
    PeerFailed,
    RankMismatch,
    TuningError,
)
from .launch.tunable import tunable
from .timing.clock import Clock, EventClock, WallClock
from .tuner.decorator import ContextualAutotuner, contextual_autotune, is_tuning
from .tuner.report import TunedContext, TuningReport
from .version import __version__

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
    "TunedContext",
    "TuningError",
    "TuningReport",
    "WallClock",
    "__version__",
    "contextual_autotune",
    "is_tuning",
    "tunable",
]
