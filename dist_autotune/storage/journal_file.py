"""The file of a journal: JSON lines, and a first line of fixed width that is overwritten.

Each line is one `write` without `fsync`: what is with the operating system outlives the process, and nothing
but the last run is lost if the machine dies with it. The owner holds a lock on the file, which ends with the
process, so a file without a lock is an orphan. A forked child writes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .orphans import OWNED, lock, new_file


class JournalFile:
    """One file after another in `directory`, of names that begin with `stem`. None: nothing is written.

    complain: told, as (directory, reason), what keeps it from being written. From then on nothing is.
    """

    def __init__(self, directory: Path | None, stem: str, complain: Callable[[Path, str], None]) -> None:
        self.directory = directory
        self._stem = stem
        self._complain = complain
        self._path: Path | None = None
        self._descriptor = -1
        self._pid = os.getpid()
        self._lines: list[dict[str, Any]] = []  # to be written when there is a file

    @property
    def is_own(self) -> bool:
        """Return whether this is the process that it belongs to, and no forked child."""
        return os.getpid() == self._pid

    @property
    def exists(self) -> bool:
        return self._path is not None

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was written, not even to be kept until there is a file."""
        return not (self._lines or self._path)

    def write(self, line: dict[str, Any]) -> None:
        """Write a line, or keep it until there is a file."""
        if self._path is None:
            if self.directory is not None:
                self._lines.append(line)
        elif self.is_own:
            with self._stopping_at_errors():
                self._write_bytes(_encoded(line))

    def overwrite_first(self, line: bytes) -> None:
        """Replace the first line with one of the same length."""
        with self._stopping_at_errors():
            os.pwrite(self._descriptor, line, 0)

    def create(self, first_line: bytes) -> bool:
        """Make the file, with all lines so far; return whether it is there."""
        if self.directory is None or not self.is_own:
            return False
        path = self.directory / f"{self._stem}-{os.urandom(4).hex()}.jsonl"
        with self._stopping_at_errors():
            hidden = path.with_name(f".{path.name}")  # nobody is to take it for an orphan before it is locked
            self._descriptor = new_file(hidden)
            OWNED.add(str(path))
            self._path = path
            lock(self._descriptor)
            self._write_bytes(first_line + b"".join(map(_encoded, self._lines)))
            os.rename(hidden, path)
            self._lines.clear()
        return self.exists

    def remove(self) -> None:
        """Delete the file and forget the lines that were to be written: the next one begins anew."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._close()
        self._lines.clear()

    def _write_bytes(self, data: bytes) -> None:
        if os.write(self._descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextlib.contextmanager
    def _stopping_at_errors(self) -> Iterator[None]:
        """Go on without a journal when the block fails; half a journal would accuse the wrong candidate."""
        try:
            yield
        except OSError as error:
            directory, self.directory = self.directory, None
            self._lines.clear()
            if self._path is not None:
                for path in (self._path, self._path.with_name(f".{self._path.name}")):
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)
                self._close()
            assert directory is not None
            self._complain(directory, error.strerror or str(error))

    def _close(self) -> None:
        os.close(self._descriptor)
        OWNED.discard(str(self._path))
        self._path, self._descriptor = None, -1


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
