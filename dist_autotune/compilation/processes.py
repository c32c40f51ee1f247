"""Forks processes, looks at what they do, and ends them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

REAP_S = 5.0  # a killed process that the kernel holds on to is left after this


def shared_file(name: str) -> int:
    """Return a file in memory in which what several processes write at a time stands one after the other."""
    made = os.memfd_create(name)
    try:
        file = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 3)  # no standard file, should one be closed
    finally:
        os.close(made)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # writes at a shared offset would meet: it is not locked
    return file


def fork(run: Callable[[], NoReturn]) -> int:
    """Fork a child that runs `run`; return its process id.

    One thread forks all children of a process: a child is ended with the thread that has forked it, and the
    caller's may end before the process does.
    """
    forked = _forker(os.getpid()).submit(_fork, run)
    try:
        return forked.result()
    except BaseException:  # Ctrl-C: the child that comes is nobody's
        forked.add_done_callback(lambda each: each.exception() or end(each.result()))
        raise


@functools.cache
def _forker(pid: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "dist-autotune-forks")


def _fork(run: Callable[[], NoReturn], tries: int = 100) -> int:
    """Fork beside other threads, with nothing left to write in either process.

    The child never collects garbage: an object of a device, finalized there, would call the device's library,
    which ends forked processes.
    """
    flush()
    collects, pid, refused = gc.isenabled(), -1, ""
    gc.disable()
    try:
        with warnings.catch_warnings():
            # From Python 3.12 on, a fork beside other threads is a warning; these children are made for it.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            for _ in range(tries):
                try:
                    pid = os.fork()
                    break
                except RuntimeError as error:  # of a hook, such as filelock's while another thread locks
                    refused = str(error)
                    time.sleep(1e-3)
            else:
                raise OSError(errno.EAGAIN, refused)
        if pid == 0:
            run()
    finally:
        if collects and pid != 0:
            gc.enable()
    return pid


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, also where a handler of the user's has reaped it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


class Stillness:
    """How long a process has slept without computing and without a child, by a clock of the caller's."""

    def __init__(self) -> None:
        self._computed: int | None = None  # ticks, when last looked; None: it was computing
        self._since_s = 0.0

    def look(self, pid: int, now_s: float) -> float:
        """Return for how many seconds it has stood still by now, as far as looks have told."""
        computed, sleeps = _computed_by(pid)
        if not sleeps or computed is None or computed != self._computed:
            self._computed, self._since_s = computed, now_s
        return now_s - self._since_s


def _computed_by(pid: int) -> tuple[int | None, bool]:
    """Return the ticks that a process has computed if it sleeps, or waits for a core, and whether it sleeps.

    None: it has a child, or waits for a disk.
    """
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/task/{pid}/children") as children:
            state, *fields = stat.read().rpartition(")")[2].split()
            ticks = int(fields[10]) + int(fields[11])
            return None if state not in "SR" or children.read() else ticks, state == "S"
    except (OSError, ValueError, IndexError):  # it has ended; or this system does not tell
        return None, False


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a child and its process group; raises ChildProcessError where it was reaped."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # else the pid may be another's
    for kill in (os.killpg, os.kill):  # kill: a child that does not lead its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, number)


def end(pid: int) -> int | None:
    """End a child and its process group; return its exit code, where known."""
    with contextlib.suppress(ChildProcessError):
        send(pid, signal.SIGKILL)
        deadline = time.monotonic() + REAP_S
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(1e-3)
    return None


def end_worker(pid: int) -> None:
    """End a child of this process with its helpers; it need not lead a group."""
    os.kill(pid, signal.SIGSTOP)  # or it would go on without its helper
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as children:
        for helper in map(int, children.read().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(helper, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
