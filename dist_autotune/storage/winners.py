"""Winners on disk: one JSON file per entry, named after the kernel and a digest of its identity.

An entry is replaced as a whole (temporary file, `os.replace`), so a reader needs no lock and a killed writer
leaves nothing visible. Training steps store winners, so no write waits for the disk: after a power failure an
entry may be damaged, which is a miss. The lock makes "compare, then replace" one step among writers; they
share one temporary file, and the next writer overwrites that of a killed one. A fault of a file or of the
directory is a `CacheWarning`, and tuning goes on.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock
from msgspec import Struct
from msgspec.structs import asdict, replace

from ..codec import digest, parse, to_json
from ..errors import CacheWarning, warn
from ..formatting import context_label

SCHEMA_VERSION = 2  # raise it when the fields of EntryKey or their meaning change
LOCK_S = 10.0  # the longest wait for the directory's lock
MAX_BYTES = 256 << 20  # of a file that is read
LAUNCHED = "launched"  # in it a folder for each function, with an empty file for each entry that it uses
READING, WRITING = "reading", "writing"  # of a directory: faults of which one warning tells
BEST = 3  # candidates of an entry that are raced again after an upgrade
IMPORTED = "imported"  # the folder there of imported entries: every function looks at them
_ENTRY_END = f"-{16 * '[0-9a-f]'}.json"  # of a file's name, as glob() takes it


class EntryKey(Struct, frozen=True):
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
    driver: str = ""

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits that stand for all fields."""
        return digest(to_json(self))

    @property
    def relatives(self) -> str:
        """Return a digest of all fields but `key` and `candidates`."""
        return replace(self, key="", candidates=()).digest

    @property
    def lineage(self) -> EntryKey:
        """Return the part of a key that an upgrade of Triton, driver or source leaves as it is."""
        return replace(self, kernel_digest="", candidates=(), triton_version="", driver="")

    @property
    def file_name(self) -> str:
        """Return `kernel-digest.json`."""
        return f"{safe_name(self.kernel)}-{self.digest}.json"


class Evidence(Struct, frozen=True):
    """Facts on a winner besides its time; nothing is looked up by them."""

    torch_version: str = ""
    fastest_rank_ms: Mapping[str, float] = {}  # candidate's text -> ms
    config: Mapping[str, Any] = {}  # arguments of triton.Config; {}: not JSON
    arguments: tuple[tuple[str, Any], ...] = ()  # name and value of each part of the key; (): not JSON
    triton_file: str = ""  # where stock Triton would keep the result; "": nowhere
    full_name: str = ""  # of the kernel's function, with its module; "": a `tunable`
    best: tuple[str, ...] = ()  # digests of the BEST fastest candidates, the winner first

    def __post_init__(self) -> None:
        if self.config and not isinstance(kwargs := self.config.get("kwargs"), dict):
            raise ValueError(f"config: expected kwargs with names, found {type(kwargs).__name__}")


class Entry(Struct, frozen=True):
    """A settled context: the winner among `key`'s candidates. Raises ValueError for impossible fields."""

    key: EntryKey
    winner: str  # digest of the candidate
    config: str  # its text
    ms: float
    timings: Mapping[str, float] = {}  # candidate's text -> agreed ms
    fills: Mapping[str, float] = {}  # candidate's text -> how much of the SMs' time its launch fills
    created_at: str = ""  # wall clock, ISO 8601, UTC: for people
    package_version: str = ""
    evidence: Evidence = Evidence()

    def __post_init__(self) -> None:
        if self.winner not in self.key.candidates:
            raise ValueError(f"winner: {self.winner!r} is none of its {len(self.key.candidates)} candidates")
        if not 0 < self.ms < math.inf:
            raise ValueError(f"ms: expected a positive number, found {self.ms}")
        if wrong := [each for each in self.timings.values() if not 0 < each < math.inf]:
            raise ValueError(f"timings: expected positive numbers, found {wrong[0]}")
        if wrong := [each for each in self.fills.values() if not 0 < each <= 1]:
            raise ValueError(f"fills: expected parts of 1, found {wrong[0]}")

    @property
    def title(self) -> str:
        return context_label(self.key.kernel, self.key.key)

    @property
    def times(self) -> tuple[tuple[str, float, float], ...]:
        """Return agreed ms and fill of each candidate's text; a fill that is not known is 1."""
        return tuple((text, ms, self.fills.get(text, 1.0)) for text, ms in sorted(self.timings.items()))


@dataclass
class _Faults:
    """The faults of one directory that this process has met."""

    without_lock: str = ""  # why writes go on without the lock
    warned: set[str] = field(default_factory=set)  # of what it has warned


_FAULTS: dict[Path | None, _Faults] = {}  # by directory: many functions use one


class Winners:
    """The entries of one directory; without a directory everything is a miss and nothing is stored.

    tunes: a warning of a damaged entry says that its key is tuned again.
    """

    def __init__(self, directory: Path | None, *, tunes: bool = False) -> None:
        self.directory, self._tunes = directory, tunes
        self._faults = _FAULTS.setdefault(directory, _Faults())

    def get(self, key: EntryKey) -> Entry | None:
        """Return the entry of `key`; None: none that can be used."""
        return None if self.directory is None else self._read(self.directory / key.file_name)

    def entries(self, kernel: str = "") -> Iterator[Entry]:
        """Yield all usable entries, by file name. kernel: of this kernel; no other file is read."""
        files = self._list(self.directory, safe_name(kernel) if kernel else "*")
        return filter(None, map(self._read, files))

    def record_launch(self, function: str, key: EntryKey) -> None:
        """Record that a function launches the entry's context, if the directory can be written."""
        if self.directory is not None:
            folder = self.directory / LAUNCHED / function
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / key.file_name).touch()

    def launched_by(self, function: str) -> Iterator[Entry]:
        """Return the usable entries of the contexts that a function is known to launch."""
        files = self._list(None if self.directory is None else self.directory / LAUNCHED / function)
        return filter(None, (self._read(path.parents[2] / path.name) for path in files))

    def put(self, *entries: Entry, replaces: bool = True) -> None:
        """Store each entry; `replaces`: in place of one that is there."""
        if self.directory is None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._lock(self.directory):
                for entry in entries:
                    stored = self.get(entry.key)
                    if stored is None or (replaces and stored != entry):
                        temporary = f"{os.urandom(4).hex() if self._faults.without_lock else 'entry'}.tmp"
                        text = to_json({"schema": SCHEMA_VERSION, **asdict(entry)}, indent=True) + "\n"
                        replace_whole(self.directory / entry.key.file_name, temporary, text)
        except OSError as error:
            self.warn_unwritable(self.directory, error.strerror or str(error))
        else:
            if self._faults.without_lock:
                reason = f"{self._faults.without_lock}. Wrote without it."
                self._warn(f"No lock on the cache in {self.directory}: {reason}")

    def remove(self, entries: Sequence[Entry]) -> int:
        """Delete entries, and the folders that name no other; return how many there were."""
        if self.directory is not None:
            with self._lock(self.directory):
                for entry in entries:
                    for path in (self.directory, *(self.directory / LAUNCHED).glob("*")):
                        (path / entry.key.file_name).unlink(missing_ok=True)
                for folder in (self.directory / LAUNCHED).glob("*"):
                    with contextlib.suppress(OSError):  # it is not empty
                        folder.rmdir()
        return len(entries)

    def clear(self) -> int:
        """Delete every entry, damaged ones too, with its files; return how many there were."""
        files, directory = _entry_files(self.directory), self.directory
        if directory is not None and directory.is_dir():
            with self._lock(directory):
                for path in [*files, *directory.glob("*.tmp")]:
                    path.unlink(missing_ok=True)
                shutil.rmtree(directory / LAUNCHED, ignore_errors=True)
        return len(files)

    @contextlib.contextmanager
    def _lock(self, directory: Path) -> Iterator[None]:
        """Hold the directory's lock; once it is not to be had, go on without it and never wait again."""
        with contextlib.ExitStack() as held:
            if not self._faults.without_lock:
                try:
                    lock = FileLock(directory / ".lock")
                    held.enter_context(lock.acquire(timeout=LOCK_S, poll_interval=0.01))
                except (OSError, NotImplementedError) as error:  # held for long; a filesystem without locks
                    self._faults.without_lock = getattr(error, "strerror", None) or str(error)
            yield

    def _list(self, directory: Path | None, kernel: str = "*") -> list[Path]:
        try:
            return _entry_files(directory, kernel)
        except OSError as error:
            reason = f"{error.strerror or error}. Its winners are not used."
            self._warn(f"Cannot read the cache in {directory}: {reason}", about=READING)
            return []

    def _read(self, path: Path) -> Entry | None:
        try:
            entry = parse(read_bounded(path, MAX_BYTES), Entry, SCHEMA_VERSION)
            if entry.key.file_name != path.name:
                raise ValueError(f"its content belongs in {entry.key.file_name}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or READING not in self._faults.warned:
                self._warn(f"Ignored {path}: {error}.{' Tuning again.' if self._tunes else ''}")
            return None
        return entry

    def warn_unwritable(self, directory: Path, reason: str) -> None:
        """Warn, once in a process, that the directory or one in it cannot be written."""
        text = (
            "Winners are not kept on disk, and a candidate that kills the process twice is not banned. Set "
            "DIST_AUTOTUNE_CACHE_DIR to a directory that can be written."
        )
        self._warn(f"Cannot write the cache in {directory}: {reason}. {text}", about=WRITING)

    def _warn(self, text: str, about: str = "") -> None:
        if (about or text) not in self._faults.warned:
            self._faults.warned.add(about or text)
            warn(text, CacheWarning)


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a file; raises ValueError for a larger one, and for what is no regular file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")  # a pipe would be waited for
    if status.st_size > limit_bytes:
        raise ValueError(f"larger than {limit_bytes} bytes")
    return path.read_bytes()


def replace_whole(path: Path, temporary: str, text: str) -> None:
    """Replace a file atomically: a full disk or a killed writer leaves no half of it."""
    beside = path.with_name(temporary)
    beside.unlink(missing_ok=True)  # whatever it is: a link is not followed, a pipe not waited for
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def safe_name(name: str) -> str:
    """Return a readable name as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:80] or "_"


def _entry_files(directory: Path | None, kernel: str = "*") -> list[Path]:
    """Return the files that are named like entries: a directory given by mistake loses nothing else."""
    return [] if directory is None else sorted(directory.glob(kernel + _ENTRY_END))
