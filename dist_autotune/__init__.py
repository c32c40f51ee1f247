"""Tune Triton kernels where they run: in their function, on every rank, to one agreed config."""

from .errors import AgreementTimeout, CacheWarning, NoValidConfig, PeerFailed, RankMismatch, TuningError
from .launch.tunable import tunable
from .timing.clock import Clock, EventClock, WallClock
from .tuner.decorator import ContextualAutotuner, contextual_autotune, is_tuning
from .tuner.report import TunedContext, TuningReport
from .tuner.step_tuner import StepTuner
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
