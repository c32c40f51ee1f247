"""Names on disk the candidates under suspicion, so that the next start bans what killed the process.

A candidate is suspected in the first run that launches it: alone while its launch, or its load, is under way,
else with all others that are new in the run. Each function and rank has one file with one line, which is
overwritten. Its owner holds a lock, which ends with the process; a second process goes without a guard.
Bans stay until the function settles.

Whatever is wrong with the file or its directory is a `CacheWarning`, and tuning goes on without a guard.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import re
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..codec import digest, from_json, to_json
from ..errors import CacheWarning
from ..search.messages import EXACT, EXPLAINED, INEXACT, Crash, CrashBans, Opening
from .winners import parse, safe_name

SCHEMA_VERSION = 3
FOLDER = "crash-guard"  # in the cache's directory
MAX_BYTES = 1 << 20
_FILE_NAME = re.compile(r".+-[0-9a-f]{16}-rank-\d+\.json")
_OWNED: dict[Path, int] = {}  # files that this process has locked, and their descriptors


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
        file_name = f"{safe_name(name)}-{digest(to_json(identity))}-rank-{rank}.json"
        self._path = None if directory is None else directory / file_name
        self._rank, self._complain = rank, complain
        self._pid = os.getpid()  # a forked child leaves the file to its parent
        self._is_owner = False
        self._lock = threading.Lock()
        self._session, self._bans = "", CrashBans()
        self._run, self._suspects = 0, dict[str, str]()  # context -> candidate, new in the run under way
        self._has_run: set[tuple[str, str]] = set()  # launched in a run that this process completed

    def recover(self) -> Opening:
        """Return the crash and the bans that a process left which is gone; its file is then ours."""
        found = Opening(self._rank, crash_bans=self._bans)
        if self._path is not None and not self._is_owner and os.getpid() == self._pid:
            try:
                with contextlib.suppress(OSError):
                    self._is_owner = _lock(self._path)
                    found = _read(self._path) if self._is_owner else found
            except ValueError as error:
                text = f"Ignored {self._path}: {error}. Nothing is banned for an earlier crash."
                warnings.warn(text, CacheWarning, stacklevel=2)
        self._bans = found.crash_bans
        return found

    def begin_session(self, session: str, bans: CrashBans) -> None:
        """Keep what all ranks have agreed to ban."""
        self._session, self._bans, self._suspects = session, bans, {}
        if bans or self._is_owner:
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
        """Suspect nobody in the block, or what the block itself loads."""
        suspects = self._suspects
        self._suspect({})
        yield
        self._suspect(suspects)

    def end_run(self) -> None:
        """Suspect nobody: what ends the process from here on is no candidate's doing."""
        self._has_run.update(self._suspects.items())
        self._suspect({})

    def record_error(self) -> None:
        """Record that this rank left the run with an exception: peers that are killed for it blame nobody."""
        if self._suspects:
            self._suspects = {}
            self._write(EXPLAINED)

    def close(self) -> None:
        """Drop all bans and delete the file: the function has settled, or nothing is left to launch."""
        self._bans = CrashBans()
        self._remove()

    def _remove(self) -> None:
        if self._path is not None and self._is_owner and os.getpid() == self._pid:
            _remove(self._path)
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()  # if it is empty
            self._is_owner = False

    def _suspect(self, suspects: dict[str, str]) -> None:
        if suspects or self._suspects:
            self._suspects = suspects
            self._write()

    def _write(self, kind: int = INEXACT, suspects: dict[str, str] | None = None) -> None:
        """Replace the line; without suspects it accuses nobody."""
        if self._path is None or os.getpid() != self._pid:
            return
        suspects, crashes = suspects or self._suspects, {}
        if suspects or kind == EXPLAINED:
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
            crashes[self._session] = Crash(self._rank, self._run, now, kind, suspects)
        try:
            if not self._is_owner:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._is_owner = _lock(self._path, os.O_CREAT)
            if self._is_owner:
                _write(self._path, Opening(self._rank, crashes=crashes, crash_bans=self._bans))
        except FileNotFoundError:  # another process has just removed the folder: the next write makes it
            pass
        except OSError as error:  # half a line would accuse the wrong candidate
            self._remove()
            directory, self._path = self._path.parent, None
            self._complain(directory, error.strerror or str(error))


def _lock(path: Path, flags: int = 0) -> bool:
    """Open and lock a file; False: another process or guard has it.

    A lock of the process (POSIX): a forked child, such as a data loader's, does not hold it on after the
    owner's death, as it would a lock of the open file (flock).
    """
    if path in _OWNED:
        return False
    descriptor = os.open(path, flags | os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        if found.st_nlink > 0 and stat.S_ISREG(found.st_mode):  # or another process has deleted it
            _OWNED[path] = descriptor
    except (BlockingIOError, PermissionError):  # locked
        pass
    finally:
        if path not in _OWNED:
            os.close(descriptor)
    return path in _OWNED


def _read(path: Path) -> Opening:
    """Return the crash and the bans; a ValueError says what is wrong with the first line, which counts."""
    line, end, _ = os.pread(_OWNED[path], MAX_BYTES, 0).partition(b"\n")
    if not (line or end):  # its process ended before it wrote
        return Opening()
    if not end:
        raise ValueError("no complete line")
    return from_json(Opening, parse(line, SCHEMA_VERSION))


def _write(path: Path, opening: Opening) -> None:
    data = to_json({"schema": SCHEMA_VERSION, **opening.as_data()}).encode() + b"\n"
    if os.pwrite(_OWNED[path], data, 0) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    os.close(_OWNED.pop(path))


def remove_abandoned(directory: Path) -> int:
    """Delete the files whose processes are gone, and return how many there were."""
    count = 0
    for path in directory.glob("*.json"):
        with contextlib.suppress(OSError):
            if _FILE_NAME.fullmatch(path.name) and _lock(path):
                _remove(path)
                count += 1
    return count
