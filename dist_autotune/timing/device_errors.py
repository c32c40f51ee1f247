"""Errors that the device reports, as errors of a launch."""

from __future__ import annotations

import contextlib
import re

import torch

from ..errors import LaunchFailed
from ..formatting import described, one_line

# What CUDA, HIP and Triton's launcher say; the class alone does not tell, Triton raises RuntimeError.
_REPORTED = re.compile(r"(CUDA|HIP) error|Triton Error \[(CUDA|HIP)\]", re.I)


class DeviceFailed(LaunchFailed, torch.AcceleratorError):
    """A `LaunchFailed` that is a torch.AcceleratorError too, like the error behind it."""


class as_launch_failed(contextlib.AbstractContextManager[None]):
    """Raise RuntimeErrors of the block as `LaunchFailed`; `if_reported`: only what the device reports."""

    __slots__ = ("_device", "_if_reported")

    def __init__(self, device: int | None = None, *, if_reported: bool = False) -> None:
        self._device, self._if_reported = device, if_reported

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, LaunchFailed):
            return
        if is_reported(error) or not self._if_reported:
            where = "the device" if self._device is None else f"cuda:{self._device}"
            raise DeviceFailed(f"{where} reports {first_line(error)}") from error


def is_reported(error: BaseException) -> bool:
    """Return whether an exception, raised by anyone, reports an error on the device."""
    if isinstance(error, LaunchFailed | torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and _REPORTED.search(str(error)) is not None
    )


def first_line(error: BaseException) -> str:
    """Return class and first line: the rest of a CUDA error's text is the same for all of them."""
    return one_line(described(error)).partition(" | ")[0]
