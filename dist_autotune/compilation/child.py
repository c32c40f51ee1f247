"""Runs work in a forked process, which may crash or never end, and tells how it ended.

Forked, not started anew: kernels live in `__main__` and in notebooks. A fork stops all threads of the rank (8
ms with torch imported, 50 with 2 GB of tensors on the host), and its next step takes 7,000 page faults (18
ms; 2 cores, 2026-11-29). So a child works through several pieces. It touches no CUDA, runs no finalizers,
ignores the signals that are meant for the job, and dies with its rank. A lock that another thread holds at
the fork stays locked: such a child stands still.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import functools
import gc
import io
import math
import os
import pickle
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

from triton import knobs

from .config_failures import config_failure

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # prctl(2)
POLL_S = 5e-3  # between looks at children
STILL_S = 5.0  # without computing: a child that stands still waits for a lock that nobody opens
REAP_S = 5.0  # a killed process that the kernel holds on to is left behind after this
REASON_CHARACTERS = 1000  # of a failure's text
STDERR_BYTES = 1 << 20  # of the compiler's own words: more is cut off
WALL_FACTOR = 10  # times its limit that a child may last that yields the cores
PRIORITY = 10  # nice(2) of such a child: a tenth of a core that one other thread wants

_LIBC = ctypes.CDLL(None)  # loaded here: the child only calls it
_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTOU)
_ERROR_LINE = re.compile(r"(?:LLVM ERROR|Assertion|error:|fatal).*", re.IGNORECASE)


@dataclass(frozen=True)
class Ending:
    """How work ended. Without a `reason` this process goes on: it loads the binary, or meets the error."""

    reason: str = ""  # why the candidate cannot be compiled
    result: Any = None  # of the work, if the child is cut off


class Child:
    """Work in a process forked from this one, in order; raises OSError where the system allows no fork.

    A crash, or work that is late, ends the child: what stood after it has no ending.

    is_cut_off: the child runs a user's hook; it has no file or socket and can open none. yields: it gets
    little time on the cores; the limit is of what one piece computes, and it may last ten times as long.
    """

    def __init__(
        self,
        work: Sequence[Callable[[], Any]],
        limit_s: float,
        *,
        is_cut_off: bool = False,
        yields: bool = False,
    ) -> None:
        self.is_over = False  # no more endings come
        self._work, self._limit_s, self._is_cut_off, self._yields = work, limit_s, is_cut_off, yields
        self._parent, self._began = os.getpid(), time.monotonic()  # the work that is under way
        self.told = 0  # pieces of work that have ended
        self._read = self._said = 0  # bytes of the report, and of stderr with them
        self._computed: int | None = None  # when last looked; None: it was computing
        self._moved = self._began  # when it was last seen to
        self._paused: float | None = None  # since when
        self._report = os.memfd_create("child-report")  # how it went
        self._stderr = os.memfd_create("child-stderr")
        try:
            self._pid = fork(self._run)
        except BaseException:
            self._close()
            raise

    def poll(self) -> list[tuple[int, Ending]]:
        """Return the pieces of work that have ended since the last look, by their places, and how."""
        has_left = has_ended(self._pid)  # before its report is read
        endings = self._new_endings()
        lasts_s = self._limit_s * (WALL_FACTOR if self._yields else 1)
        is_late = self._paused is None and self.lasted_s() > lasts_s
        if self.told < len(self._work) and not (has_left or is_late):
            return endings
        self.is_over = True
        try:
            code = end(self._pid)  # a late child is killed, and so are its helpers
            said = os.pread(self._stderr, STDERR_BYTES, 0)
        finally:
            self._close()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(said.decode(errors="replace"))  # where it would have gone without a child
        if self.told < len(self._work):
            endings.append((self.told, self._crash(code, said[self._said :], is_late=not has_left)))
        return endings

    def _new_endings(self) -> list[tuple[int, Ending]]:
        """Return the endings that the child has reported since the last look."""
        endings = []
        report = io.BytesIO(os.pread(self._report, os.fstat(self._report).st_size, 0)[self._read :])
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the rest is not written yet
            while True:
                reason, result, said = pickle.load(report)
                endings.append((self.told, Ending(reason, result=result)))
                self.told, self._said, read = self.told + 1, said, report.tell()
                self._began = time.monotonic()
        self._read += read if endings else 0
        return endings

    def _crash(self, code: int | None, said: bytes, *, is_late: bool) -> Ending:
        """Return how work has ended that has ended the child."""
        if is_late or code == -signal.SIGXCPU:
            what = "the hook did not end" if self._is_cut_off else "did not compile"
            return Ending(f"{what} within {self._limit_s:g} s")
        what = "the hook" if self._is_cut_off else "the compiler"
        return Ending(_crash_text(what, code, said.decode(errors="replace")))

    def lasted_s(self) -> float:
        """Return for how long the piece of work has been under way, without pauses."""
        return (self._paused or time.monotonic()) - self._began

    def stands_still(self) -> bool:
        """Return whether the child has neither computed nor had a helper for STILL_S, without its pauses."""
        now = time.monotonic()
        if self._paused is not None:
            return False
        computed, sleeps = (None, False) if self.is_over else computed_by(self._pid)
        if computed is None or computed != self._computed:
            self._computed, self._moved = computed, now
        return sleeps and now - self._moved > STILL_S

    def pause(self, *, goes_on: bool = False) -> None:
        """Stop the child and its helpers; goes_on: let them go on."""
        if (self._paused is None) is goes_on:
            return
        for kill in (os.killpg, os.kill):  # kill: a child that does not lead its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._pid, signal.SIGCONT if goes_on else signal.SIGSTOP)
        now = time.monotonic()
        paused_s = 0.0 if self._paused is None else now - self._paused
        self._began, self._moved = self._began + paused_s, self._moved + paused_s
        self._paused = None if goes_on else now

    def wait(self) -> Ending:
        """Return how the last piece of work ends that the child comes to."""
        endings: list[tuple[int, Ending]] = []
        try:
            while not self.is_over:
                endings += self.poll()
                time.sleep(0.0 if self.is_over else POLL_S)
        except BaseException:
            self.kill()
            raise
        return endings[-1][1]

    def kill(self) -> None:
        """End the child and its helpers; a forked child of this process leaves them alone."""
        if os.getpid() == self._parent and self._report >= 0:
            self.is_over = True
            end(self._pid)
            self._close()

    def _close(self) -> None:
        os.close(self._report)
        os.close(self._stderr)
        self._report = -1

    def _run(self) -> NoReturn:
        """Do the work in the child."""
        try:
            _leave_job(self._parent, yields=self._yields)
            os.dup2(self._stderr, 2)
            _close_files(self._report)
            if self._is_cut_off:
                _close_standard_files()
            for work in self._work:
                reason, result = "", None
                try:
                    _limit_computing(self._limit_s)  # of its helpers, too
                    result = work()
                except BaseException as error:
                    reason = (config_failure(error) or "")[:REASON_CHARACTERS]
                _flush()
                said = os.fstat(2).st_size
                os.write(self._report, pickle.dumps((reason, result if self._is_cut_off else None, said)))
            os._exit(0)
        finally:
            os._exit(1)


def _crash_text(what: str, code: int | None, stderr: str) -> str:
    if code is None:
        ended = f"{what}'s process vanished"
    elif code >= 0:
        ended = f"{what} ended its process with exit code {code}"
    else:
        names = {number.value: number.name for number in signal.Signals}  # without real-time signals
        ended = f"{what} was ended by {names.get(-code, f'signal {-code}')}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [found.group() for line in lines if (found := _ERROR_LINE.search(line))]
    return ": ".join([ended, *(errors + lines)[:1]])[:REASON_CHARACTERS]


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
    _flush()
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


def computed_by(pid: int) -> tuple[int | None, bool]:
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


def end(pid: int) -> int | None:
    """End a child and its process group; return its exit code, where known."""
    with contextlib.suppress(ChildProcessError):  # a handler of the user's has reaped it
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # else the pid may be another's
        for kill in (os.killpg, os.kill):  # kill: a child that does not lead its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + REAP_S
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(1e-3)
    return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()


# ---- in the child


def _leave_job(parent: int, *, yields: bool) -> None:
    """Detach this process from its rank, whose end ends it.

    One signal ends it with its helpers, and Ctrl-C in the terminal does not reach it. yields: it stays in the
    session of its rank, beside which its priority counts; else a busy machine gives it a session's share.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    if yields:
        os.setpgid(0, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))
    else:
        os.setsid()
    _LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the whole rank is not to be written to a core file
    signal.set_wakeup_fd(-1)  # of an event loop of the rank's
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for job_signal in _JOB_SIGNALS:
        signal.signal(job_signal, signal.SIG_IGN)
    faulthandler.disable()  # the rank reports a crash, in one line
    # Files of its own: the rank's may hold text that is not written yet.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    knobs.compilation.listener = None  # the user's: the rank calls it


def _limit_computing(limit_s: float) -> None:
    """Limit what this process computes from now on."""
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    limit = max(1, math.ceil(time.process_time() + min(limit_s, 1e9)))
    resource.setrlimit(resource.RLIMIT_CPU, (limit if most < 0 else min(limit, most), most))


def _close_files(report: int) -> None:
    """Close all files of this process except standard files and `report`; their numbers stay taken.

    What the rank closes is closed then, and libraries close theirs by number in forked processes (libuv, of
    torch's store): it must not be another's.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (null, report):
            with contextlib.suppress(OSError):  # the one that listed them
                os.fstat(int(name))
                os.dup2(null, int(name), inheritable=False)


def _close_standard_files() -> None:
    """Close the standard files of this process, and forbid it to open any file."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
