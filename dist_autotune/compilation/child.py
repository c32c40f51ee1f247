"""Runs work in a forked process, which may crash or never end, and tells how it ended.

Forked, not started anew: kernels live in `__main__` and in notebooks, and a fork costs milliseconds. A child
touches no CUDA, runs no finalizers, ignores the signals that are meant for the job, and dies with the thread
that forked it. A lock of LLVM that another thread holds at the fork stays locked: such a child is late.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from triton import knobs

from .config_failures import config_failure

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # prctl(2)
POLL_S, ASK_S = 5e-3, 0.1  # between looks at a child; between questions whether it is needed
GRACE_S = 0.5  # for a child to end that has made itself needless, on a busy machine
REAP_S = 5.0  # a killed process that the kernel holds on to is left behind after this
REASON_CHARACTERS = 1000  # of a failure's text
STDERR_BYTES = 1 << 20  # of the compiler's own words: more is cut off
WALL_FACTOR = 10  # times its limit that a child may last that yields the cores

T = TypeVar("T")
_LIBC = ctypes.CDLL(None)  # loaded here: the child only calls it
_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTOU)
_ERROR_LINE = re.compile(r"(?:LLVM ERROR|Assertion|error:|fatal).*", re.IGNORECASE)


@dataclass(frozen=True)
class Ending:
    """How a child ended. Without a `reason` this process goes on: it loads the binary, or meets the error."""

    reason: str = ""  # why the candidate cannot be compiled
    result: Any = None  # of the work, if the child is cut off


def run_in_child(
    work: Callable[[], Any],
    limit_s: float,
    *,
    is_cut_off: bool = False,
    yields: bool = False,
    is_needed: Callable[[], bool] = lambda: True,
) -> Generator[None, None, Ending | None]:
    """Run `work` in a forked process: yields while it runs, returns how it ended, None: it was not needed.

    Raises OSError where the system allows no fork. A late child is killed, and so are its helpers.

    is_cut_off: the child runs a user's hook; it has no file or socket and can open none. yields: it gets
    little time on the cores; the limit is of what it computes, and it may last ten times as long.
    """
    report = os.memfd_create("child-report")  # how it went
    stderr = os.memfd_create("child-stderr")
    try:
        parent = os.getpid()
        if (pid := fork()) == 0:
            _be_child(work, limit_s, parent, report, stderr, is_cut_off=is_cut_off, yields=yields)
        try:
            is_over = yield from _wait(pid, limit_s * (WALL_FACTOR if yields else 1), is_needed)
        finally:
            code = end(pid)
        text = os.pread(stderr, STDERR_BYTES, 0).decode(errors="replace")
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)  # where it would have gone without a child
        if is_over is None:
            return None
        said = os.pread(report, os.fstat(report).st_size, 0)
    finally:
        os.close(report)
        os.close(stderr)
    what = "the hook" if is_cut_off else "the compiler"
    if not is_over or code == -signal.SIGXCPU:
        return Ending(f"{'the hook did not end' if is_cut_off else 'did not compile'} within {limit_s:g} s")
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        reason, result = pickle.loads(said)
        return Ending(reason, result=result)
    return Ending(_crash_text(what, code, text))


def wait_for(steps: Generator[None, None, T]) -> T:
    """Return what a generator returns, after a pause at each of its yields."""
    with contextlib.closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                returned: T = end.value
                return returned
            time.sleep(POLL_S)


def _wait(pid: int, lasts_s: float, is_needed: Callable[[], bool]) -> Generator[None, None, bool | None]:
    """Wait for a child; return whether it ended within its time, None: it is no longer needed."""
    began, asked_s, needed = time.monotonic(), 0.0, True
    while not has_ended(pid):
        elapsed_s = time.monotonic() - began
        if elapsed_s > lasts_s:
            return False if needed else None
        if needed and elapsed_s - asked_s > ASK_S:
            asked_s, needed = elapsed_s, is_needed()
            lasts_s = lasts_s if needed else elapsed_s + GRACE_S
        yield
    return True


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
            pid = _fork()
    finally:
        if collects and pid != 0:
            gc.enable()
    return pid


def _fork(tries: int = 100) -> int:
    for _ in range(tries):
        try:
            return os.fork()
        except RuntimeError as error:  # of a hook, such as filelock's while another thread forks or locks
            refused = str(error)
            time.sleep(1e-3)
    raise OSError(errno.EAGAIN, refused)


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, also where a handler of the user's has reaped it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def end(pid: int, *signals: int) -> int | None:
    """End a child and its process group by the first signal that does; return its exit code, where known."""
    with contextlib.suppress(ChildProcessError):  # a handler of the user's has reaped it
        for number in (*signals, signal.SIGKILL):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # else the pid may be another's
            for kill in (os.killpg, os.kill):  # kill: a child that does not lead its group yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, number)
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


def _be_child(
    work: Callable[[], Any],
    limit_s: float,
    parent: int,
    report: int,
    stderr: int,
    *,
    is_cut_off: bool,
    yields: bool,
) -> NoReturn:
    try:
        reason, result = "", None
        try:
            leave_job(parent, signal.SIGKILL, yields=yields)
            _limit_computing(limit_s)  # of its helpers, too
            os.dup2(stderr, 2)
            if is_cut_off:
                _cut_off(report)
            result = work()
        except BaseException as error:
            reason = (config_failure(error) or "")[:REASON_CHARACTERS]
        os.write(report, pickle.dumps((reason, result if is_cut_off else None)))
        _flush()
        os._exit(0)
    finally:
        os._exit(1)


def leave_job(parent: int, dies_by: signal.Signals, *, yields: bool) -> None:
    """Detach this process from the one that it was forked from, whose end sends it `dies_by`.

    One signal ends it with its helpers, and Ctrl-C in the terminal does not reach it. yields: it stays in the
    session of its rank, beside which its priority counts; else a busy machine gives it a session's share.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, dies_by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    if yields:
        os.setpgid(0, 0)
    else:
        os.setsid()
    _LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the whole rank is not to be written to a core file
    signal.set_wakeup_fd(-1)  # of an event loop of the rank's
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for job_signal in _JOB_SIGNALS:
        if job_signal != dies_by:
            signal.signal(job_signal, signal.SIG_IGN)
    faulthandler.disable()  # the rank reports a crash, in one line
    # Files of its own: the rank's may hold text that is not written yet.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    knobs.compilation.listener = None  # the user's: the rank calls it


def _limit_computing(limit_s: float) -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    limit = max(1, math.ceil(min(limit_s, 1e9)))
    resource.setrlimit(resource.RLIMIT_CPU, (limit if most < 0 else min(limit, most), most))


def _cut_off(report: int) -> None:
    """Close all files and sockets of this process except `report`, and forbid it to open any."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    close_files(report)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def close_files(report: int) -> None:
    """Close all files of this process except standard files and `report`; their numbers stay taken.

    Libraries close theirs by number in forked processes (libuv, of torch's store): it must not be another's.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (null, report):
            with contextlib.suppress(OSError):  # the one that listed them
                os.fstat(int(name))
                os.dup2(null, int(name), inheritable=False)
