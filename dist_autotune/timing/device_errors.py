"""Errors that the device reports and launches that do not end, in texts that name the culprit."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import torch

from ..errors import LaunchFailed, LaunchTimeout
from ..formatting import one_line

LISTED = 6  # launches that a message names
# What CUDA, HIP and Triton's launcher say; the class alone does not tell, Triton raises RuntimeError.
_REPORTED = re.compile(r"(CUDA|HIP) error|Triton Error \[(CUDA|HIP)\]", re.I)
_NEXT_STEP = {
    LaunchTimeout: "Nothing can end a launch from outside: end the process. Take this config out of the "
    "kernel's list, or raise timeout_s= if it is only slow.",
    LaunchFailed: "After most such errors the process cannot use the device any more: start it again, "
    "without that config; compute-sanitizer finds the faulty access.",
}


class DeviceFailed(LaunchFailed, torch.AcceleratorError):
    """A `LaunchFailed` that `except torch.AcceleratorError` catches, as it would the error behind it."""


@contextlib.contextmanager
def as_launch_failed(device: int | None = None, *, if_reported: bool = False) -> Iterator[None]:
    """Raise RuntimeErrors of the block as `LaunchFailed`; `if_reported`: only what the device reports."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LaunchFailed) or (if_reported and not is_reported(error)):
            raise
        where = "the device" if device is None else f"cuda:{device}"
        raise DeviceFailed(f"{where} reports {_described(error)}") from error


def is_reported(error: BaseException) -> bool:
    """Return whether an exception, raised by anyone, reports an error on the device."""
    if isinstance(error, LaunchFailed | torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and _REPORTED.search(str(error)) is not None
    )


def diagnosis(error: BaseException, where: str, launched: Sequence[str], log: str) -> str:
    """Return what happened in which run, what it had launched, where it is logged, what to do next."""
    kind = LaunchTimeout if isinstance(error, LaunchTimeout) else LaunchFailed
    happened = (
        str(error) if isinstance(error, LaunchTimeout | LaunchFailed) else f"raised {_described(error)}"
    )
    what = "Not ended" if kind is LaunchTimeout else "This run had launched"
    return f"{where}: {happened}. {what}: {listed(launched)}. {log}{_NEXT_STEP[kind]}"


def listed(launched: Sequence[str]) -> str:
    more = f" and {len(launched) - LISTED} more" if len(launched) > LISTED else ""
    return "; ".join(launched[:LISTED]) + more or "nothing"


def _described(error: BaseException) -> str:
    """Return class and first line: the rest of a CUDA error's text is the same for all of them."""
    return f"{type(error).__name__}: {one_line(str(error)).partition(' | ')[0]}"
