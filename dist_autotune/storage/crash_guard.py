"""Names on disk the candidates under suspicion, so that the next start bans what killed the process.

A candidate is suspected in the first run that launches it: alone while its launch, or its load, is under way,
else with all others that are new in the run. The file holds one line that is overwritten. Its owner holds a
lock, which ends with the process, whatever ends that. Bans stay until the function settles.

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
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..codec import digest, from_json, to_json
from ..errors import CacheWarning
from ..search.messages import EXACT, EXPLAINED, INEXACT, Crash, CrashBans, Opening
from .winners import parse, safe_name

SCHEMA_VERSION = 3
FOLDER = "crash-guard"  # in the cache's directory
MAX_AGE_S = 24 * 3600.0  # of a file that is still believed: what crashed longer ago may be mended
MAX_BYTES = 1 << 20
PROCESSES = 32  # that may guard the same function of the same rank at once
_FILE_NAME = re.compile(r".+-[0-9a-f]{16}-rank-\d+-\d+\.json")
_OWNED: set[Path] = set()  # by this process, which its own locks do not keep out


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
        self._stem = f"{safe_name(name)}-{digest(to_json(identity))}-rank-{rank}"
        self._directory, self._rank, self._complain = directory, rank, complain
        self._pid = os.getpid()
        self._file: _LockedFile | None = None
        self._lock = threading.RLock()
        self._session, self._bans = "", CrashBans()
        self._run, self._suspects = 0, dict[str, str]()  # context -> candidate, new in the run under way
        self._has_run: set[tuple[str, str]] = set()  # launched in a run that this process completed
        self._has_recovered = False

    def recover(self) -> Opening:
        """Return the crash and the bans that a process left which is gone; its file is then ours."""
        found = Opening(self._rank, crash_bans=self._bans)
        if self._directory is not None and self._is_own and not self._has_recovered:
            self._has_recovered = True
            with contextlib.suppress(OSError):
                self._file = self._first_free(self._directory)
            if self._file is not None:
                try:
                    found = self._file.read()
                except ValueError as error:
                    text = f"Ignored {self._file.path}: {error}. Nothing is banned for an earlier crash."
                    warnings.warn(text, CacheWarning, stacklevel=2)
        self._bans = found.crash_bans
        return found

    def begin_session(self, session: str, bans: CrashBans) -> None:
        """Keep what all ranks have agreed to ban."""
        self._session, self._bans = session, bans
        if bans or self._file is not None:
            self._write(None)

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
        suspects = dict(self._suspects)
        self._clear_suspects(None)
        yield
        self._suspects = suspects
        if suspects:
            self._write(INEXACT)

    def end_run(self) -> None:
        """Suspect nobody: what ends the process from here on is no candidate's doing."""
        self._has_run.update(self._suspects.items())
        self._clear_suspects(None)

    def record_error(self) -> None:
        """Record that this rank left the run with an exception: peers that are killed for it blame nobody."""
        self._clear_suspects(EXPLAINED)

    def close(self) -> None:
        """Drop all bans and delete the file: the function has settled, or nothing is left to launch."""
        self._bans = CrashBans()
        if self._file is not None and self._is_own:
            self._file.remove()
            with contextlib.suppress(OSError):
                self._file.path.parent.rmdir()  # if it is empty
            self._file = None

    @property
    def _is_own(self) -> bool:
        """Whether this is the process that the guard belongs to, and no forked child."""
        return os.getpid() == self._pid

    def _clear_suspects(self, kind: int | None) -> None:
        if self._suspects:
            self._suspects = {}
            self._write(kind)

    def _write(self, kind: int | None, suspects: dict[str, str] | None = None) -> None:
        """Replace the line; kind: what is known of the run under way, None: it suspects nobody."""
        if self._directory is None or not self._is_own:
            return
        crashes = {}
        if kind is not None:
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
            crashes[self._session] = Crash(self._rank, self._run, now, kind, suspects or self._suspects)
        opening = Opening(self._rank, crashes=crashes, crash_bans=self._bans)
        try:
            self._file = self._file or self._first_free(self._directory, os.O_CREAT)
            if self._file is None:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            self._file.write(opening)
        except OSError as error:  # half a line would accuse the wrong candidate
            directory, self._directory = self._directory, None
            if self._file is not None:
                self._file.remove()
                self._file = None
            self._complain(directory, error.strerror or str(error))

    def _first_free(self, directory: Path, flags: int = 0) -> _LockedFile | None:
        """Take the first file of this function and rank that no living process has, if there is one."""
        for number in range(PROCESSES):
            if flags & os.O_CREAT:
                directory.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # or another process has just removed the folder
                file = _LockedFile.open(directory / f"{self._stem}-{number}.json", flags)
                if file is not None:
                    return file
        return None


@dataclass(frozen=True)
class _LockedFile:
    """A file that this process has locked, with one line that counts: the first."""

    path: Path
    descriptor: int

    @classmethod
    def open(cls, path: Path, flags: int = 0) -> _LockedFile | None:
        """Open and lock a file; None: another process or guard has it.

        A lock of the process (POSIX): a forked child, such as a data loader's, does not hold it on after the
        owner's death, as it would a lock of the open file (flock).
        """
        if path in _OWNED:
            return None
        descriptor = os.open(path, flags | os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        is_ours = False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            is_ours = found.st_nlink > 0 and stat.S_ISREG(found.st_mode)  # or another process has deleted it
        except (BlockingIOError, PermissionError):  # locked
            pass
        finally:
            if not is_ours:
                os.close(descriptor)
        if not is_ours:
            return None
        _OWNED.add(path)
        return cls(path, descriptor)

    def read(self) -> Opening:
        """Return the crash and the bans; a ValueError says what is wrong with the file."""
        line, end, _ = os.pread(self.descriptor, MAX_BYTES, 0).partition(b"\n")
        age_s = time.time() - os.fstat(self.descriptor).st_mtime
        if age_s > MAX_AGE_S or not (line or end):  # empty: its process ended before it wrote
            return Opening()
        if not end:
            raise ValueError("no complete line")
        return from_json(Opening, parse(line, SCHEMA_VERSION))

    def write(self, opening: Opening) -> None:
        data = to_json({"schema": SCHEMA_VERSION, **opening.as_data()}).encode() + b"\n"
        if os.pwrite(self.descriptor, data, 0) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        _OWNED.discard(self.path)
        os.close(self.descriptor)


def remove_abandoned(directory: Path) -> int:
    """Delete the files whose processes are gone, and return how many there were."""
    count = 0
    for path in directory.glob("*.json"):
        with contextlib.suppress(OSError):
            file = _LockedFile.open(path) if _FILE_NAME.fullmatch(path.name) else None
            if file is not None:
                file.remove()
                count += 1
    return count
