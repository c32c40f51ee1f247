"""Names the candidate under suspicion on disk, so that the next start bans what killed the process.

A candidate is under suspicion in the first run that launches it: alone while its launch, or its load, is
under way, else with all others that are new in the run. The file holds one line that is overwritten; its
owner holds a lock, which ends with the process, whatever ends that. Bans stay until the function settles.

Whatever is wrong with the file or its directory is a `CacheWarning`, and tuning goes on without a guard.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import re
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..codec import digest, from_json, parse_json
from ..errors import CacheWarning
from ..search.messages import EXACT, EXPLAINED, INEXACT, Crash, CrashBans

SCHEMA_VERSION = 2
FOLDER = "crash-guard"  # in the cache's directory
MAX_AGE_S = 24 * 3600.0  # of a file that is still believed: what crashed longer ago may be mended
MAX_BYTES = 1 << 20
_FILE_NAME = re.compile(r".+-[0-9a-f]{16}-rank-\d+-[0-9a-f]{8}\.json")
_OWNED: set[str] = set()  # by this process, which its own locks do not keep out


class CrashGuard:
    """The crash guard of one tuned function on this rank; without a directory nothing is written or found.

    identity: what a ban depends on besides kernels and keys. complain: called with (directory, reason) when
    the file cannot be written.
    """

    def __init__(
        self,
        directory: Path | None,
        identity: Mapping[str, str],
        name: str,
        rank: int,
        complain: Callable[[Path, str], None],
    ) -> None:
        readable = re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:80] or "_"
        self._stem = f"{readable}-{digest(json.dumps(dict(identity), sort_keys=True))}-rank-{rank}"
        self._directory, self._rank, self._complain = directory, rank, complain
        self._pid = os.getpid()
        self._path: Path | None = None
        self._descriptor = -1
        self._lock = threading.RLock()
        self._session, self._bans = "", CrashBans()
        self._run, self._suspects = 0, dict[str, str]()  # context -> candidate, new in the run under way
        self._has_run: set[tuple[str, str]] = set()  # launched in a run that this process completed
        self._has_looked = False

    # -- what an earlier process has left ------------------------------------------------------------------

    def take_over(self) -> tuple[dict[str, Crash], CrashBans]:
        """Return the crash and the bans that a process left which is gone; its newest file is then ours."""
        if self._directory is None or self._has_looked or not self._is_own:
            return {}, self._bans
        self._has_looked = True
        crashes: dict[str, Crash] = {}
        for path, age_s in _files_in(self._directory):
            is_wanted = self._path is None and path.name.startswith(f"{self._stem}-")
            if age_s <= MAX_AGE_S and not is_wanted:
                continue  # nor is it locked, which would keep out those who want it
            descriptor = _adopt(path)
            if descriptor is None:
                continue
            try:
                if age_s > MAX_AGE_S:
                    raise ValueError("")
                crashes, self._bans = _read(descriptor)
                self._path, self._descriptor = path, descriptor
            except ValueError as error:
                _remove(path, descriptor)
                if str(error):
                    text = f"Ignored and deleted {path}: {error}. Nothing is banned for an earlier crash."
                    warnings.warn(text, CacheWarning, stacklevel=2)
        return crashes, self._bans

    def begin_session(self, session: str, bans: CrashBans) -> None:
        """Keep what all ranks have agreed to ban."""
        self._session, self._bans = session, bans
        if bans or self._path is not None:
            self._write(None)

    # -- one run -------------------------------------------------------------------------------------------

    def begin_run(self, run: int, plan: Mapping[str, str]) -> None:
        """Suspect the candidates of the next run that have not completed one."""
        self._run = run
        self._suspects = {name: each for name, each in plan.items() if (name, each) not in self._has_run}
        if self._suspects:
            self._write(INEXACT)

    @contextlib.contextmanager
    def launching(self, context: str, candidate: str, *, loads: bool = False) -> Iterator[None]:
        """Suspect this candidate alone while the block launches it, or `loads` it between two runs."""
        if not self._is_own or (context, candidate) in self._has_run:
            yield
            return
        with self._lock:
            self._write(EXACT, {context: candidate})
        try:
            yield
        finally:
            with self._lock:
                if not loads:
                    self._suspects[context] = candidate
                self._write(INEXACT if self._suspects else None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspect nobody in the block, or what the block itself loads."""
        suspects, self._suspects = self._suspects, {}
        if suspects:
            self._write(None)
        yield
        self._suspects = suspects
        if suspects:
            self._write(INEXACT)

    def end_run(self) -> None:
        """Suspect nobody: what ends the process from here on is no candidate's doing."""
        self._has_run.update(self._suspects.items())
        if self._suspects:
            self._suspects = {}
            self._write(None)

    def explain(self) -> None:
        """Say that this rank left the run with an exception: peers that are killed for it blame nobody."""
        if self._suspects:
            self._suspects = {}
            self._write(EXPLAINED)

    def close(self) -> None:
        """Forget all bans and delete the file: the function has settled, or nothing is left to launch."""
        self._bans = CrashBans()
        if self._path is not None and self._is_own:
            _remove(self._path, self._descriptor)
            self._path = None
            with contextlib.suppress(OSError):
                assert self._directory is not None
                self._directory.rmdir()  # if it is empty

    # -- the file ------------------------------------------------------------------------------------------

    @property
    def _is_own(self) -> bool:
        """Whether this is the process that the guard belongs to, and no forked child."""
        return os.getpid() == self._pid

    def _write(self, kind: int | None, suspects: Mapping[str, str] | None = None) -> None:
        """Replace the line; kind: what is known of the run under way, None: it suspects nobody."""
        if self._directory is None or not self._is_own:
            return
        crash = None
        if kind is not None:
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
            crash = asdict(Crash(self._rank, self._run, now, kind, dict(suspects or self._suspects)))
        line = {"schema": SCHEMA_VERSION, "session": self._session, "crash": crash, "bans": self._bans}
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            if self._path is None:
                self._create(self._directory)
            if os.pwrite(self._descriptor, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # half a line would accuse the wrong candidate
            directory, self._directory = self._directory, None
            if self._path is not None:
                _remove(self._path, self._descriptor)
                self._path = None
            self._complain(directory, error.strerror or str(error))

    def _create(self, directory: Path) -> None:
        path = directory / f"{self._stem}-{os.urandom(4).hex()}.json"
        hidden = path.with_name(f".{path.name}")  # nobody may adopt it before it is locked
        for attempt in range(10):  # another process may just delete the directory, as it was empty
            try:
                directory.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
                break
            except FileNotFoundError:
                if attempt == 9:
                    raise
        self._path = path
        _OWNED.add(str(path))
        _lock(self._descriptor)
        os.rename(hidden, path)


def remove_abandoned(directory: Path) -> int:
    """Delete the files whose processes are gone, and return how many there were."""
    count = 0
    for path, _ in _files_in(directory):
        descriptor = _adopt(path)
        if descriptor is not None:
            _remove(path, descriptor)
            count += 1
    return count


def _files_in(directory: Path) -> list[tuple[Path, float]]:
    """Return the guards of a directory with their ages in seconds, those last written first."""
    ages_s = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if _FILE_NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # its owner has ended
                    ages_s[Path(entry.path)] = time.time() - entry.stat().st_mtime
    return sorted(ages_s.items(), key=lambda item: (item[1], item[0]))


def _adopt(path: Path) -> int | None:
    """Return a descriptor of the file, locked by this process; None if another one has it, or it is gone."""
    if str(path) in _OWNED:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        _lock(descriptor)
        found = os.fstat(descriptor)
        is_there = found.st_nlink > 0 and stat.S_ISREG(found.st_mode)  # or another process has deleted it
    except OSError:
        is_there = False
    if not is_there:
        os.close(descriptor)
        return None
    _OWNED.add(str(path))
    return descriptor


def _lock(descriptor: int) -> None:
    """Take the lock or raise OSError at once.

    A lock of the process (POSIX): a forked child, such as a data loader's, does not hold it on after the
    owner's death, as it would a lock of the open file (flock).
    """
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove(path: Path, descriptor: int) -> None:
    for each in (path, path.with_name(f".{path.name}")):
        with contextlib.suppress(OSError):
            each.unlink(missing_ok=True)
    _OWNED.discard(str(path))
    os.close(descriptor)


def _read(descriptor: int) -> tuple[dict[str, Crash], CrashBans]:
    """Return the crash, by its session, and the bans of a file; a ValueError says what is wrong with it."""
    content = os.pread(descriptor, MAX_BYTES, 0)
    line, end, _ = content.partition(b"\n")
    try:
        if not end:
            raise ValueError("no complete line")
        data: Any = parse_json(line)
        if data["schema"] != SCHEMA_VERSION:
            raise ValueError(f"schema {data['schema']}, expected {SCHEMA_VERSION}")
        bans = {
            str(context): {
                str(candidate): (int(rank), str(reason)) for candidate, (rank, reason) in each.items()
            }
            for context, each in data["bans"].items()
        }
        crash = None if data["crash"] is None else from_json(Crash, data["crash"])
        return ({} if crash is None else {str(data["session"]): crash}), bans
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged ({type(error).__name__}: {error})") from None
