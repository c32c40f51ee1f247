"""A pool in a process of its own, forked from the rank, so that runs go on while it compiles.

It forks a child for each candidate and reports each that ends. It keeps none of the rank's files open: a pipe
that the rank closes is closed, and the device is free when the rank has ended.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, NoReturn

from .compiler_child import PR_SET_DUMPABLE, close_files, fork, has_ended, leave_job, prctl, reaped
from .pool import Compilation, CompileOutcome, Pool, PoolOptions

READ_BYTES = 1 << 20  # at a time; a candidate takes up to 1000
PRIORITY = 10  # nice(2): a tenth of a core that one other thread wants
PRIORITY_TRIES, PRIORITY_PAUSE_S = 100, 0.1  # Linux lets ten sessions of a host change theirs in a second


class PoolProcess:
    """Compiles candidates in a forked process; raises OSError where the system allows no fork.

    The process and its children end when all is compiled, with `close`, and with the thread that made it.

    priorities: of the compilations, from 0 to 255; see `prefer`.
    """

    def __init__(
        self, compilations: Sequence[Compilation], options: PoolOptions, priorities: Sequence[int]
    ) -> None:
        self._priorities = mmap.mmap(-1, max(len(compilations), 1))  # shared with the process
        self.prefer(priorities)
        report = os.memfd_create("compiled")  # an empty line when it begins, then one for each candidate
        parent = os.getpid()
        try:
            pid = fork()
        except OSError:
            os.close(report)
            raise
        if pid == 0:
            _serve(compilations, options, self._priorities, parent, report)
        self._report, self._read_bytes, self._pid = report, 0, pid
        self.close = weakref.finalize(self, _end, pid, report, parent)  # at exit, at the latest

    def prefer(self, priorities: Sequence[int]) -> None:
        """Set the priorities: the greatest is compiled next, 0 never."""
        self._priorities[: len(priorities)] = bytes(priorities)

    def read(self) -> list[CompileOutcome]:
        """Return the compilations that have ended since this was last called."""
        text = os.pread(self._report, READ_BYTES, self._read_bytes)
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [CompileOutcome(*json.loads(line)) for line in whole.splitlines() if line]

    @property
    def has_begun(self) -> bool:
        return os.fstat(self._report).st_size > 0

    @property
    def has_ended(self) -> bool:
        """Return whether it has ended; its last outcomes may still be unread."""
        try:
            return has_ended(self._pid)
        except ChildProcessError:  # a handler of the user's has reaped it
            return True


def _end(pid: int, report: int, parent: int) -> None:
    """End the process and its children. Only the parent may: its own forked children hold a copy of this."""
    if os.getpid() != parent:
        return
    os.close(report)
    with contextlib.suppress(ChildProcessError, ProcessLookupError):  # a handler of the user's has reaped it
        for ending in (signal.SIGTERM, signal.SIGKILL):
            has_ended(pid)  # raises where the pid may be another process's by now
            os.kill(pid, ending)
            if reaped(pid) is not None:
                return


# ---- in the process


def _serve(
    compilations: Sequence[Compilation],
    options: PoolOptions,
    priorities: mmap.mmap,
    parent: int,
    report: int,
) -> NoReturn:
    def tell(outcome: CompileOutcome) -> None:
        os.write(report, json.dumps(astuple(outcome)).encode() + b"\n")

    try:
        signal.signal(signal.SIGTERM, _leave)  # before that signal can come
        leave_job(parent, signal.SIGTERM, leads_session=True)
        close_files(report)
        os.write(report, b"\n")
        if options.in_background:
            _yield_cores()
        prctl(PR_SET_DUMPABLE, 0)  # from here on /proc/self cannot be written
        with contextlib.closing(Pool(compilations, options, priorities, tell)) as pool:
            pool.run()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _yield_cores() -> None:
    """Leave nine tenths of a core to a thread of the rank that wants it too; children inherit this."""
    os.setpriority(os.PRIO_PROCESS, 0, max(PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))
    # Where Linux shares cores out by sessions, that counts inside of one only, and this process has its own.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "wb", buffering=0) as autogroup:
        for _ in range(PRIORITY_TRIES):
            if autogroup.write(str(PRIORITY).encode()):
                break
            time.sleep(PRIORITY_PAUSE_S)


def _leave(number: int, frame: Any) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    sys.exit()
