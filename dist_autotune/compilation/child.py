"""Work in a forked process, which may crash or never end, and how it ended.

Forked, not started anew: kernels live in `__main__` and in notebooks. A fork stops all threads of the rank (8
ms with torch imported, 50 with 2 GB of tensors on the host), and its next step takes 7,000 page faults (18
ms; 2 cores, 2026-11-29). So one child does all that waits, by workers of its own. A lock that another thread
holds at the fork stays locked: a process that wants it stands still.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any, NoReturn

from .processes import Stillness, end, fork, has_ended, send, shared_file
from .workers import NO_WORKER, STANDS_STILL, STDERR_BYTES, STILL_S, WALL_FACTOR, Foreman, Work, crash_text

POLL_S = 5e-3  # between looks at children
STOOD_STILL, NO_FORK = "a process stood still", "a forked process can fork no other"


@dataclass(frozen=True)
class Ending:
    """How work ended. Without a `reason` this process goes on: it loads the binary, or meets the error."""

    reason: str = ""  # why the candidate cannot be compiled
    result: Any = None  # of the work, if it is cut off


class Child:
    """Work under way in a process forked from this one; raises OSError where the system allows no fork."""

    def __init__(self, work: Work) -> None:
        self.is_over = False  # no more endings come
        self.why_left = ""  # why pieces have no ending, then
        self._work, self._parent = work, os.getpid()
        self._left = {*range(len(work.pieces))}  # without an ending
        self._read = 0  # bytes of the report
        self._stillness = Stillness()
        self._paused: float | None = None  # since when
        self._pauses_s = 0.0  # of earlier pauses
        self._report = shared_file("child-report")  # how it went
        self._stderr = self._report  # until it has its own
        try:
            self._stderr = shared_file("child-stderr")
            self._pid = fork(self._run)
        except BaseException:
            self._close()
            raise
        files = {self._report, self._stderr}
        self._abandon = weakref.finalize(self, _abandon, self._pid, self._parent, files)
        self._abandon.atexit = False  # then the end of the process ends it

    def poll(self) -> list[tuple[int, Ending]]:
        """Return the pieces of work that have ended since the last look, by their places, and how."""
        has_left = has_ended(self._pid)  # before its report is read
        endings = self._new_endings()
        if self._left and not has_left:
            return endings
        code, said = self._end()
        if self._left:
            known = {STANDS_STILL: STOOD_STILL, NO_WORKER: NO_FORK}
            self.why_left = known.get(code or 0) or crash_text("the compiler", code, said)
        return endings

    def _end(self) -> tuple[int | None, str]:
        """End the child and its workers; return its exit code, where known, and what stood in its stderr."""
        self.is_over = True
        try:
            code = end(self._pid)
            said = os.pread(self._stderr, STDERR_BYTES, 0).decode(errors="replace")
        finally:
            self._abandon.detach()
            self._close()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(said)  # where it would have gone without a child
        return code, said

    def _new_endings(self) -> list[tuple[int, Ending]]:
        """Return the endings that have been reported since the last look."""
        endings = []
        unread = os.fstat(self._report).st_size - self._read
        report, read = io.BytesIO(os.pread(self._report, unread, self._read)), 0
        with contextlib.suppress(Exception):  # the rest is not written yet, or never: its writer was killed
            while True:
                place, reason, result = pickle.load(report)
                read = report.tell()
                if place in self._left:  # else a worker was killed that had told
                    self._left.discard(place)
                    endings.append((place, Ending(reason, result=result)))
        self._read += read
        return endings

    def stands_still(self) -> bool:
        """Return whether the child has neither computed nor had a worker for STILL_S, without its pauses."""
        if self.is_over or self._paused is not None:
            return False
        return self._stillness.look(self._pid, time.monotonic() - self._pauses_s) > STILL_S

    def pause(self, *, goes_on: bool = False) -> None:
        """Stop the child and its workers; goes_on: let them go on."""
        if (self._paused is None) is goes_on:
            return
        with contextlib.suppress(ChildProcessError):
            send(self._pid, signal.SIGCONT if goes_on else signal.SIGSTOP)
        now = time.monotonic()
        self._pauses_s += 0.0 if self._paused is None else now - self._paused
        self._paused = None if goes_on else now

    def wait(self) -> Ending:
        """Return how the only piece of work ends."""
        endings: list[tuple[int, Ending]] = []
        last = time.monotonic() + self._work.limit_s * WALL_FACTOR + STILL_S  # somebody has stopped it
        try:
            while not (self.is_over or self.stands_still()):
                is_last = time.monotonic() > last
                endings += self.poll()
                if is_last:
                    break
                time.sleep(0.0 if self.is_over else POLL_S)
        finally:
            self.kill()
        return endings[-1][1] if endings else Ending(self.why_left)

    def kill(self) -> None:
        """End the child and its workers; a forked child of this process leaves them alone."""
        if os.getpid() == self._parent and self._report >= 0:
            self.why_left = STOOD_STILL
            self._end()

    def _close(self) -> None:
        for file in {self._report, self._stderr}:
            os.close(file)
        self._report = -1

    def _run(self) -> NoReturn:
        """Do the work in the child."""
        code = 1
        try:
            os.dup2(self._stderr, 2)
            code = Foreman(self._work, self._report, self._parent).run()
        except (OSError, RuntimeError):
            code = NO_WORKER
        finally:
            os._exit(code)


def _abandon(pid: int, parent: int, files: set[int]) -> None:
    """End the child of a session whose function has gone, and its workers."""
    if os.getpid() == parent:
        end(pid)
    for file in files:
        os.close(file)
