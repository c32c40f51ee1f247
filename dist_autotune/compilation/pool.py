"""Compiles candidates in a process forked from the rank, in a child for each, so that runs go on meanwhile.

It keeps none of the rank's files open: a pipe that the rank closes is closed, and the device is free when the
rank has ended. The ranks of a host send no messages: each compiles its share first, and then what it does not
find in Triton's cache of the others' shares.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from .. import settings
from . import child
from .binaries import has_binary

# Of a rank's cores: with 15 of 16, steps of 36 ms took 62; with 8, 45 (H200, 2026-11-23).
BACKGROUND_SHARE = 0.5
PRIORITY = 10  # nice(2): a tenth of a core that one other thread wants
START_S = 30.0  # the process takes milliseconds to begin; fork handlers of other libraries may hang
READ_BYTES = 1 << 20  # at a time; a candidate takes up to 1000
BY_RANK = "compiled in this process, without a limit"
Ended: TypeAlias = tuple[str, str, str]
COMPILED, FROM_PEERS, CACHED, FAILED = "compiled", "from_peers", "cached", "failed"


@dataclass(frozen=True, eq=False)
class Compilation:
    """How Triton compiles one candidate for a launch; holds none of the launch's arguments."""

    key: str  # names the binary in Triton's cache
    compile: Callable[[], Any]  # finds the binary there, or compiles it; returns the kernel
    keep: Callable[[Any], Any]  # puts the kernel where launches find it; returns the one they find


@dataclass(frozen=True)
class CompileOptions:
    """How a rank compiles."""

    local_rank: int = 0
    local_ranks: int = 1  # of this host
    limit_s: float = field(default_factory=settings.compile_timeout_s)  # for one candidate; 0: none, no child
    jobs: int | None = None  # candidates compiled at a time; None: as many as `workers` says
    in_background: bool = False  # runs go on meanwhile: children yield the cores

    @property
    def workers(self) -> int:
        """Return how many candidates this rank compiles at a time: its share of the cores it may use."""
        if self.jobs is not None:
            return self.jobs
        share, rest = divmod(len(os.sched_getaffinity(0)), self.local_ranks)
        share += self.local_rank < rest
        return max(1, int(share * BACKGROUND_SHARE) if self.in_background else share)

    def turn(self, index: int) -> int:
        """Return when a context's candidate at `index` is compiled: 0 with this rank's share, ..."""
        return (index - self.local_rank) % self.local_ranks


@dataclass(kw_only=True)
class CompileCounts:
    """Where the binaries of one context came from."""

    compiled: int = 0  # by this rank
    from_peers: int = 0  # compiled by another process meanwhile
    cached: int = 0  # there at the start
    failed: int = 0
    seconds: float = 0.0
    workers: int = 0
    remark: str = ""

    def add(self, ending: str) -> None:
        """Add a binary: COMPILED, FROM_PEERS, CACHED or FAILED."""
        setattr(self, ending, getattr(self, ending) + 1)


@dataclass(frozen=True)
class CompileOutcome:
    """How a compilation ended. COMPILED without a binary: the rank compiles itself, and meets the error."""

    place: int  # among the pool's compilations
    ending: str  # COMPILED, FROM_PEERS or FAILED
    reason: str = ""  # why it failed
    remark: str = ""


class Pool:
    """Compiles candidates, in order, in a forked process; raises OSError where the system allows no fork.

    The process and its children end when all is compiled, with `close`, and with the thread that made it.
    """

    def __init__(self, compilations: Sequence[Compilation], options: CompileOptions) -> None:
        self._report = os.memfd_create(
            "compiled"
        )  # an empty line when it begins, then one for each candidate
        self._began, self._read_bytes, self._parent = time.monotonic(), 0, os.getpid()
        try:
            self._pid = child.fork()
        except OSError:
            os.close(self._report)
            raise
        if self._pid == 0:
            _serve(compilations, options, self._parent, self._report)

    def read(self) -> list[CompileOutcome]:
        """Return the compilations that have ended since this was last called."""
        text = os.pread(self._report, READ_BYTES, self._read_bytes)
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [CompileOutcome(*json.loads(line)) for line in whole.splitlines() if line]

    @property
    def has_ended(self) -> bool:
        """Return whether it tells no more than `read` finds now: it has ended, or does not begin."""
        is_late = time.monotonic() - self._began > START_S and not os.fstat(self._report).st_size
        return is_late or child.has_ended(self._pid)

    def close(self) -> None:
        """End the process and its children. Only the parent may: its forked children hold a copy of this."""
        if os.getpid() == self._parent:
            os.close(self._report)
            child.end(self._pid, signal.SIGTERM)


# ---- in the process


def _serve(
    compilations: Sequence[Compilation], options: CompileOptions, parent: int, report: int
) -> NoReturn:
    waiting, running = deque(enumerate(compilations)), dict[int, Generator[None, None, Ended]]()
    try:
        signal.signal(signal.SIGTERM, _leave)  # before that signal can come
        child.leave_job(parent, signal.SIGTERM, yields=options.in_background)
        child.close_files(report)
        os.write(report, b"\n")
        if options.in_background:
            os.setpriority(os.PRIO_PROCESS, 0, max(PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))
        while waiting or running:  # on one thread: none forks or locks beside another one's fork
            while waiting and len(running) < options.workers:
                place, compilation = waiting.popleft()
                running[place] = _compiled(compilation, options)
            for place, steps in list(running.items()):
                try:
                    next(steps)
                except StopIteration as end:
                    os.write(report, json.dumps((place, *end.value)).encode() + b"\n")
                    del running[place]
            time.sleep(child.POLL_S)
    except Exception:
        traceback.print_exc()
    finally:
        for steps in running.values():
            steps.close()  # which kills its child
        os._exit(0)


def _leave(number: int, frame: Any) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    sys.exit()


def _compiled(compilation: Compilation, options: CompileOptions) -> Generator[None, None, Ended]:
    """Compile in a child: yields while it runs, returns the ending, why it failed, and a remark."""
    if has_binary(compilation.key):
        return FROM_PEERS, "", ""
    try:
        ending = yield from child.run_in_child(
            compilation.compile,
            options.limit_s,
            yields=options.in_background,
            is_needed=lambda: options.local_ranks == 1 or not has_binary(compilation.key),
        )
    except OSError as error:
        return COMPILED, "", f"{BY_RANK}: no child ({error.strerror})"
    if ending is None:
        return FROM_PEERS, "", ""
    return (FAILED, ending.reason, "") if ending.reason else (COMPILED, "", "")
