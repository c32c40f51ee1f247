"""Binaries in Triton's cache, and locks by which the processes of a host compile each of them once."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import socket
from pathlib import Path

from triton import knobs


def why_not_shared() -> str:
    """Return why a binary that another process compiles would not be found; empty if it is."""
    if knobs.compilation.always_compile:
        return "TRITON_ALWAYS_COMPILE is set"
    if knobs.cache.manager_class is not None:
        return "TRITON_CACHE_MANAGER keeps them elsewhere"
    if getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None:
        return "a hook changes the compiler's stages, and with them the names of binaries"
    return ""


def has_binary(key: str) -> bool:
    """Return whether Triton will find the binary: its list of files, written last, and every file."""
    name = base64.b32encode(bytes.fromhex(_digest(key))).decode().rstrip("=")
    try:
        (listing,) = (Path(knobs.cache.dir) / name).glob("__grp__*.json")
        paths = json.loads(listing.read_bytes())["child_paths"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(map(os.path.exists, paths))


class CompileLock:
    """The right to compile one binary on this host, until released.

    Raises BlockingIOError where another process has it, other OSErrors where files cannot be locked.
    """

    def __init__(self, key: str, session: str) -> None:
        self._session = session
        directory = Path(knobs.cache.dir) / "dist_autotune-locks" / socket.gethostname()
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / _digest(key)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def known_failure(self) -> str:
        """Why it cannot be compiled, as a process of this session found out; empty: not known."""
        session, _, reason = os.pread(self._descriptor, 1 << 16, 0).decode(errors="replace").partition("\n")
        return reason if session == self._session else ""

    def record_failure(self, reason: str) -> None:
        """Tell the other processes of this session that it cannot be compiled."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{self._session}\n{reason}".encode(errors="replace"), 0)

    def release(self, *, is_compiled: bool = False) -> None:
        """Unlock; delete the lock's file once the binary is there."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # not by closing alone: forked children have copies
            if is_compiled:
                # Who has it open and locks it next finds the binary, so two files of one name do no harm.
                self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
