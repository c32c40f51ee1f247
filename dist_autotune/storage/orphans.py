"""Journals whose processes are gone: found by their locks, read, taken up by one process or deleted.

An owner holds a lock on its file, which ends with the process, whatever ends that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ..codec import parse_json
from ..search.unfinished import EXACT, EXPLAINED, INEXACT, Crash, Event

SCHEMA_VERSION = 1
FOLDER = "journal"  # in the cache's directory
IDLE, RUNNING = "idle", "running"  # or the context whose launch is under way
FILE_NAME = re.compile(r".+-[0-9a-f]{16}-rank-\d+-[0-9a-f]{8}\.jsonl")
MAX_BYTES = 256 << 20
_ATTEMPTS = 10
# By this process: its own locks do not keep it out, and closing one of its files would end the lock.
OWNED: set[str] = set()

Samples: TypeAlias = dict[str, dict[str, list[tuple[float, float]]]]
"""Context (or "": whole runs) -> candidate -> (ms, gap ms) of each run."""


@dataclass
class Orphan:
    """A journal whose process is gone. This process holds its lock until `release` or `remove`."""

    path: Path
    descriptor: int
    session: str = ""
    devices: str = ""  # of all ranks
    events: list[Event] = field(default_factory=list)
    samples: Samples = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)  # context -> all that samples of it depend on
    crash: Crash | None = None

    def release(self) -> None:
        """Leave the file to whoever comes next."""
        OWNED.discard(str(self.path))
        os.close(self.descriptor)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        self.release()


def journals_in(directory: Path) -> dict[Path, float]:
    """Return the journals of a directory with their ages in seconds, those last written first."""
    ages_s = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if FILE_NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # its owner has ended
                    ages_s[Path(entry.path)] = time.time() - entry.stat().st_mtime
    return dict(sorted(ages_s.items(), key=lambda item: (item[1], item[0])))


def new_file(path: Path) -> int:
    """Return the descriptor of a new file; another process may just delete the directory, as it was empty."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    raise OSError(errno.ENOENT, "the directory is deleted again and again", str(path.parent))


def is_orphan(path: Path) -> bool:
    """Return whether the process that wrote a journal is gone."""
    orphan = adopt(path)
    if orphan is not None:
        orphan.release()
    return orphan is not None


def remove_orphans(directory: Path) -> int:
    """Delete the journals whose processes are gone, and return how many there were."""
    orphans = [orphan for path in journals_in(directory) if (orphan := adopt(path)) is not None]
    for orphan in orphans:
        orphan.remove()
    return len(orphans)


def read_into(orphan: Orphan, rank: int) -> None:
    """Read a journal, but for a last line without its end; a ValueError says in a few words what is wrong."""
    size = os.fstat(orphan.descriptor).st_size
    if size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    content = os.pread(orphan.descriptor, size, 0)
    lines = content.split(b"\n")[:-1]
    if len(lines) < 2:
        raise ValueError("damaged journal (no header)")
    tried: dict[str, Any] = {}
    try:
        first, header, *rest = map(_parsed, lines)
        if header["schema"] != SCHEMA_VERSION:
            raise ValueError(f"schema {header['schema']}, expected {SCHEMA_VERSION}")
        orphan.session = header["session"]
        failed = False
        for line in rest:
            _take_line(orphan, line)
            failed = "failed" in line or (failed and "tries" not in line)
            tried = line if "tries" in line else tried
        if first["run"] == tried.get(
            "run"
        ):  # else the machine died with the last lines, or nothing was tried
            orphan.crash = _crash(rank, first["now"].strip(), tried, failed=failed)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged journal ({type(error).__name__}: {error})") from None


def _parsed(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise ValueError(f"damaged journal ({error})") from None


def _crash(rank: int, mark: str, tried: dict[str, Any], *, failed: bool) -> Crash | None:
    """Return what the mark and the last line of tries tell of the owner's end; None if that was orderly."""
    suspects = {context: each["candidate"] for context, each in tried["tries"].items()}
    if mark in suspects:
        return Crash(rank, tried["run"], tried["at"], EXACT, {mark: suspects[mark]})
    if mark != IDLE:
        return Crash(rank, tried["run"], tried["at"], INEXACT, suspects)
    return Crash(rank, tried["run"], tried["at"], EXPLAINED) if failed else None


def _take_line(orphan: Orphan, line: dict[str, Any]) -> None:
    orphan.session = line.get("session", orphan.session)
    orphan.devices = line.get("devices", orphan.devices)
    orphan.entries.update(line.get("entries", {}))
    orphan.events += [{kind: line[kind]} for kind in ("open", "merged", "bans", "again") if kind in line]
    for context, candidates in line.get("samples", {}).items():
        orphan.samples[context] = {c: [(ms, gap) for ms, gap in runs] for c, runs in candidates.items()}
    for context, (candidate, ms, gap_ms) in line.get("own", {}).items():
        orphan.samples.setdefault(context, {}).setdefault(candidate, []).append((ms, gap_ms))


def adopt(path: Path) -> Orphan | None:
    """Return the journal, locked by this process; None if another one writes it, or it cannot be had."""
    if str(path) in OWNED:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # taken by another process meanwhile, or not ours to lock
        return None
    try:
        lock(descriptor)
        found = os.fstat(descriptor)
        is_there = found.st_nlink > 0 and stat.S_ISREG(found.st_mode)  # or another process has deleted it
    except OSError:
        is_there = False
    if not is_there:
        os.close(descriptor)
        return None
    OWNED.add(str(path))
    return Orphan(path, descriptor)


def lock(descriptor: int) -> None:
    """Take the lock or raise OSError at once.

    A lock of the process (POSIX): a forked child, such as a data loader's, does not hold it on after the
    owner's death, as it would a lock of the open file (flock).
    """
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def first_line(mark: str, run: int) -> bytes:
    """Return a journal's first line, of the same length for every mark and run."""
    return f'{{"now":"{mark:<16}","run":{run:>9}}}\n'.encode()
