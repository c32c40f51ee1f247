"""Runs one compilation in a forked process, which may crash or never end, and returns how it ended.

Forked rather than started anew: kernels live in `__main__` and in notebooks, and a fork costs milliseconds. A
lock of LLVM that another thread holds at the fork stays locked: such a child is late. Fork handlers of other
libraries may hang before the child has begun (`Ending.has_begun`).

The child touches no CUDA, runs no finalizers, ignores the signals that are meant for the job, and dies with
the thread that forked it. A child that runs a user's hook is cut off: it has no file or socket and can open
none. A child of a parent that yields the cores gets little time on them: its limit counts the seconds that it
computes, and it may last ten times as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import math
import os
import pickle
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from triton import knobs

from .config_failures import config_failure

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # prctl(2)
REAP_S = 5.0  # a killed process that the kernel holds on to is left behind after this
START_S = 30.0  # a child takes milliseconds to begin
GRACE_S = 10  # after its limit, a child that nobody has ended ends itself
REASON_CHARACTERS = 1000  # of a failure's text
STDERR_BYTES = 1 << 20  # of the compiler's own words: more is cut off
WALL_FACTOR = 10  # times its limit that a child may last whose parent yields the cores

_LIBC = ctypes.CDLL(None)  # loaded here: the child only calls it
_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ERROR_LINE = re.compile(r"(?:LLVM ERROR|Assertion|error:|fatal).*", re.IGNORECASE)


@dataclass(frozen=True)
class Ending:
    """How a child ended. Without a `reason` this process goes on: it loads the binary, or meets the error."""

    reason: str = ""  # why the candidate cannot be compiled
    has_begun: bool = True  # False: the candidate has nothing to do with it
    result: Any = None  # of `work`, if the child is cut off


class CompilerChild:
    """A forked process that runs `work`; raises OSError where the system allows no fork."""

    def __init__(
        self, work: Callable[[], Any], limit_s: float, *, is_cut_off: bool = False, yields: bool = False
    ) -> None:
        self._limit_s, self._is_cut_off, self._yields = limit_s, is_cut_off, yields
        self._lasts_s = limit_s * WALL_FACTOR if yields else limit_s
        self._what = "the hook" if is_cut_off else "the compiler"
        self._late = "the hook did not end" if is_cut_off else "did not compile"
        self._stderr = os.memfd_create("compiler-stderr")
        self._report = os.memfd_create("compiler-report")  # a line end when it begins, then how it went
        parent = os.getpid()
        try:
            self._pid: int | None = fork()
            if self._pid == 0:
                self._run(work, parent)
        except OSError:
            self._pid = None
            self._close_files()
            raise
        self._forked = time.monotonic()

    def poll(self) -> Ending | None:
        """Return the child's ending; None while it works. A late child is killed."""
        assert self._pid is not None
        elapsed_s = time.monotonic() - self._forked
        is_late = elapsed_s > self._lasts_s or (elapsed_s > START_S and not self._reported_bytes)
        try:
            is_over = has_ended(self._pid)
        except ChildProcessError:  # a handler of the user's has reaped it
            self._pid, ending = None, self._ending(None)
        else:
            if not is_over and not is_late:
                return None
            code = self._end()
            late = Ending(f"{self._late} within {self._limit_s:g} s", has_begun=self._reported_bytes > 0)
            ending = self._ending(code) if is_over and code != -signal.SIGXCPU else late
        if stderr := self._stderr_text():  # to where it would have gone without a child
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(stderr)
        self._close_files()
        return ending

    def close(self) -> None:
        """Kill the child and its helpers, if they still run."""
        if self._pid is not None:
            self._end()
            self._close_files()

    def _ending(self, code: int | None) -> Ending:
        """Return the child's report; without one, the reason from its exit code and stderr."""
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            reason, result = pickle.loads(os.pread(self._report, self._reported_bytes, 0).lstrip())
            return Ending(reason, result=result)
        if code is None:
            ended = f"{self._what}'s process vanished"
        elif code >= 0:
            ended = f"{self._what} ended its process with exit code {code}"
        else:
            names = {number.value: number.name for number in signal.Signals}  # without real-time signals
            ended = f"{self._what} was ended by {names.get(-code, f'signal {-code}')}"
        lines = [line.strip() for line in self._stderr_text().splitlines() if line.strip()]
        errors = [found.group() for line in lines if (found := _ERROR_LINE.search(line))]
        stderr = next(iter(errors + lines), "")
        return Ending(f"{ended}: {stderr}"[:REASON_CHARACTERS] if stderr else ended)

    @property
    def _reported_bytes(self) -> int:
        return os.fstat(self._report).st_size

    def _stderr_text(self) -> str:
        return os.pread(self._stderr, STDERR_BYTES, 0).decode(errors="replace")

    def _end(self) -> int | None:
        """Kill the child and its helpers; return its exit code, where known."""
        assert self._pid is not None
        pid, self._pid = self._pid, None
        for kill in (os.killpg, os.kill):  # kill: a child that has not come to setsid yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        return reaped(pid)

    def _close_files(self) -> None:
        os.close(self._stderr)
        os.close(self._report)

    # -- in the child --------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], Any], parent: int) -> NoReturn:
        try:
            reason, result = "", None
            try:
                self._prepare(parent)
                os.write(self._report, b"\n")
                result = work()
            except BaseException as error:
                reason = (config_failure(error) or "")[:REASON_CHARACTERS]
            os.write(self._report, pickle.dumps((reason, result if self._is_cut_off else None)))
            _flush()
            os._exit(0)
        finally:
            os._exit(1)

    def _prepare(self, parent: int) -> None:
        """Let this process end at its time limit, with its parent, or when its work is done."""
        leave_job(parent, signal.SIGKILL, leads_session=not self._yields)
        prctl(PR_SET_DUMPABLE, 0)  # the whole rank is not to be written to a core file
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(min(math.ceil(max(self._lasts_s, 0)), 10**6) + GRACE_S)
        if self._yields:  # the limit is of the seconds that it computes
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            _, most = resource.getrlimit(resource.RLIMIT_CPU)
            limit = max(1, math.ceil(self._limit_s))
            resource.setrlimit(resource.RLIMIT_CPU, (limit if most < 0 else min(limit, most), most))
        os.dup2(self._stderr, 2)
        if self._is_cut_off:
            _cut_off(self._report)


def fork() -> int:
    """Fork as `os.fork` does, beside other threads, and with nothing left to write in either process.

    The child never collects garbage: an object of a device, finalized there, would call the device's library,
    which ends forked processes.
    """
    _flush()
    collects = gc.isenabled()
    pid = -1
    gc.disable()
    try:
        with warnings.catch_warnings():
            # From Python 3.12 on, a fork beside other threads is a warning; these children are made for it.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            pid = os.fork()
    finally:
        if collects and pid != 0:
            gc.enable()
    return pid


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, and leave it to be reaped; raises ChildProcessError: it was."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reaped(pid: int) -> int | None:
    """Wait for a child that was killed; return its exit code, where known."""
    deadline = time.monotonic() + REAP_S
    with contextlib.suppress(ChildProcessError):
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


def leave_job(parent: int, dies_by: signal.Signals, *, leads_session: bool) -> None:
    """Detach this process from the rank that it was forked from, whose end sends it `dies_by`.

    One signal ends it with its helpers. leads_session: Ctrl-C in the terminal does not reach it.
    """
    prctl(PR_SET_PDEATHSIG, dies_by)
    if os.getppid() != parent:
        os._exit(1)
    if leads_session:
        os.setsid()
    else:
        os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)  # of an event loop of the rank's
    for job_signal in _JOB_SIGNALS:
        if job_signal != dies_by:
            signal.signal(job_signal, signal.SIG_IGN)
    faulthandler.disable()  # the rank reports a crash, in one line
    # Files of its own: the rank's may hold text that is not written yet.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    knobs.compilation.listener = None  # the user's: the rank calls it


def prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


def _cut_off(reporting: int) -> None:
    """Close all files and sockets of this process except `reporting`, and forbid it to open any."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    close_files(reporting)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def close_files(reporting: int) -> None:
    """Close all files of this process except standard files and `reporting`."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != reporting:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))
