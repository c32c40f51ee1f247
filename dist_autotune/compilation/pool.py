"""Compiles the candidates of a context, each in a child process, shared out over the ranks of a host.

No message is sent: each rank starts at another candidate, claims what nobody compiles, and comes back later
to what a peer compiles, to find the binary in Triton's cache or the reason why there is none.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .. import settings
from . import triton_cache
from .process import CompilerChild
from .triton_cache import Binaries, CompileClaim

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
    why_not = "no limit is set" if terms.limit_s <= 0 else triton_cache.why_not_shared()
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
