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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs

from .. import settings
from .process import CompilerChild

PATIENCE_SHARE = 0.8  # of the peers' patience: what preflight may take before it gives up what is left
CLAIM_GRACE_S = 10.0  # a claim held this much longer than two children may take is no longer respected
_WITHOUT_LIMIT = "compiled in this process, without a limit"
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1e-3, 20e-3  # between looks at children and peers


class NotCompiled(Exception):
    """A candidate whose compilation crashed, took too long or failed, in a child; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On what terms a rank compiles its candidates."""

    session: str = ""  # the same text on all ranks that share their failures, and in no other session
    local_rank: int = 0
    local_ranks: int = 1  # of this host
    limit_s: float = settings.DEFAULT_COMPILE_TIMEOUT_S  # for one candidate; 0: none, and no child
    until: float = math.inf  # by time.monotonic(), for all candidates

    @classmethod
    def agreed(cls, session: str, position: int, ranks: int, patience_s: float) -> Terms:
        """Return the terms for a rank whose peers wait `patience_s`, inf without peers."""
        local_rank, local_ranks = settings.place_on_host(position, ranks)
        return cls(
            session=session,
            local_rank=local_rank,
            local_ranks=local_ranks,
            limit_s=settings.compile_timeout_s(),
            until=time.monotonic() + PATIENCE_SHARE * patience_s,
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


@dataclass(eq=False)
class Task:
    """One binary to compile: Triton's work, and what it waits for."""

    work: Callable[[], Any]
    future: Future[Any]
    refused_at: float | None = None  # when a peer was first seen to compile it
    has_retried: bool = False

    @property
    def key(self) -> str:
        return str(self.future._key)  # type: ignore[attr-defined]  # put there by AsyncCompileMode


def compile_all(tasks: Sequence[Task], terms: Terms) -> Tally:
    """Give every task's future its kernel or an exception, NotCompiled for what a child found out."""
    why_not = "no limit is set" if terms.limit_s <= 0 else why_not_shared()
    if not why_not:
        return _Sharing(tasks, terms).run()
    with ThreadPoolExecutor(terms.workers) as executor:
        list(executor.map(_finish, tasks))
    return Tally(compiled=len(tasks), workers=terms.workers, remark=f"{_WITHOUT_LIMIT}: {why_not}")


def _finish(task: Task) -> None:
    """Do the work here: it finds the binary of a child or a peer, or raises what is the user's to see."""
    try:
        task.future.set_result(task.work())
    except Exception as error:
        task.future.set_exception(error)


class _Sharing:
    """This rank's part."""

    def __init__(self, tasks: Sequence[Task], terms: Terms) -> None:
        first = len(tasks) * terms.local_rank // terms.local_ranks
        self._waiting = deque([*tasks[first:], *tasks[:first]])
        self._running: dict[Task, tuple[CompilerChild, CompileClaim]] = {}
        self._held: set[CompileClaim] = set()
        self._terms = terms
        self._binaries = Binaries(terms.session)
        self._tally = Tally(workers=terms.workers)
        self._why_here = ""  # why no child is of use: this process compiles what is left

    def run(self) -> Tally:
        try:
            self._take_cached()
            pause_s = _FIRST_PAUSE_S
            while self._waiting or self._running:
                if self._collect() or self._begin():
                    pause_s = _FIRST_PAUSE_S
                else:
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        finally:
            for child, _ in self._running.values():
                child.close()
            for claim in self._held:
                claim.release()
        if self._why_here:
            self._tally.remark = f"{_WITHOUT_LIMIT}: {self._why_here}"
        elif self._binaries.remark:
            self._tally.remark = self._binaries.remark
        return self._tally

    def _take_cached(self) -> None:
        for task in list(self._waiting):
            if self._binaries.has(task.key):
                self._waiting.remove(task)
                self._tally.cached += 1
                _finish(task)

    def _begin(self) -> bool:
        """Take up what can be taken up now; return whether there was anything."""
        before = len(self._waiting)
        for _ in range(before):
            if len(self._running) >= self._terms.workers:
                break
            task = self._waiting.popleft()
            if not self._take_up(task):
                self._waiting.append(task)
        return len(self._waiting) < before

    def _take_up(self, task: Task) -> bool:
        """Start the task, or end it; return False while a peer is at it."""
        if time.monotonic() > self._terms.until:
            self._refuse(task, "not compiled: the candidates together took longer than the peers wait")
            return True
        claim = self._binaries.claim(task.key)
        if claim is None:
            now = time.monotonic()
            task.refused_at = task.refused_at or now
            if now - task.refused_at < 2 * self._terms.limit_s + CLAIM_GRACE_S:
                return False
            claim = CompileClaim(self._terms.session)  # its owner is stopped: this rank compiles for itself
        self._held.add(claim)
        if self._binaries.has(task.key):
            self._tally.from_peers += 1
            _finish(task)
            self._let_go(claim, is_compiled=True)
        elif claim.verdict:
            self._refuse(task, claim.verdict)
            self._let_go(claim)
        else:
            self._start(task, claim)
        return True

    def _start(self, task: Task, claim: CompileClaim) -> None:
        limit_s = min(self._terms.limit_s, self._terms.until - time.monotonic())
        if not self._why_here:
            try:
                self._running[task] = CompilerChild(task.work, limit_s), claim
                return
            except OSError as error:
                self._why_here = f"no child ({error.strerror})"
        self._end_here(task, claim)

    def _collect(self) -> bool:
        """Take in what has ended; return whether anything has."""
        has_ended = False
        for task, (child, claim) in list(self._running.items()):
            ending = child.poll()
            if ending is None:
                continue
            has_ended = True
            del self._running[task]
            is_unlucky = ending.was_idle or not ending.has_begun
            if is_unlucky and not task.has_retried and time.monotonic() < self._terms.until:
                task.has_retried = True
                self._start(task, claim)
            elif not ending.has_begun:
                self._why_here = "children do not begin"
                self._end_here(task, claim)
            elif ending.reason:
                claim.condemn(ending.reason)
                self._let_go(claim)
                self._refuse(task, ending.reason)
            else:
                self._end_here(task, claim)
        return has_ended

    def _end_here(self, task: Task, claim: CompileClaim) -> None:
        self._tally.compiled += 1
        _finish(task)
        self._let_go(claim, is_compiled=True)

    def _let_go(self, claim: CompileClaim, *, is_compiled: bool = False) -> None:
        claim.release(is_compiled=is_compiled)
        self._held.discard(claim)

    def _refuse(self, task: Task, reason: str) -> None:
        self._tally.failed += 1
        task.future.set_exception(NotCompiled(reason))


def why_not_shared() -> str:
    """Return why a binary that another process compiles would not be found; empty if it is."""
    if knobs.compilation.always_compile:
        return "TRITON_ALWAYS_COMPILE is set"
    if knobs.cache.manager_class is not None:
        return "TRITON_CACHE_MANAGER keeps them elsewhere"
    if getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None:
        return "a hook changes the compiler's stages, and with them the names of binaries"
    return ""


class CompileClaim:
    """The right to compile one binary on this host, until released; without a file it is not exclusive."""

    def __init__(self, session: str, path: Path | None = None, descriptor: int = -1) -> None:
        self._session = session
        self._path = path
        self._descriptor = descriptor

    @property
    def verdict(self) -> str:
        """Why it cannot be compiled, as a process of this session found out; empty: not known."""
        if self._descriptor < 0:
            return ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            written = json.loads(os.pread(self._descriptor, 1 << 16, 0))
            return str(written["reason"]) if written["session"] == self._session else ""
        return ""  # an empty file, or what a dying process wrote

    def condemn(self, reason: str) -> None:
        """Tell the other processes of this session that it cannot be compiled."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(
                    self._descriptor, json.dumps({"session": self._session, "reason": reason}).encode(), 0
                )

    def release(self, *, is_compiled: bool = False) -> None:
        """Let others claim it; nothing is left of the file of a binary that is there."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            if is_compiled and self._path is not None:
                # Who has it open and locks it next finds the binary, so two files of one name do no harm.
                self._path.unlink()
        with contextlib.suppress(OSError):  # not by closing alone: forked children have copies
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1


class Binaries:
    """Compiled kernels by the key that Triton computes for them, as `session` sees them."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._cache = Path(knobs.cache.dir)
        self._claims: Path | None = self._cache / "dist_autotune-claims" / socket.gethostname()
        self.remark = ""  # why there are no claims: each process compiles for itself

    def has(self, key: str) -> bool:
        """Return whether Triton will find the binary: the list of its files, written last, and each file."""
        name = base64.b32encode(bytes.fromhex(_digest(key))).decode().rstrip("=")
        try:
            (listing,) = (self._cache / name).glob("__grp__*.json")
            paths = json.loads(listing.read_bytes())["child_paths"].values()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return all(map(os.path.exists, paths))

    def claim(self, key: str) -> CompileClaim | None:
        """Return the claim on a binary; None: another process has it."""
        if self._claims is None:
            return CompileClaim(self._session)
        path = self._claims / _digest(key)
        descriptor = -1
        try:
            self._claims.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            self.remark = f"nothing shared, no locks in {self._claims}: {error.strerror or error}"
            self._claims = None
            return CompileClaim(self._session)
        return CompileClaim(self._session, path, descriptor)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
