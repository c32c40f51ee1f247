"""Compiles candidates, each in a child process; the ranks of a host share the work.

They send no messages: each rank starts at another candidate and locks what it compiles. What a peer has
locked it looks at later, and finds the binary in Triton's cache or, in the lock's file, why there is none.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from triton import knobs

from .. import settings
from .binaries import CompileLock, has_binary
from .compiler_child import WALL_FACTOR, CompilerChild

WAIT_SHARE = 0.8  # of the time that peers wait, for preflight; then it gives up the candidates left
LOCK_GRACE_S = 10.0  # a lock counts for as long as two children may take, and this much longer
# Of a rank's cores: with 15 of 16, steps of 36 ms took 62; with 8, 45 (H200, 2026-11-23).
BACKGROUND_SHARE = 0.5
T = TypeVar("T")
POLL_S = {False: 5e-3, True: 50e-3}  # between looks at children and peers; behind the runs


@dataclass(frozen=True, eq=False)
class Compilation:
    """How Triton compiles one candidate for a launch; holds none of the launch's arguments."""

    key: str  # names the binary in Triton's cache
    compile: Callable[[], Any]  # finds the binary there, or compiles it; returns the kernel
    keep: Callable[[Any], Any]  # puts the kernel where launches find it; returns the one they find


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    session: str = ""  # the same text on all ranks that share their failures, and in no other session
    local_rank: int = 0
    local_ranks: int = 1  # of this host
    limit_s: float = settings.DEFAULT_COMPILE_TIMEOUT_S  # for one candidate; 0: none, and no child
    until: float = math.inf  # by time.monotonic(), for all candidates
    jobs: int | None = None  # candidates compiled at a time; None: as many as `workers` says
    in_background: bool = False  # runs go on meanwhile: children yield the cores

    @classmethod
    def of_rank(
        cls, session: str, position: int, ranks: int, peers_wait_s: float, **chosen: Any
    ) -> PoolOptions:
        """Return the options of a rank whose peers wait `peers_wait_s`, inf without peers or behind runs."""
        local_rank, local_ranks = settings.place_on_host(position, ranks)
        limit_s, until = settings.compile_timeout_s(), time.monotonic() + WAIT_SHARE * peers_wait_s
        chosen |= {"local_rank": local_rank, "local_ranks": local_ranks}
        return cls(session=session, limit_s=limit_s, until=until, **chosen)

    @property
    def workers(self) -> int:
        """Return how many candidates this rank compiles at a time: its share of the cores it may use."""
        if self.jobs is not None:
            return self.jobs
        share, rest = divmod(len(os.sched_getaffinity(0)), self.local_ranks)
        share += self.local_rank < rest
        return max(1, int(share * BACKGROUND_SHARE) if self.in_background else share)

    @property
    def lasts_s(self) -> float:
        """Return how long a child may take for one candidate."""
        return self.limit_s * (WALL_FACTOR if self.in_background else 1)

    def in_turn(self, candidates: Sequence[T]) -> list[T]:
        """Return the candidates of one context in this rank's order: each rank of a host begins elsewhere."""
        first = len(candidates) * self.local_rank // self.local_ranks
        return [*candidates[first:], *candidates[:first]]


BY_RANK = "compiled in this process, without a limit"
COMPILED, FROM_PEERS, CACHED, FAILED = "compiled", "from_peers", "cached", "failed"


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

    place: int  # among the process's compilations
    ending: str  # COMPILED, FROM_PEERS, CACHED or FAILED
    reason: str = ""  # why it failed
    remark: str = ""  # on all that follow


@dataclass(eq=False)
class Task:
    """A binary to compile."""

    place: int
    compilation: Compilation
    lock: CompileLock | None = None
    child: CompilerChild | None = None
    refused_at: float | None = None  # when a peer was first seen to compile it

    @property
    def key(self) -> str:
        return self.compilation.key

    def give_up(self, *, is_compiled: bool = False) -> None:
        """End its child and release its lock, if there are any."""
        if self.child is not None:
            self.child.close()
        if self.lock is not None:
            self.lock.release(is_compiled=is_compiled)
            self.lock = None


class Pool:
    """Compiles in `run`; `close` ends its children and gives up its locks.

    priorities: of the compilations, read anew each time. The greatest is compiled first, and none with 0.
    report: called with each outcome.
    """

    def __init__(
        self,
        compilations: Sequence[Compilation],
        options: PoolOptions,
        priorities: mmap.mmap,
        report: Callable[[CompileOutcome], None],
    ) -> None:
        self._options, self._priorities, self._report = options, priorities, report
        self._waiting = [Task(place, compilation) for place, compilation in enumerate(compilations)]
        self._running: list[Task] = []
        self._has_children = True  # False: they do not start, and the rank compiles the rest
        self._remark = ""

    def close(self) -> None:
        for task in (*self._waiting, *self._running):
            task.give_up()

    def run(self) -> None:
        """Compile until every task has ended."""
        while self._waiting or self._running:
            if not (self._collect() or self._begin()):
                time.sleep(POLL_S[self._options.in_background])

    def _begin(self) -> bool:
        """Start or end each task that can be; return whether any was."""
        before = len(self._waiting)
        priorities = {task: self._priorities[task.place] for task in self._waiting}
        for task in sorted(self._waiting, key=lambda task: -priorities[task]):
            if priorities[task] and self._try(task):
                self._waiting.remove(task)
        return len(self._waiting) < before

    def _try(self, task: Task) -> bool:
        """Start or end a task; False: it has to wait. Taking over a peer's result needs no free worker."""
        has_room = len(self._running) < self._options.workers
        if not has_room and task.refused_at is None:
            return False
        if time.monotonic() > self._options.until:
            self._end(task, FAILED, "not compiled: the candidates together took longer than the peers wait")
        elif not self._lock(task):
            return False
        elif has_binary(task.key):
            self._end(task, FROM_PEERS)
        elif task.lock is not None and task.lock.known_failure:
            self._end(task, FAILED, task.lock.known_failure)
        elif has_room:
            self._start(task)
        else:
            task.give_up()
            return False
        return True

    def _lock(self, task: Task) -> bool:
        """Lock a task's binary; False while a peer compiles it."""
        try:
            task.lock = CompileLock(task.key, self._options.session)
        except BlockingIOError:
            now = time.monotonic()
            task.refused_at = task.refused_at or now
            # If its owner is stopped, this rank compiles for itself.
            return now - task.refused_at >= 2 * self._options.lasts_s + LOCK_GRACE_S
        except OSError as error:
            self._remark = f"nothing shared, no locks in {knobs.cache.dir}: {error.strerror or error}"
        return True

    def _start(self, task: Task) -> None:
        if self._has_children:
            options = self._options
            try:
                limit_s = min(options.limit_s, options.until - time.monotonic())
                task.child = CompilerChild(task.compilation.compile, limit_s, yields=options.in_background)
                self._running.append(task)
                return
            except OSError as error:
                self._leave_to_rank(f"no child ({error.strerror})")
        self._end(task, COMPILED)

    def _leave_to_rank(self, why: str) -> None:
        self._has_children, self._remark = False, f"{BY_RANK}: {why}"

    def _collect(self) -> bool:
        """End the tasks whose children have ended; return whether any has."""
        before = len(self._running)
        for task in tuple(self._running):
            assert task.child is not None
            if (ending := task.child.poll()) is None:
                continue
            if ending.has_begun and ending.reason:
                if task.lock is not None:
                    task.lock.record_failure(ending.reason)
                self._end(task, FAILED, ending.reason)
            else:
                if not ending.has_begun:
                    self._leave_to_rank("child processes do not start")
                self._end(task, COMPILED)
            self._running.remove(task)
        return len(self._running) < before

    def _end(self, task: Task, ending: str, reason: str = "") -> None:
        task.give_up(is_compiled=not reason)
        self._report(CompileOutcome(task.place, ending, reason, self._remark))
