"""Files that others may have put there: no pipe or device is waited for, and nothing huge is read whole."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; anything else is a ValueError, and nothing is waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("not a regular file")
    return os.fdopen(descriptor, "rb")


def require_directory_of(path: Path) -> None:
    """Raise FileNotFoundError unless the directory is there that a new file is to be in."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: {path.parent} is no directory; make it first")


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file; more than `limit_bytes` of it is a ValueError."""
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise ValueError(f"larger than {limit_bytes} bytes")
    return content


def replace_whole(path: Path, temporary: str, text: str) -> None:
    """Replace a file, by one of that name beside it: a full disk or a killed writer leaves no half of it."""
    beside = path.with_name(temporary)
    beside.unlink(missing_ok=True)  # whatever it is: a link is not followed, a pipe not waited for
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
