"""Compiles the candidates of a context, each in a child process, shared out over the ranks of a host.

No message is sent: each rank starts at another candidate, claims what nobody compiles, and comes back later
to what a peer compiles, to find the binary in Triton's cache or the reason why there is none.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs

from .. import settings
from .compiler_child import CompilerChild

PATIENCE_SHARE = 0.8  # of the peers' patience: what preflight may take before it gives up what is left
CLAIM_GRACE_S = 10.0  # a claim held this much longer than two children may take is no longer respected
_POLL_S = 5e-3  # between looks at children and peers


class NotCompiled(Exception):
    """A candidate whose compilation crashed, took too long or failed, in a child; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    session: str = ""  # the same text on all ranks that share their failures, and in no other session
    local_rank: int = 0
    local_ranks: int = 1  # of this host
    limit_s: float = settings.DEFAULT_COMPILE_TIMEOUT_S  # for one candidate; 0: none, and no child
    until: float = math.inf  # by time.monotonic(), for all candidates

    @classmethod
    def agreed(cls, session: str, position: int, ranks: int, patience_s: float) -> Terms:
        """Return the terms for a rank whose peers wait `patience_s`, inf without peers."""
        local_rank, local_ranks = settings.place_on_host(position, ranks)
        limit_s, until = settings.compile_timeout_s(), time.monotonic() + PATIENCE_SHARE * patience_s
        return cls(
            session=session, local_rank=local_rank, local_ranks=local_ranks, limit_s=limit_s, until=until
        )

    @property
    def workers(self) -> int:
        """Return how many candidates this rank compiles at a time: its share of the cores it may use."""
        share, rest = divmod(len(os.sched_getaffinity(0)), self.local_ranks)
        return max(1, share + (self.local_rank < rest))


@dataclass(kw_only=True)
class Tally:
    """Where the binaries of one context came from."""

    compiled: int = 0  # by this rank
    from_peers: int = 0  # compiled by another process meanwhile
    cached: int = 0  # there at the start
    failed: int = 0
    seconds: float = 0.0
    workers: int = 0
    remark: str = ""


class CompileClaim:
    """The right to compile one binary on this host, until released.

    Raises BlockingIOError where another process has it, other OSErrors where files cannot be locked.
    """

    def __init__(self, key: str, session: str) -> None:
        self._session = session
        directory = Path(knobs.cache.dir) / "dist_autotune-claims" / socket.gethostname()
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / _digest(key)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def verdict(self) -> str:
        """Why it cannot be compiled, as a process of this session found out; empty: not known."""
        session, _, reason = os.pread(self._descriptor, 1 << 16, 0).decode(errors="replace").partition("\n")
        return reason if session == self._session else ""

    def condemn(self, reason: str) -> None:
        """Tell the other processes of this session that it cannot be compiled."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{self._session}\n{reason}".encode(errors="replace"), 0)

    def release(self, *, is_compiled: bool = False) -> None:
        """Let others claim it; the file of a binary that is there goes."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # not by closing alone: forked children have copies
            if is_compiled:
                # Who has it open and locks it next finds the binary, so two files of one name do no harm.
                self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


@dataclass(eq=False)
class Task:
    """One binary to compile: Triton's work, the future that waits for it, and who is at it."""

    work: Callable[[], Any]
    future: Future[Any]
    claim: CompileClaim | None = None
    child: CompilerChild | None = None
    refused_at: float | None = None  # when a peer was first seen to compile it

    @property
    def key(self) -> str:
        return str(self.future._key)  # type: ignore[attr-defined]  # put there by AsyncCompileMode

    def finish(self) -> None:
        """Do the work here: find the binary of a child or a peer, or raise what is the user's to see."""
        try:
            self.future.set_result(self.work())
        except Exception as error:
            self.future.set_exception(error)
        if self.claim is not None:
            self.claim.release(is_compiled=True)

    def refuse(self, reason: str) -> None:
        self.future.set_exception(NotCompiled(reason))
        if self.claim is not None:
            self.claim.release()

    def give_up(self) -> None:
        """Leave no child, no claim and no future without a result."""
        if self.child is not None:
            self.child.close()
        if not self.future.done():
            self.refuse("given up")


class Pool:
    """Stands in for the executor of Triton's AsyncCompileMode: compiles in `run` what was submitted."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._tasks: list[Task] = []
        self._waiting: deque[Task] = deque()
        self._running: list[Task] = []
        self._tally = Tally(workers=terms.workers)
        self._why_here = ""  # why no child is of use: this process compiles what is left

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        self._tasks.append(Task(work, Future()))
        return self._tasks[-1].future

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.give_up()

    def run(self) -> Tally:
        """Give every future its kernel or an exception, NotCompiled for what a child found out."""
        terms, tally = self._terms, self._tally
        self._why_here = "no limit is set" if terms.limit_s <= 0 else why_not_shared()
        if self._why_here:
            with ThreadPoolExecutor(terms.workers) as executor:
                list(executor.map(Task.finish, self._tasks))
            tally.compiled = len(self._tasks)
        else:
            self._run_children()
            tally.failed = sum(isinstance(task.future.exception(), NotCompiled) for task in self._tasks)
        if self._why_here:
            tally.remark = f"compiled in this process, without a limit: {self._why_here}"
        return tally

    def _run_children(self) -> None:
        first = len(self._tasks) * self._terms.local_rank // self._terms.local_ranks
        for task in [*self._tasks[first:], *self._tasks[:first]]:
            if has_binary(task.key):
                self._tally.cached += 1
                task.finish()
            else:
                self._waiting.append(task)
        while self._waiting or self._running:
            if not (self._collect() or self._begin()):
                time.sleep(_POLL_S)

    def _begin(self) -> bool:
        """Start or end what can be now; return whether there was anything."""
        before = len(self._waiting)
        for _ in range(before):
            if len(self._running) >= self._terms.workers:
                break
            task = self._waiting.popleft()
            if time.monotonic() > self._terms.until:
                task.refuse("not compiled: the candidates together took longer than the peers wait")
            elif not self._claim(task):
                self._waiting.append(task)
            elif has_binary(task.key):
                self._tally.from_peers += 1
                task.finish()
            elif task.claim is not None and task.claim.verdict:
                task.refuse(task.claim.verdict)
            else:
                self._start(task)
        return len(self._waiting) < before

    def _claim(self, task: Task) -> bool:
        """Claim a task's binary; False while a peer is at it."""
        try:
            task.claim = CompileClaim(task.key, self._terms.session)
        except BlockingIOError:
            now = time.monotonic()
            task.refused_at = task.refused_at or now
            # If its owner is stopped, this rank compiles for itself.
            return now - task.refused_at >= 2 * self._terms.limit_s + CLAIM_GRACE_S
        except OSError as error:
            self._tally.remark = f"nothing shared, no locks in {knobs.cache.dir}: {error.strerror or error}"
        return True

    def _start(self, task: Task) -> None:
        if not self._why_here:
            try:
                limit_s = min(self._terms.limit_s, self._terms.until - time.monotonic())
                task.child = CompilerChild(task.work, limit_s)
                self._running.append(task)
                return
            except OSError as error:
                self._why_here = f"no child ({error.strerror})"
        self._compile_here(task)

    def _collect(self) -> bool:
        """End the tasks whose children have ended; return whether any has."""
        before = len(self._running)
        for task in tuple(self._running):
            assert task.child is not None
            if (ending := task.child.poll()) is None:
                continue
            self._running.remove(task)
            if ending.has_begun and ending.reason:
                if task.claim is not None:
                    task.claim.condemn(ending.reason)
                task.refuse(ending.reason)
            else:
                if not ending.has_begun:
                    self._why_here = "child processes do not start"
                self._compile_here(task)
        return len(self._running) < before

    def _compile_here(self, task: Task) -> None:
        self._tally.compiled += 1
        task.finish()


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
    """Return whether Triton will find the binary: the list of its files, written last, and each file."""
    name = base64.b32encode(bytes.fromhex(_digest(key))).decode().rstrip("=")
    try:
        (listing,) = (Path(knobs.cache.dir) / name).glob("__grp__*.json")
        paths = json.loads(listing.read_bytes())["child_paths"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(map(os.path.exists, paths))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
