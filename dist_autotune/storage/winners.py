"""Winners on disk: one JSON file per entry, named after the kernel and a digest of all that must match.

An entry is only ever replaced as a whole (temporary file, `os.replace`), so a reader needs no lock and a
killed writer leaves nothing visible. The lock makes "compare, then replace" one step among writers, and one
temporary file enough: the next writer takes over what a killed one has left.
Whatever is wrong with a file or with the directory is a `CacheWarning`, and tuning goes on.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..codec import digest, from_json, parse_json, to_json
from ..errors import CacheWarning
from ..regular_files import read_bounded

SCHEMA_VERSION = 1  # raise it when the fields of EntryKey or their meaning change
LOCK_S = 10.0  # the longest wait for the directory's lock
MAX_ENTRY_BYTES = 16 << 20  # the largest of any use holds thousands of candidates in one of them
LAUNCHED = "launched"  # in it a folder for each function, with an empty file for each entry that it uses
_ENTRY_END = f"-{16 * '[0-9a-f]'}.json"  # of a file's name, as glob() takes it


@dataclass(frozen=True)
class EntryKey:
    """Everything that must match for an entry to be used."""

    kernel: str  # readable: the base function's name
    kernel_digest: str
    key: str  # canonical text of the tuning key
    constants: str  # constexpr arguments of the launch that are not in the key, canonical text
    candidates: tuple[str, ...]  # digests
    device: str
    capability: str
    triton_version: str
    world_size: int
    scope: str = ""  # the function, when contexts are not shared between functions
    agree: str = "key"
    driver: str = ""

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits that stand for all fields."""
        return digest(to_json(vars(self)))

    @property
    def file_name(self) -> str:
        """Return `kernel-digest.json`."""
        return f"{safe_name(self.kernel)}-{self.digest}.json"


@dataclass(frozen=True)
class Entry:
    """A settled context: the winner among the candidates of `key`. What no search finds is a ValueError."""

    key: EntryKey
    winner: str  # digest of the candidate
    config: str  # its text
    ms: float
    timings: Mapping[str, float] = field(default_factory=dict)  # candidate's text -> agreed ms
    created_at: str = ""  # wall clock, ISO 8601, UTC: for people
    package_version: str = ""

    def __post_init__(self) -> None:
        if self.winner not in self.key.candidates:
            raise ValueError(f"winner: {self.winner!r} is none of its {len(self.key.candidates)} candidates")
        if not 0 < self.ms < math.inf:
            raise ValueError(f"ms: expected a positive number, found {self.ms}")

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-representable form, without the schema version."""
        return {**vars(self), "key": vars(self.key), "timings": dict(self.timings)}


class Winners:
    """The entries of one directory; without a directory everything is a miss and nothing is stored."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._without_lock = ""  # why writes go on without the lock
        self._warned: set[str] = set()

    def get(self, key: EntryKey) -> Entry | None:
        """Return the entry of `key`; None if there is none that can be used."""
        return None if self.directory is None else self._read(self.directory / key.file_name)

    def entries(self, kernel: str = "") -> Iterator[Entry]:
        """Return every usable entry, by file name, or those of a kernel: no other file is read."""
        files = _entry_files(self.directory, safe_name(kernel) if kernel else "*")
        return filter(None, map(self._read, files))

    def record_launch(self, function: str, key: EntryKey) -> None:
        """Store that a function launches what an entry is for, if the directory can be written."""
        if self.directory is not None:
            folder = self.directory / LAUNCHED / function
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / key.file_name).touch()

    def launched_by(self, function: str) -> Iterator[Entry]:
        """Return the usable entries of what a function is known to launch."""
        files = _entry_files(None if self.directory is None else self.directory / LAUNCHED / function)
        return filter(None, (self._read(path.parents[2] / path.name) for path in files))

    def put(self, *entries: Entry) -> None:
        """Store each entry in place of an older one of its key, unless that has the same winner."""
        if self.directory is None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._lock(self.directory):
                for entry in entries:
                    if not self._holds(entry):
                        self._replace(self.directory / entry.key.file_name, entry)
        except OSError as error:
            self.warn_unwritable(self.directory, error.strerror or str(error))
        else:
            if self._without_lock:
                reason = f"{self._without_lock}. Wrote without it."
                self._warn(f"No lock on the cache in {self.directory}: {reason}")

    def clear(self) -> int:
        """Delete every entry, damaged ones too, and return how many there were."""
        files = _entry_files(self.directory)
        if files and self.directory is not None:
            with self._lock(self.directory):
                for path in files:
                    path.unlink(missing_ok=True)
                shutil.rmtree(self.directory / LAUNCHED, ignore_errors=True)
        return len(files)

    def export(self, path: Path) -> int:
        """Write all usable entries to one file, which `import_` reads, and return how many."""
        entries = [entry.as_dict() for entry in self.entries()]
        path.write_text(to_json({"schema": SCHEMA_VERSION, "entries": entries}, indent=True) + "\n")
        return len(entries)

    def import_(self, path: Path) -> int:
        """Store the entries of an exported file in place of others of their keys; return how many are stored.

        A file that is not an export, or damaged in any of its entries, is a ValueError.
        """
        data = parse(path.read_bytes())
        if not isinstance(data.get("entries"), list):
            raise ValueError("not an export of this cache")
        entries = [from_json(Entry, item) for item in data["entries"]]
        self.put(*entries)
        return sum(self._holds(entry) for entry in entries)

    def _holds(self, entry: Entry) -> bool:
        stored = self.get(entry.key)
        return stored is not None and stored.winner == entry.winner

    def _replace(self, path: Path, entry: Entry) -> None:
        temporary = path.with_name(f"{os.urandom(4).hex() if self._without_lock else 'entry'}.tmp")
        text = to_json({"schema": SCHEMA_VERSION, **entry.as_dict()}, indent=True) + "\n"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # or a power failure could leave the name without the contents
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _lock(self, directory: Path) -> Iterator[None]:
        """Hold the directory's lock; once it is not to be had, go on without it and never wait again."""
        with contextlib.ExitStack() as held:
            if not self._without_lock:
                try:
                    lock = FileLock(directory / ".lock")
                    held.enter_context(lock.acquire(timeout=LOCK_S, poll_interval=0.01))
                except (OSError, NotImplementedError) as error:  # held for long; a filesystem without locks
                    self._without_lock = getattr(error, "strerror", None) or str(error)
            yield

    def _read(self, path: Path) -> Entry | None:
        try:
            entry = from_json(Entry, parse(read_bounded(path, MAX_ENTRY_BYTES)))
            if entry.key.file_name != path.name:
                raise ValueError(f"its content belongs in {entry.key.file_name}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            self._warn(f"Ignored {path}: {error}. Tuning again.")
            return None
        return entry

    def warn_unwritable(self, directory: Path, reason: str) -> None:
        """Warn, once, that the directory or one in it cannot be written."""
        text = "Winners are not kept on disk, and what kills the process is not banned at its next start."
        self._warn(f"Cannot write the cache in {directory}: {reason}. {text}", about="writing")

    def _warn(self, text: str, about: str = "") -> None:
        if (about or text) not in self._warned:
            self._warned.add(about or text)
            warnings.warn(text, CacheWarning, stacklevel=3)


def safe_name(name: str) -> str:
    """Return a readable name as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:80] or "_"


def parse(content: bytes, schema_version: int = SCHEMA_VERSION) -> dict[str, Any]:
    """Return the JSON object in `content`; a ValueError says in a few words why there is none."""
    if not content.strip():
        raise ValueError("empty file")
    data = parse_json(content)
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError("no schema version")
    if data["schema"] != schema_version:
        raise ValueError(f"schema {data['schema']}, expected {schema_version}")
    return data


def _entry_files(directory: Path | None, kernel: str = "*") -> list[Path]:
    """Return the files that are named like entries: a directory given by mistake loses nothing else."""
    return [] if directory is None else sorted(directory.glob(kernel + _ENTRY_END))
