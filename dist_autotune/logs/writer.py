"""What a session leaves on disk: `rank-N.log` for people and `rank-N.jsonl` with the same events.

Both are made from the records of `dist_autotune.logs.records`. They only grow, one `write` system call per
line: other sessions, and other processes with the same rank number, append to the same files, and a
crash leaves every event before it.
"""

from __future__ import annotations

import errno
import logging
import os
import warnings
from pathlib import Path
from typing import Self

from ..codec import to_json
from .lines import LogLines
from .records import (
    Banned,
    ContextSettled,
    Note,
    Preflighted,
    Record,
    RunFailed,
    SessionClosed,
)

logger = logging.getLogger("dist_autotune")


class SessionLog:
    """Writes records of one rank to `directory` and to the logger `dist_autotune`.

    The files are opened at the first record. A directory that cannot be written is one RuntimeWarning;
    tuning goes on. In a forked child nothing is written: its launches are no part of the session.
    """

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._directory = directory.absolute() if directory is not None else None
        self._files: tuple[AppendOnlyFile, AppendOnlyFile] | None = None
        if self._directory is not None:
            name = f"rank-{rank}"
            self._files = (
                AppendOnlyFile(self._directory / f"{name}.log"),
                AppendOnlyFile(self._directory / f"{name}.jsonl"),
            )
        self._lines = LogLines()
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, record: Record) -> None:
        """Append `record` to both files; it is with the operating system when this returns."""
        if os.getpid() != self._pid:
            return
        line = self._lines.line(record)
        logger.log(_level(record), "%s", line)
        if self._files is None:
            return
        text, jsonl = self._files
        try:
            jsonl.append(to_json(record.as_dict()))
            text.append(line)
        except OSError as error:
            self.close()
            self._files = None  # before the warning, which raises where warnings are errors
            warnings.warn(
                f"No more logs in {self._directory}: {error}. Tuning goes on without them.",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the files; a later record opens them again."""
        for file in self._files or ():
            file.close()


class AppendOnlyFile:
    """A file of lines that several processes append to: each line is one write with O_APPEND."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def append(self, line: str) -> None:
        """Append `line` and a line end, whole, or raise OSError."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        if self._descriptor is None:
            self._descriptor = self._open()
            data = self._torn_line_end(self._descriptor) + data
        if os.write(self._descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, "no space for a whole line", str(self._path))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    @staticmethod
    def _torn_line_end(descriptor: int) -> bytes:
        """Return the line end that a full disk kept from the last line, so that it spoils no other.

        Another process that is just appending can look like that: then there is an empty line, no harm.
        """
        size = os.fstat(descriptor).st_size
        return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def _level(record: Record) -> int:
    """Return INFO for what a user may want to follow, WARNING for a session that ends with one.

    A ban is INFO: a config too large for the device is an everyday answer to a trial, and it is told
    on every rank.
    """
    if isinstance(record, SessionClosed):
        return logging.WARNING if record.warning else logging.INFO
    followed = ContextSettled | Banned | Preflighted | RunFailed | Note
    return logging.INFO if isinstance(record, followed) else logging.DEBUG
