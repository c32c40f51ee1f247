"""Everything the tuner raises or warns with; all errors derive from `TuningError`."""

from __future__ import annotations

import sys
import warnings

_NOT_THE_CALLERS = ("dist_autotune", "torch", "triton", "contextlib")  # packages


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the program that led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_CALLERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


class TuningError(Exception):
    """Base of every error that the tuner itself raises."""


class NoValidConfig(TuningError):
    """No config of a kernel works on every rank; the message lists each config's reason."""


class NotTuned(TuningError):
    """DIST_AUTOTUNE_MODE=strict met a key without a result; the message names the nearest that have one."""


class RankMismatch(TuningError, ValueError):
    """The ranks of one group do not run the same thing: versions, options, function or kernel source."""


class AgreementTimeout(TuningError, TimeoutError):
    """Some ranks did not reach an exchange in time; `missing_ranks` names them."""

    def __init__(self, message: str, missing_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = missing_ranks


class PutAside(AgreementTimeout):
    """Live peers do not call the function: this run counts for no rank, and the call returns."""


class PeerFailed(TuningError):
    """Another rank raised, in the tuned function or as it opens an operation: see `rank` and `error`."""

    def __init__(self, message: str, rank: int = -1, error: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


class PeerHasNoConfig(PeerFailed, NoValidConfig):
    """No config is left that works on another rank."""


class LaunchTimeout(TuningError, TimeoutError):
    """The device did not end a launch in time; the message names the launches that were running."""


class LaunchFailed(TuningError, RuntimeError):
    """The device reported an error during a run; the message names the launches of the run."""


class CaptureFailed(TuningError, RuntimeError):
    """objective="graph": this rank could not capture a run of the function into a CUDA graph."""


class FlowFailed(TuningError):
    """A function given as `search=` raised, or broke the contract of a flow; raised on all ranks."""


class NotRepeatable(TuningError, TypeError):
    """mode="replay" cannot repeat a call that was given an iterator: its first run uses it up."""


class CacheWarning(UserWarning):
    """A cache entry or directory could not be used; tuning goes on without it."""


class InvalidOption(TuningError, ValueError):
    """An argument or a `DIST_AUTOTUNE_*` variable has a value that cannot be used."""
