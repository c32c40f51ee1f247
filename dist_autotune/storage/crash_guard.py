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
        self._path: Path | None = None
        self._descriptor = -1
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
                self._acquire(self._directory, creates=False)
            try:
                found = found if self._path is None else _read(self._descriptor)
            except ValueError as error:
                text = f"Ignored {self._path}: {error}. Nothing is banned for an earlier crash."
                warnings.warn(text, CacheWarning, stacklevel=2)
        self._bans = found.crash_bans
        return found

    def begin_session(self, session: str, bans: CrashBans) -> None:
        """Keep what all ranks have agreed to ban."""
        self._session, self._bans = session, bans
        if bans or self._path is not None:
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
        self._clear_suspects(None)

    def record_error(self) -> None:
        """Record that this rank left the run with an exception: peers that are killed for it blame nobody."""
        self._clear_suspects(EXPLAINED)

    def close(self) -> None:
        """Drop all bans and delete the file: the function has settled, or nothing is left to launch."""
        self._bans = CrashBans()
        if self._path is not None and self._is_own:
            self._remove()
            with contextlib.suppress(OSError):
                assert self._directory is not None
                self._directory.rmdir()  # if it is empty

    # -- the file ------------------------------------------------------------------------------------------

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
        data = to_json({"schema": SCHEMA_VERSION, **opening.as_data()}).encode() + b"\n"
        try:
            if self._path is None:
                self._acquire(self._directory, creates=True)
            if os.pwrite(self._descriptor, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # half a line would accuse the wrong candidate
            directory, self._directory = self._directory, None
            if self._path is not None:
                self._remove()
            self._complain(directory, error.strerror or str(error))

    def _acquire(self, directory: Path, *, creates: bool) -> None:
        """Take the first file of this function and rank that no living process has, if there is one."""
        for number in range(PROCESSES):
            path = directory / f"{self._stem}-{number}.json"
            if creates:
                directory.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # while creating: another process removed the folder
                descriptor = _open_locked(path, os.O_CREAT if creates else 0)
                if descriptor is not None:
                    self._path, self._descriptor = path, descriptor
                    return
        if creates:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def _remove(self) -> None:
        assert self._path is not None
        _remove(self._path, self._descriptor)
        self._path = None


def remove_abandoned(directory: Path) -> int:
    """Delete the files whose processes are gone, and return how many there were."""
    count = 0
    for path in directory.glob("*.json"):
        with contextlib.suppress(OSError):
            descriptor = _open_locked(path) if _FILE_NAME.fullmatch(path.name) else None
            if descriptor is not None:
                _remove(path, descriptor)
                count += 1
    return count


def _open_locked(path: Path, flags: int = 0) -> int | None:
    """Return a descriptor of the file, locked by this process; None if another process or guard has it.

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
    if is_ours:
        _OWNED.add(path)
    return descriptor if is_ours else None


def _remove(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    _OWNED.discard(path)
    os.close(descriptor)


def _read(descriptor: int) -> Opening:
    """Return the crash and the bans of a file; a ValueError says what is wrong with it."""
    if time.time() - os.fstat(descriptor).st_mtime > MAX_AGE_S:
        return Opening()
    line, end, _ = os.pread(descriptor, MAX_BYTES, 0).partition(b"\n")
    if not (line or end):  # its process ended before it wrote
        return Opening()
    if not end:
        raise ValueError("no complete line")
    return from_json(Opening, parse(line, SCHEMA_VERSION))
