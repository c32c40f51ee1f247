"""Names on disk the candidates that are launched, so that later starts ban one that kills the process.

A candidate is suspected in the first run that launches it: alone while its launch, or its load, is under way,
else with all others that are new in the run. Two killed processes ban it; one does not, as anything may end a
process. Deaths are forgotten when the function settles, and a candidate's when it completes a run. Each
function and rank has one file of one line, overwritten and locked by its process; a second process has no
guard.

A fault of the file or its directory is a `CacheWarning`, and tuning goes on without a guard.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ..codec import digest, parse, to_json
from ..errors import CacheWarning, warn
from ..search.messages import EXACT, EXPLAINED, INEXACT, Crash, Opening
from .winners import Winners, safe_name

SCHEMA_VERSION = 4
OLD_DAYS = 30  # a guard that no start of its function has taken over meanwhile goes
FOLDER = "crash-guard"  # in the cache's directory
_OWNED: set[Path] = set()  # files that this process has locked: closing one a second time would unlock it


class CrashGuard:
    """The crash guard of one tuned function on this rank; without a directory nothing is written or found.

    identity: the facts that a ban depends on besides kernels and keys.
    """

    def __init__(self, cache: Winners, identity: Mapping[str, str], name: str, rank: int) -> None:
        file_name = f"{safe_name(name)}-{digest(to_json(identity))}-rank-{rank}.json"
        self._path = None if cache.directory is None else cache.directory / FOLDER / file_name
        self._cache, self._rank = cache, rank
        self._pid = os.getpid()  # a forked child leaves the file to its parent
        self._file: int | None = None  # its descriptor, once it is locked
        self._lock = threading.Lock()
        self._session, self._crashes = "", dict[str, Crash]()  # earlier ones, by session
        self._run, self._suspects = 0, dict[str, str]()  # context -> candidate, new in the run under way
        self._has_run: set[tuple[str, str]] = set()  # launched in a run that this process completed

    def recover(self) -> Opening:
        """Return the crashes that dead processes have left, and take over their file."""
        if self._path is not None and self._file is None and os.getpid() == self._pid:
            try:
                with contextlib.suppress(OSError):
                    remove_abandoned(self._path.parents[1], but=self._path, days=OLD_DAYS)
                    self._take(self._path)
                    if self._file is not None:
                        line = os.pread(self._file, 1 << 20, 0).partition(b"\n")[0]
                        self._crashes = parse(line, Opening, SCHEMA_VERSION).crashes
            except ValueError as error:
                text = f"Ignored {self._path}: {error}. Nothing is banned for an earlier crash."
                warn(text, CacheWarning)
        return Opening(crashes=self._crashes)

    def begin_session(self, session: str, crashes: Mapping[str, Crash]) -> None:
        """Begin a session with the crashes that all ranks have agreed on."""
        self._session, self._crashes, self._suspects = session, dict(crashes), {}
        if crashes or self._file is not None:
            self._write()

    def begin_run(self, run: int, plan: Mapping[str, str]) -> None:
        """Suspect the candidates of the next run that have not completed one."""
        self._run = run
        self._suspect({name: each for name, each in plan.items() if (name, each) not in self._has_run})

    @contextlib.contextmanager
    def launching(self, context: str, candidate: str, *, loads: bool = False) -> Iterator[None]:
        """Suspect this candidate alone while the block launches it, or `loads` it between two runs."""
        if (context, candidate) in self._has_run:
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
                self._write()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspect no candidate in the block, except one that the block itself loads."""
        suspects = self._suspects
        self._suspect({})
        try:
            yield
        finally:
            self._suspect(suspects)

    def end_run(self) -> None:
        """Suspect no candidate from here on: the run has ended without a crash."""
        self._has_run.update(self._suspects.items())
        for session, crash in self._crashes.items():
            left = {name: each for name, each in crash.suspects.items() if (name, each) not in self._has_run}
            self._crashes[session] = replace(crash, suspects=left)
        self._suspect({})

    def record_error(self) -> None:
        """Record that this rank raised, also before its first launch: peers killed for that blame nobody."""
        self._suspects = {}
        self._write(EXPLAINED)

    def close(self) -> None:
        """Forget all crashes and delete the file: the function has settled, or nothing is left to launch."""
        self._crashes = {}
        if self._path is not None and self._file is not None and os.getpid() == self._pid:
            self._remove(self._path)

    def _take(self, path: Path, flags: int = 0) -> None:
        """Lock the file, if that is free, until `_remove`, or until this guard goes amid a session."""
        self._file = _lock(path, flags)
        if self._file is not None:
            self._release = weakref.finalize(self, _release, path, self._file)
            self._release.atexit = False

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        self._file = None
        self._release()

    def _suspect(self, suspects: dict[str, str]) -> None:
        if suspects or self._suspects:
            self._suspects = suspects
            self._write()

    def _write(self, kind: int = INEXACT, suspects: dict[str, str] | None = None) -> None:
        """Replace the line; without suspects it accuses nobody."""
        if self._path is None or os.getpid() != self._pid:
            return
        suspects, now = suspects or self._suspects, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        crashes = {session: crash for session, crash in self._crashes.items() if crash.suspects}
        if suspects or kind == EXPLAINED:
            crashes[self._session] = Crash(self._rank, self._run, now, kind, suspects)
        opening = Opening(crashes=crashes)
        data = to_json({"schema": SCHEMA_VERSION, **msgspec.to_builtins(opening)}).encode() + b"\n"
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._take(self._path, os.O_CREAT)
            if self._file is not None and os.pwrite(self._file, data, 0) != len(data):
                raise OSError("No space left on device")
        except OSError as error:  # half a line would accuse the wrong candidate
            if self._file is not None:
                self._remove(self._path)
            directory, self._path = self._path.parent, None
            self._cache.warn_unwritable(directory, error.strerror or str(error))


def _lock(path: Path, flags: int = 0) -> int | None:
    """Open and lock a file; None: another process or guard has it, or it cannot be locked."""
    if path in _OWNED:
        return None
    file = os.open(path, flags | os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    with contextlib.suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # flock would outlive its owner in a forked child
        found = os.fstat(file)
        if found.st_nlink > 0 and stat.S_ISREG(found.st_mode):  # or another process has deleted it
            _OWNED.add(path)
            return file
    os.close(file)
    return None


def _release(path: Path, file: int) -> None:
    os.close(file)
    _OWNED.remove(path)


def remove_abandoned(cache: Path, *, but: Path | None = None, days: float = 0.0) -> int:
    """Delete the crash guards of dead processes, written so many days ago; return their number."""
    count, before = 0, time.time() - days * 86400
    for path in (cache / FOLDER).glob("*-rank-*.json"):
        with contextlib.suppress(OSError):
            if path != but and path.stat().st_mtime <= before and (file := _lock(path)) is not None:
                try:
                    path.unlink()
                    count += 1
                finally:
                    _release(path, file)
    return count
