"""Compiles candidates in forked children, and loads them in this process, between runs.

In replay mode the rank waits until all are loaded; online it loads a few after each run. The ranks of a host
send no messages: each compiles its share first, and then what it does not find in Triton's cache of the
others' shares.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

from .. import settings
from ..triton_api.launch import Launch, load_kernel
from . import preflight
from .binaries import has_binary, why_not_shared
from .child import NO_FORK, POLL_S, STOOD_STILL, Child
from .preflight import Compilation, keeping_reason
from .workers import Work

# Of a rank's cores: with 15 of 16, steps of 36 ms took 62; with 8, 45 (H200, 2026-11-23).
BACKGROUND_SHARE = 0.5
FORMS = 8  # of a context: the candidates are compiled for so many; further ones by their launches
LOADING_SHARE = 0.25  # that loading may add to the time from run to run; one candidate in any case
REPEATS = 2  # of a candidate that a child has left, as it stood still
PEERS_S = 0.5  # between looks for peers' binaries, of 35 us each; who has written one has told it by the next
TOO_LATE = "not compiled: the candidates together took longer than the peers wait"
BY_RANK = "compiled in this process, without a limit"
COMPILED, FROM_PEERS, CACHED, FAILED = "compiled", "from_peers", "cached", "failed"


def running_tasks() -> int:
    """Return how many tasks of this host run now, without the caller; 0: the system does not tell."""
    try:
        with open("/proc/loadavg") as load:
            return int(load.read().split()[3].partition("/")[0]) - 1
    except (OSError, ValueError, IndexError):
        return 0


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

    def workers_now(self, own: int) -> int:
        """Return how many may compile now, `own` of which do: beside steps no more than cores are free."""
        if self.jobs is not None or not self.in_background:
            return self.workers
        free = len(os.sched_getaffinity(0)) - max(running_tasks() - own, 0)
        return min(self.workers, max(1, free // self.local_ranks))

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


class CompileState(Struct, gc=False):
    """How far the candidates of one context are compiled."""

    asked: frozenset[str] = frozenset()  # candidates that were given to the compiler
    left: int = 0  # candidates that are not compiled or not loaded yet
    forms: frozenset[Any] = frozenset()  # of launch, until all is compiled; see `keep_form`
    is_varied: bool = False  # the context was launched in several forms

    def keep_form(self, form: Any) -> bool:
        """Return whether candidates are to be compiled for a form of launch: it is one of the first FORMS.

        form: the kernel that the launch has run. Launches of one config that need several binaries have
        several forms.
        """
        if form in self.forms or len(self.forms) > FORMS:
            return False
        self.is_varied |= bool(self.forms)
        self.forms |= {form}  # one more than `FORMS` tells that there were more
        return len(self.forms) <= FORMS

    @property
    def remark(self) -> str:
        return f"forms after the first {FORMS} left to their launches" if len(self.forms) > FORMS else ""


class CompiledContext(Protocol):
    """The part of a `RankContext` that the compiler reads and writes."""

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
    child: Child | None = None  # which compiles it, or will
    repeats: int = 0  # as its child has left it
    is_found: bool = False  # its binary was there at the last look, while the child ran
    is_compiled: bool = False


@dataclass(eq=False)
class _Waiting:
    """A context that waits for candidates."""

    counts: CompileCounts
    device: int  # of its first launch
    began: float


class Compiler:
    """Compiles and loads the candidates that contexts `want`, in `advance`.

    loading: entered, with context and candidate, while this process loads that candidate.
    """

    def __init__(
        self, options: CompileOptions, loading: Callable[[str, str], AbstractContextManager[None]]
    ) -> None:
        self._options, self._loading = options, loading
        self._waiting: dict[CompiledContext, _Waiting] = {}
        self._tasks: dict[_Task, None] = {}  # in order
        self._children: dict[Child, list[_Task]] = {}  # that run; their work
        self._is_paused = False
        # Why this process compiles; empty: children do.
        self._no_child_because = "no limit is set" if options.limit_s <= 0 else why_not_shared()
        self._advanced: float | None = None  # when `advance` has last ended
        self._looked = -math.inf  # when it was last looked for peers' binaries

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
            self._tasks[task] = None
            if not self._no_child_because and has_binary(compilation.key):
                self._end(task, CACHED)
        self._ban(context, reasons)
        context.compile.asked = context.compile.asked.union(configs)
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
                    for task in self._to_compile():
                        self._end(task, FAILED, TOO_LATE)
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
            self._drop(task for task in self._tasks if task.context is context)
            context.compile.left = 0
            context.compile.asked = context.compile.forms = frozenset()

    def pause(self, *, goes_on: bool = False) -> None:
        """Stop the children, and begin none; goes_on: let them go on."""
        self._is_paused = not goes_on
        for child in self._children:
            child.pause(goes_on=goes_on)

    def close(self) -> None:
        """Drop all, and end the children."""
        self.keep_only(lambda context: False)

    def _advance(self, until: float) -> list[tuple[CompiledContext, CompileCounts]]:
        self._compile()
        for task in [task for task in self._tasks if task.is_compiled]:
            if task in self._tasks:  # else it has failed in another form
                self._load(task)
                if time.monotonic() >= until:
                    break
        complete, left = [], {context: set[str]() for context in self._waiting}
        for task in self._tasks:
            left[task.context].add(task.candidate)
        for context, waiting in list(self._waiting.items()):
            context.compile.left = len(left[context])
            if not context.compile.left:
                del self._waiting[context]
                counts = waiting.counts
                counts.seconds = time.monotonic() - waiting.began
                counts.remark = "; ".join(filter(None, (counts.remark, context.compile.remark)))
                context.compile.forms = frozenset()
                complete.append((context, counts))
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
        self._drop(task for task in self._tasks if task.context is context and task.candidate in reasons)

    def _left(self, context: CompiledContext) -> set[str]:
        return {task.candidate for task in self._tasks if task.context is context}

    # -- children ------------------------------------------------------------------------------------------

    def _to_compile(self) -> list[_Task]:
        """Return the candidates left to compile, this rank's share of each context first."""
        return sorted((task for task in self._tasks if not task.is_compiled), key=lambda task: task.turn)

    def _compile(self) -> None:
        """Note what children have compiled, and begin one for what waits."""
        looks = self._options.local_ranks > 1 and time.monotonic() - self._looked > PEERS_S
        self._looked = time.monotonic() if looks else self._looked
        for child, tasks in list(self._children.items()):
            self._look_at(child, tasks, looks=looks)
        to_compile = self._to_compile()
        waiting = [task for task in to_compile if task.child is None]
        own = min(len(to_compile) - len(waiting), self._options.workers)
        free = 0 if self._is_paused or not waiting else self._options.workers_now(own) - own
        if free > 0:
            self._begin([task for task in waiting if task.turn == waiting[0].turn], free)

    def _look_at(self, child: Child, tasks: list[_Task], *, looks: bool) -> None:
        for place, ending in child.poll():
            if tasks[place].child is child:
                self._end(tasks[place], FAILED if ending.reason else COMPILED, ending.reason)
        if not child.is_over and child.stands_still():
            child.kill()
        if child.is_over:
            self._children.pop(child, None)
        for task in tasks:
            if task.child is child and child.is_over:
                self._leave_to_another(task, child.why_left)
            elif looks and task.child is child and has_binary(task.compilation.key):
                if task.is_found:
                    self._end(task, FROM_PEERS)
                task.is_found = True

    def _leave_to_another(self, task: _Task, why: str) -> None:
        """Let another child compile what one has left; what the third leaves has failed.

        Where no child can do anything, this process compiles.
        """
        task.child, task.repeats = None, task.repeats + 1
        if why == NO_FORK or (why == STOOD_STILL and task.repeats > REPEATS):
            self._no_child_because = f"no child ({why})"
            return
        counts = self._waiting[task.context].counts
        counts.remark = counts.remark or f"{why}; another has compiled the rest"
        if task.repeats > REPEATS:
            self._end(task, FAILED, why)

    def _begin(self, tasks: list[_Task], workers: int) -> None:
        """Begin a child that compiles these, without those that a peer has; no child: `_load` compiles."""
        if not self._no_child_because:
            for task in tasks:
                if has_binary(task.compilation.key):
                    self._end(task, FROM_PEERS)
            tasks = [task for task in tasks if not task.is_compiled]
            options = self._options
            work = Work(
                pieces=[task.compilation.compile for task in tasks],
                limit_s=options.limit_s,
                workers=lambda own: min(workers, options.workers_now(own)),
                yields=options.in_background,
                moves=range(len(tasks)) if all(task.repeats < REPEATS for task in tasks) else (),
            )
            try:
                if tasks:
                    child = Child(work)
                    self._children[child] = tasks
                    for task in tasks:
                        task.child = child
                return
            except (OSError, RuntimeError) as error:  # RuntimeError: the interpreter ends
                self._no_child_because = f"no child ({getattr(error, 'strerror', error)})"
        for task in tasks:
            self._end(task, COMPILED, remark=f"{BY_RANK}: {self._no_child_because}")

    def _end(self, task: _Task, ending: str, reason: str = "", remark: str = "") -> None:
        """Record how a compilation has ended."""
        if task not in self._tasks:  # its candidate has failed in another form
            return
        counts = self._waiting[task.context].counts
        counts.add(ending)
        counts.remark = counts.remark or remark
        task.is_compiled = True
        self._leave(task)
        self._ban(task.context, {task.candidate: reason} if reason else {})

    def _drop(self, tasks: Iterable[_Task]) -> None:
        for task in list(tasks):
            del self._tasks[task]
            self._leave(task)

    def _leave(self, task: _Task) -> None:
        """Wait for the child of a task no longer; end it when nobody does."""
        child, task.child = task.child, None
        if child is None or any(each.child is child for each in self._children.get(child, ())):
            return
        self._children.pop(child, None)
        child.kill()
