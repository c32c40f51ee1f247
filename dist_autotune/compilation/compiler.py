"""Compiles candidates that contexts wait for in other processes, and loads them in this one, between runs.

In replay mode the rank waits until all are loaded; online it loads a few after each run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from ..triton_api.launch import Launch, load_kernel
from . import preflight
from .binaries import has_binary, why_not_shared
from .child import POLL_S
from .pool import (
    BY_RANK,
    CACHED,
    COMPILED,
    FAILED,
    Compilation,
    CompileCounts,
    CompileOptions,
    CompileOutcome,
    Pool,
)
from .preflight import keeping_reason

FORMS = 8  # of a context: the candidates are compiled for so many; further ones by their launches
Work: TypeAlias = tuple[str, int]  # a candidate, and the form of launch that it is compiled for

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
class _Entry:
    """The candidates of one context that are not compiled or loaded yet."""

    counts: CompileCounts
    began: float
    device: int  # of the context's first launch
    forms: int = 0  # how many forms of launch have been added
    to_compile: dict[Work, tuple[int, Compilation]] = field(default_factory=dict)  # with its turn
    to_load: dict[Work, Compilation] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # failed candidates that are not banned yet

    @property
    def left(self) -> int:
        return len({candidate for candidate, _ in (*self.to_compile, *self.to_load)})

    def end(self, work: Work, outcome: CompileOutcome) -> None:
        """Record how a compilation ended."""
        if work not in self.to_compile:
            return  # its candidate has failed in another form
        _, compilation = self.to_compile.pop(work)
        self.counts.add(outcome.ending)
        self.counts.remark = self.counts.remark or outcome.remark
        if outcome.reason:
            self.reasons[work[0]] = outcome.reason
            self.drop_failed()
        else:
            self.to_load[work] = compilation

    def drop_failed(self) -> None:
        """Drop the work left for candidates that failed in some form."""
        for works in (self.to_compile, self.to_load):
            for work in [work for work in works if work[0] in self.reasons]:
                del works[work]


class Compiler:
    """Compiles and loads what contexts `want`, when it is told to `advance`.

    loading: entered, with context and candidate, while this process loads that candidate.
    """

    def __init__(
        self, options: CompileOptions, loading: Callable[[str, str], AbstractContextManager[None]]
    ) -> None:
        self._options, self._loading = options, loading
        self._entries: dict[CompiledContext, _Entry] = {}
        self._pool: Pool | None = None
        self._asked: list[tuple[_Entry, Work]] = []  # of the pool
        self._failed_pools = 0  # in a row that told of no candidate
        # Why this process compiles; empty: children do.
        self._no_child_because = "no limit is set" if options.limit_s <= 0 else why_not_shared()
        self._advanced: float | None = None  # when `advance` has last ended

    def __bool__(self) -> bool:
        return bool(self._entries)

    def want(self, context: CompiledContext, launch: Launch, configs: Mapping[str, Any]) -> None:
        """Let `context` wait until `configs` are compiled for a form of launch; `launch` is not kept.

        A context may wait for several forms. A candidate that fails in one of them has failed.
        """
        if (entry := self._entries.get(context)) is None:
            counts, device = CompileCounts(workers=self._options.workers), preflight.current_device()
            entry = self._entries[context] = _Entry(counts, time.monotonic(), device)
        planned = preflight.plan(launch, configs, self._options.limit_s)
        entry.counts.remark = entry.counts.remark or planned.remark
        entry.reasons.update(planned.reasons)
        for candidate, kernel in planned.kernels.items():
            with keeping_reason(entry.reasons, candidate), self._loading(context.name, candidate):
                load_kernel(kernel)
        for index, (candidate, compilation) in enumerate(planned.compilations.items()):
            work = candidate, entry.forms
            if not self._no_child_because and has_binary(compilation.key):
                entry.counts.add(CACHED)
                entry.to_load[work] = compilation
            else:
                entry.to_compile[work] = self._options.turn(index), compilation
        entry.forms += 1
        entry.drop_failed()
        context.compile.asked.update(configs)
        context.compile.left = entry.left

    def advance(self, deadline: float | None = None) -> list[tuple[CompiledContext, CompileCounts]]:
        """Load compiled candidates and ban failed ones; return the contexts whose candidates are complete.

        deadline: until then wait until all are; what is not compiled then has failed. None: do not wait, and
        load for as long as LOADING_SHARE allows.
        """
        now = time.monotonic()
        until = now if self._advanced is None else now + LOADING_SHARE * (now - self._advanced)
        complete = []
        try:
            complete += self._advance(math.inf if deadline is not None else until)
            while deadline is not None and self._entries:
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
        for context, entry in list(self._entries.items()):
            if not stays(context):
                del self._entries[context]
                context.compile.left = 0
                context.compile.asked.clear()
                context.compile.forms.clear()
                entry.to_compile.clear()
        if not self._entries:
            self._stop()

    def close(self) -> None:
        """Drop all, and end the processes."""
        self.keep_only(lambda context: False)

    def _advance(self, until: float) -> list[tuple[CompiledContext, CompileCounts]]:
        self._read()
        self._start()
        complete, may_load = [], True
        for context, entry in list(self._entries.items()):
            while may_load and entry.to_load:
                self._load(context, entry)
                may_load = time.monotonic() < until
            context.bans.update(entry.reasons)
            entry.reasons = {}
            context.compile.left = entry.left
            if not entry.left:
                del self._entries[context]
                entry.counts.seconds = time.monotonic() - entry.began
                remarks = entry.counts.remark, context.compile.remark
                entry.counts.remark = "; ".join(filter(None, remarks))
                context.compile.forms.clear()
                complete.append((context, entry.counts))
        if not self._entries:
            self._stop()
        return complete

    def _load(self, context: CompiledContext, entry: _Entry) -> None:
        work = next(iter(entry.to_load))
        compilation, candidate = entry.to_load.pop(work), work[0]
        with keeping_reason(entry.reasons, candidate), preflight.on_device(entry.device):
            kernel = compilation.keep(compilation.compile())
            with self._loading(context.name, candidate):
                load_kernel(kernel)
        entry.drop_failed()

    def _give_up(self) -> None:
        """Let what is not compiled fail."""
        self._read()
        self._stop()
        for entry in self._entries.values():
            for work in list(entry.to_compile):
                entry.end(work, CompileOutcome(0, FAILED, TOO_LATE))

    # -- the pool ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Apply the outcomes that the pool has told, and notice that it has ended."""
        if self._pool is None:
            return
        has_ended = self._pool.has_ended  # asked first, so that nothing it has told is missed
        for outcome in self._pool.read():
            entry, work = self._asked[outcome.place]
            entry.end(work, outcome)
            self._failed_pools = 0
        if has_ended:
            self._failed_pools += any(work in entry.to_compile for entry, work in self._asked)
            self._stop()

    def _start(self) -> None:
        """Let a pool compile what is wanted, this rank's share first, if none is under way."""
        entries = self._entries.values()
        wanted = [(turn, entry, work) for entry in entries for work, (turn, _) in entry.to_compile.items()]
        if self._pool is not None or not wanted:
            return
        if self._failed_pools >= MOST_FAILED_POOLS:
            self._no_child_because = "child processes do not start, or do not last"
        if not self._no_child_because:
            self._asked = [(entry, work) for _, entry, work in sorted(wanted, key=lambda each: each[0])]
            try:
                self._pool = Pool([entry.to_compile[work][1] for entry, work in self._asked], self._options)
                return
            except OSError as error:
                self._no_child_because = f"no child ({error.strerror})"
        for _, entry, work in wanted:  # each is compiled where it is loaded
            entry.end(work, CompileOutcome(0, COMPILED, remark=f"{BY_RANK}: {self._no_child_because}"))

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
