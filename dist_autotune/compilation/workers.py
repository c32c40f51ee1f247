"""What a forked process does: it forks workers of its own, which take one piece of work after the other.

So a rank is stopped by one fork, however many candidates compile at a time, and a crash ends one worker. They
touch no CUDA, run no finalizers, ignore the signals that are meant for the job, and die with the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import mmap
import os
import pickle
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from triton import knobs

from .config_failures import config_failure
from .processes import Stillness, end_worker, flush, shared_file

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4  # prctl(2)
LOOK_S = 50e-3  # between looks at workers
STILL_S = 5.0  # without computing: a process that stands still waits for a lock that nobody opens
REASON_CHARACTERS = 1000  # of a failure's text
STDERR_BYTES = 1 << 20  # of the compiler's own words: more is cut off
WALL_FACTOR = 10  # times its limit that a piece of work may last that yields the cores
PRIORITY = 10  # nice(2) of such work: a tenth of a core that one other thread wants
WORKER_S = 10.0  # that a worker computes before it is asked anew whether there may be one
STANDS_STILL, NO_WORKER = 77, 78  # exit codes: a worker does; none can be forked

_LIBC = ctypes.CDLL(None)  # loaded here: a forked process only calls it
_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTOU)
_ERROR_LINE = re.compile(r"(?:LLVM ERROR|Assertion|error:|fatal).*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Pieces of work, each known by its place, and how they are done.

    limit_s: what a piece may compute, and how long it may last; ten times as long if it yields.
    workers: returns how many there may be, given how many there are. is_cut_off: the work is a user's hook,
    which has no file or socket and can open none; its result is told. yields: it gets little time on the
    cores. moves: where one of these stands still, all end: a process that is forked later may do them.
    """

    pieces: Sequence[Callable[[], Any]]
    limit_s: float
    workers: Callable[[int], int] = lambda own: 1
    is_cut_off: bool = False
    yields: bool = False
    moves: Container[int] = ()

    def crash_text(self, code: int, stderr: str) -> str:
        """Return how a piece ended that has ended its worker."""
        if code == -signal.SIGXCPU:
            what = "the hook did not end" if self.is_cut_off else "did not compile"
            return f"{what} within {self.limit_s:g} s"
        return crash_text("the hook" if self.is_cut_off else "the compiler", code, stderr)


@dataclass
class _Worker:
    slot: int  # of `_under_way`: the place of its first piece
    stderr: int  # a file, of the piece under way
    place: int  # of that piece, when last looked
    lasted_s: float = 0.0  # that piece
    still_s: float = 0.0  # without computing
    stillness: Stillness = field(default_factory=Stillness)


class Foreman:
    """Does `work` in this process, which `parent` has just forked.

    report: the file to which (place, reason, result) of each piece is written, pickled; see `Ending`.
    """

    def __init__(self, work: Work, report: int, parent: int) -> None:
        _leave_job(parent, yields=work.yields)
        _close_files(report)
        self._work, self._report = work, report
        self._workers: dict[int, _Worker] = {}  # by process id
        self._stderr = os.dup(2)
        # By slot, the place of the piece under way; -1: none.
        self._under_way = memoryview(mmap.mmap(-1, 4 * len(work.pieces))).cast("i")
        self._taken = shared_file("pieces-taken")  # so many as its offset, which all workers share
        self._looked_s = 0.0  # so far, without pauses
        self._again: list[int] = []  # places of pieces that were taken and not begun

    def run(self) -> int:
        """Return this process's exit code when all is done; raises OSError where it can fork no worker."""
        looked = time.monotonic()
        while True:
            while self._begin():
                pass
            if not self._workers:
                return 0
            time.sleep(LOOK_S)
            before, looked = looked, time.monotonic()
            # A pause, in which all processes are stopped, is one look.
            lasted_s = min(looked - before, 2 * LOOK_S)
            self._looked_s += lasted_s
            for pid, worker in list(self._workers.items()):
                self._look_at(pid, worker, lasted_s)
                if worker.still_s > STILL_S and worker.place in self._work.moves:
                    return STANDS_STILL

    def _begin(self) -> bool:
        """Begin a worker, where there may be one and a piece is left; return whether."""
        own, foreman = len(self._workers), os.getpid()
        if own >= max(self._work.workers(own), 1):
            return False
        place = self._again.pop() if self._again else self._take()
        if place is None:
            return False
        stderr = -1
        try:
            stderr = shared_file("worker-stderr")
            self._under_way[place] = place
            pid = os.fork()
        except (OSError, RuntimeError):  # RuntimeError: of a hook
            if stderr >= 0:
                os.close(stderr)
            self._again.append(place)
            if not own:
                raise
            return False  # fewer do it
        if pid == 0:
            self._do_pieces(place, stderr, foreman)
        self._workers[pid] = _Worker(place, stderr, place)
        return True

    def _look_at(self, pid: int, worker: _Worker, lasted_s: float) -> None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if (place := self._under_way[worker.slot]) != worker.place:
            worker.place, worker.lasted_s = place, 0.0
        worker.lasted_s += lasted_s
        most_s = self._work.limit_s * (WALL_FACTOR if self._work.yields else 1)
        if ended:
            self._end(pid, worker, os.waitstatus_to_exitcode(status))
        elif worker.lasted_s > most_s:
            end_worker(pid)
            self._end(pid, worker, -signal.SIGXCPU)
            if (begun := self._under_way[worker.slot]) not in (place, -1):  # just now
                self._again.append(begun)
        else:
            worker.still_s = worker.stillness.look(pid, self._looked_s)

    def _end(self, pid: int, worker: _Worker, code: int) -> None:
        """Tell how the piece ended with which a worker has ended, if it was one."""
        del self._workers[pid]
        said = os.pread(worker.stderr, STDERR_BYTES, 0)
        os.close(worker.stderr)
        os.write(self._stderr, said)
        if worker.place >= 0:
            self._tell(worker.place, self._work.crash_text(code, said.decode(errors="replace")))

    def _tell(self, place: int, reason: str, result: Any = None) -> None:
        """Tell how a piece has ended; what was told of it first counts."""
        os.write(self._report, pickle.dumps((place, reason, result)))

    def _take(self) -> int | None:
        """Take a piece that nobody has taken, and return its place; None: none is left."""
        # Linux adds to an offset that processes share under the file's lock; writes there are not so safe.
        place = os.lseek(self._taken, 1, os.SEEK_CUR) - 1
        return place if place < len(self._work.pieces) else None

    # -- in a worker

    def _do_pieces(self, slot: int, stderr: int, foreman: int) -> NoReturn:
        """Do the piece that stands in a slot, and others as long as some are left."""
        place: int | None = slot
        code = 1
        try:
            _die_with(foreman)
            _be_expendable()
            os.dup2(stderr, 2)
            if self._work.is_cut_off:
                _close_standard_files()
            while place is not None:
                _limit_computing(self._work.limit_s)  # of its helpers, too
                self._under_way[slot] = place
                self._do(place)
                self._under_way[slot] = -1
                place = self._take() if time.process_time() < WORKER_S else None
            code = 0
        finally:
            os._exit(code)

    def _do(self, place: int) -> None:
        """Do a piece, tell how it has ended, and empty stderr for the next one."""
        reason, result = "", None
        try:
            result = self._work.pieces[place]()
        except BaseException as error:
            reason = (config_failure(error) or "")[:REASON_CHARACTERS]
        flush()
        if said := os.pread(2, STDERR_BYTES, 0):
            os.write(self._stderr, said)
            os.ftruncate(2, 0)
        self._tell(place, reason, result if self._work.is_cut_off else None)


def crash_text(what: str, code: int | None, stderr: str) -> str:
    """Return how a process ended that was to tell more."""
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


def _leave_job(parent: int, *, yields: bool) -> None:
    """Detach this process from its rank, whose end ends it.

    One signal ends it with its helpers, and Ctrl-C in the terminal does not reach it. yields: it stays in the
    session of its rank, beside which its priority counts; else a busy machine gives it a session's share.
    """
    _die_with(parent)
    if yields:
        os.setpgid(0, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))
    else:
        os.setsid()
    signal.set_wakeup_fd(-1)  # of an event loop of the rank's
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for job_signal in _JOB_SIGNALS:
        signal.signal(job_signal, signal.SIG_IGN)
    faulthandler.disable()  # the rank reports a crash, in one line
    # Files of its own: the rank's may hold text that is not written yet.
    with contextlib.suppress(OSError):  # closed
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    knobs.compilation.listener = None  # the user's: the rank calls it


def _die_with(parent: int) -> None:
    """Let the end of `parent`, which has forked this process, end it."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _be_expendable() -> None:
    """Let this process end first where memory runs out, and write no core file: it would hold the rank."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    _LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # after that, the file is root's


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
