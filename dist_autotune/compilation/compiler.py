"""Compiles candidates that contexts wait for in other processes, and loads them in this one, between runs.

In replay mode the rank waits until all are loaded; online it loads a few after each run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..triton_api.launch import Launch, load_kernel
from . import preflight
from .binaries import has_binary, why_not_shared
from .child import POLL_S
from .pool import BY_RANK, CACHED, COMPILED, FAILED, Compilation, CompileCounts, CompileOptions, Pool
from .preflight import keeping_reason

FORMS = 8  # of a context: the candidates are compiled for so many; further ones by their launches
LOADING_SHARE = 0.25  # that loading may add to the time from run to run; one candidate in any case
MOST_FAILED_POOLS = 3  # that end and tell of no candidate; then this process compiles
TOO_LATE = "not compiled: the candidates together took longer than the peers wait"


@dataclass
class CompileState:
    """How far the candidates of one context are compiled."""

    asked: set[str] = field(default_factory=set)  # candidates that were given to the compiler
    left: int = 0  # candidates that are not compiled or not loaded yet
    forms: set[Any] = field(default_factory=set)  # of launch, until all is compiled; see `keep_form`
    is_varied: bool = False  # the context was launched in several forms

    def keep_form(self, form: Any) -> bool:
        """Return whether candidates are to be compiled for a form of launch: it is one of the first FORMS.

        form: the kernel that the launch has run. Launches of one config that need several binaries have
        several forms.
        """
        if form in self.forms or len(self.forms) > FORMS:
            return False
        self.is_varied |= bool(self.forms)
        self.forms.add(form)  # one more than `FORMS` tells that there were more
        return len(self.forms) <= FORMS

    @property
    def remark(self) -> str:
        return f"forms after the first {FORMS} left to their launches" if len(self.forms) > FORMS else ""


class CompiledContext(Protocol):
    """What the compiler reads and writes of a `RankContext`."""

    name: str
    compile: CompileState
    bans: dict[str, str]


@dataclass(eq=False)
class _Task:
    """A candidate to be compiled, for one form of launch, and loaded."""

    context: CompiledContext
    candidate: str
    compilation: Compilation
    turn: int  # among the candidates of a context: 0 is this rank's share
    is_compiled: bool = False


@dataclass(eq=False)
class _Waiting:
    """A context that waits for candidates."""

    counts: CompileCounts
    device: int  # of its first launch
    began: float


class Compiler:
    """Compiles and loads what contexts `want`, when it is told to `advance`.

    loading: entered, with context and candidate, while this process loads that candidate.
    """

    def __init__(
        self, options: CompileOptions, loading: Callable[[str, str], AbstractContextManager[None]]
    ) -> None:
        self._options, self._loading = options, loading
        self._waiting: dict[CompiledContext, _Waiting] = {}
        self._tasks: dict[_Task, None] = {}  # in order
        self._pool: Pool | None = None
        self._asked: list[_Task] = []  # of the pool
        self._failed_pools = 0  # in a row that told of no candidate
        # Why this process compiles; empty: children do.
        self._no_child_because = "no limit is set" if options.limit_s <= 0 else why_not_shared()
        self._advanced: float | None = None  # when `advance` has last ended

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def want(self, context: CompiledContext, launch: Launch, configs: Mapping[str, Any]) -> None:
        """Let `context` wait until `configs` are compiled for a form of launch; `launch` is not kept.

        A context may wait for several forms. A candidate that fails in one of them is banned.
        """
        if context not in self._waiting:
            counts = CompileCounts(workers=self._options.workers)
            self._waiting[context] = _Waiting(counts, preflight.current_device(), time.monotonic())
        counts = self._waiting[context].counts
        planned = preflight.plan(launch, configs, self._options.limit_s)
        counts.remark = counts.remark or planned.remark
        reasons = dict(planned.reasons)
        for candidate, kernel in planned.kernels.items():
            with keeping_reason(reasons, candidate), self._loading(context.name, candidate):
                load_kernel(kernel)
        for index, (candidate, compilation) in enumerate(planned.compilations.items()):
            task = _Task(context, candidate, compilation, self._options.turn(index))
            if not self._no_child_because and has_binary(compilation.key):
                counts.add(CACHED)
                task.is_compiled = True
            self._tasks[task] = None
        self._ban(context, reasons)
        context.compile.asked.update(configs)
        context.compile.left = len(self._left(context))

    def advance(self, deadline: float | None = None) -> list[tuple[CompiledContext, CompileCounts]]:
        """Load compiled candidates and ban failed ones; return the contexts whose candidates are complete.

        deadline: until then wait until all are; what is not compiled then has failed. None: do not wait, and
        load for as long as LOADING_SHARE allows.
        """
        now = time.monotonic()
        until = now if self._advanced is None else now + LOADING_SHARE * (now - self._advanced)
        try:
            complete = self._advance(math.inf if deadline is not None else until)
            while deadline is not None and self._waiting:
                time.sleep(POLL_S)
                if time.monotonic() > deadline:
                    self._give_up()
                complete += self._advance(math.inf)
        except BaseException:
            self.close()
            raise
        self._advanced = time.monotonic()
        return complete

    def keep_only(self, stays: Callable[[Any], bool]) -> None:
        """Drop the contexts that need no candidates; their next launch is as their first."""
        for context in [each for each in self._waiting if not stays(each)]:
            del self._waiting[context]
            self._tasks = {task: None for task in self._tasks if task.context is not context}
            context.compile.left = 0
            context.compile.asked.clear()
            context.compile.forms.clear()
        if not self._waiting:
            self._stop()

    def close(self) -> None:
        """Drop all, and end the processes."""
        self.keep_only(lambda context: False)

    def _advance(self, until: float) -> list[tuple[CompiledContext, CompileCounts]]:
        self._read()
        self._start()
        for task in [task for task in self._tasks if task.is_compiled]:
            if task in self._tasks:  # else it has failed in another form
                self._load(task)
                if time.monotonic() >= until:
                    break
        complete = []
        for context, waiting in list(self._waiting.items()):
            context.compile.left = len(self._left(context))
            if not context.compile.left:
                del self._waiting[context]
                counts = waiting.counts
                counts.seconds = time.monotonic() - waiting.began
                counts.remark = "; ".join(filter(None, (counts.remark, context.compile.remark)))
                context.compile.forms.clear()
                complete.append((context, counts))
        if not self._waiting:
            self._stop()
        return complete

    def _load(self, task: _Task) -> None:
        context, reasons = task.context, dict[str, str]()
        device = preflight.on_device(self._waiting[context].device)
        with keeping_reason(reasons, task.candidate), device:
            kernel = task.compilation.keep(task.compilation.compile())
            with self._loading(context.name, task.candidate):
                load_kernel(kernel)
        del self._tasks[task]
        self._ban(context, reasons)

    def _ban(self, context: CompiledContext, reasons: Mapping[str, str]) -> None:
        context.bans.update(reasons)
        for task in [task for task in self._tasks if task.context is context and task.candidate in reasons]:
            del self._tasks[task]

    def _left(self, context: CompiledContext) -> set[str]:
        return {task.candidate for task in self._tasks if task.context is context}

    def _end(self, task: _Task, ending: str, reason: str = "", remark: str = "") -> None:
        """Record how a compilation ended, unless its context or candidate was dropped."""
        if task in self._tasks:
            counts = self._waiting[task.context].counts
            counts.add(ending)
            counts.remark = counts.remark or remark
            task.is_compiled = True
            self._ban(task.context, {task.candidate: reason} if reason else {})

    def _give_up(self) -> None:
        """Let what is not compiled fail."""
        self._read()
        self._stop()
        for task in self._to_compile():
            self._end(task, FAILED, TOO_LATE)

    # -- the pool ------------------------------------------------------------------------------------------

    def _to_compile(self) -> list[_Task]:
        """Return what is not compiled, this rank's share of each context first."""
        return sorted((task for task in self._tasks if not task.is_compiled), key=lambda task: task.turn)

    def _read(self) -> None:
        """Apply the outcomes that the pool has told, and notice that it has ended."""
        if self._pool is None:
            return
        has_ended = self._pool.has_ended  # asked first, so that nothing it has told is missed
        for outcome in self._pool.read():
            self._end(self._asked[outcome.place], outcome.ending, outcome.reason, outcome.remark)
            self._failed_pools = 0
        if has_ended:
            self._failed_pools += any(task in self._tasks and not task.is_compiled for task in self._asked)
            self._stop()

    def _start(self) -> None:
        """Let a pool compile what is wanted, if none is under way."""
        if self._pool is not None or not (tasks := self._to_compile()):
            return
        if self._failed_pools >= MOST_FAILED_POOLS:
            self._no_child_because = "child processes do not start, or do not last"
        if not self._no_child_because:
            try:
                self._pool = Pool([task.compilation for task in tasks], self._options)
                self._asked = tasks
                return
            except OSError as error:
                self._no_child_because = f"no child ({error.strerror})"
        for task in tasks:  # each is compiled where it is loaded
            self._end(task, COMPILED, remark=f"{BY_RANK}: {self._no_child_because}")

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool, self._asked = None, []
