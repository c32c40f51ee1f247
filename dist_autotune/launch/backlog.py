"""Compiles candidates in another process while runs go on, and loads a few of them between two runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..compilation import preflight
from ..compilation.compiler_child import START_S
from ..compilation.pool import COMPILED, Compilation, CompileCounts, PoolOptions, why_no_child
from ..compilation.pool_process import CompileOutcome, PoolProcess
from ..compilation.preflight import keeping_reason
from ..triton_api.launch import Launch, load_kernel
from .rank_context import RankContext

Work: TypeAlias = tuple[str, int]  # a candidate, and the form of launch that it is compiled for

LOADING_SHARE = 0.25  # that loading may add to the time from run to run; one candidate in any case
MOST_FAILED_STARTS = 3  # of processes that end and tell of no candidate; then this one compiles


@dataclass(eq=False)
class _Entry:
    """What one context waits for."""

    counts: CompileCounts
    began: float
    launches: int  # in the run that brought it
    device: int  # which that run has launched it on
    forms: int = 0  # of launch, so far
    to_compile: dict[Work, Compilation] = field(default_factory=dict)
    to_load: dict[Work, Compilation] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # of candidates that failed and are not banned yet

    @property
    def left(self) -> int:
        """Return how many candidates lack something."""
        return len({candidate for candidate, _ in (*self.to_compile, *self.to_load)})

    def end(self, work: Work, outcome: CompileOutcome) -> None:
        """Record how a compilation ended."""
        if (compilation := self.to_compile.pop(work, None)) is None:
            return  # its candidate has failed in another form
        self.counts.add(outcome.ending)
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


class Backlog:
    """The contexts that wait for their candidates, the one with the most device time in a run first.

    ban: called with the reasons of the candidates of a context that failed here.
    loading: entered around the loading of a candidate of a context.
    """

    def __init__(
        self,
        options: PoolOptions,
        ban: Callable[[RankContext, Mapping[str, str]], None],
        loading: Callable[[str, str], AbstractContextManager[None]],
    ) -> None:
        self._options, self._ban, self._loading = options, ban, loading
        self._entries: dict[RankContext, _Entry] = {}
        self._process: PoolProcess | None = None
        self._asked: list[tuple[_Entry, Work]] = []  # of the process
        self._started = 0.0
        self._failed_starts = 0  # processes in a row that told of no candidate
        self._no_child_because = why_no_child(options)  # this process compiles, a candidate a run
        self._advanced: float | None = None  # when `advance` has last ended

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, context: RankContext, launch: Launch, configs: Mapping[str, Any]) -> None:
        """Let `context` wait for `configs`, as they are compiled for a launch, which is not held.

        A context may wait for several forms of launch. A candidate that fails in one has failed.
        """
        if (entry := self._entries.get(context)) is None:
            counts, device = CompileCounts(workers=self._options.workers), preflight.current_device()
            entry = self._entries[context] = _Entry(counts, time.monotonic(), context.run.count, device)
        planned = preflight.plan(launch, configs, self._options.limit_s)
        entry.counts.remark = entry.counts.remark or planned.remark
        entry.reasons.update(planned.reasons)
        for candidate, kernel in planned.kernels.items():
            with keeping_reason(entry.reasons, candidate), self._loading(context.name, candidate):
                load_kernel(kernel)
        for candidate, compilation in self._options.in_turn(list(planned.compilations.items())):
            entry.to_compile[candidate, entry.forms] = compilation
        entry.forms += 1
        entry.drop_failed()

    def advance(self) -> Iterator[tuple[RankContext, CompileCounts]]:
        """Load some compiled candidates, ban those that failed; yield the contexts that are done.

        What no context waits for any more is dropped.
        """
        now = time.monotonic()
        until = now if self._advanced is None else now + LOADING_SHARE * (now - self._advanced)
        self._drop(lambda context: context.search is None or context.search.is_tuned_by_launches)
        self._read()
        self._start()
        may_load = True
        for context, entry in self._in_order():
            while entry.to_load and may_load:
                self._load(context, entry)
                may_load = time.monotonic() < until
            self._ban(context, entry.reasons)
            entry.reasons = {}
            context.compile.left = entry.left
            if not entry.left:
                del self._entries[context]
                entry.counts.seconds = time.monotonic() - entry.began
                yield context, entry.counts
        self._advanced = time.monotonic()

    def drop_unannounced(self) -> None:
        """Drop the contexts that a failed run brought: their next launch is their first."""
        self._drop(lambda context: context.announced)

    def close(self) -> None:
        """Drop all, and end the process."""
        self._drop(lambda context: False)
        self._stop()

    def _drop(self, stays: Callable[[RankContext], bool]) -> None:
        for context, entry in list(self._entries.items()):
            if not stays(context):
                del self._entries[context]
                context.compile.left, context.compile.is_preflighted = 0, False
                context.compile.forms.clear()
                if entry.to_compile:
                    self._stop()  # it starts anew with what is left

    def _in_order(self) -> list[tuple[RankContext, _Entry]]:
        """Return the contexts by device time in a run, the longest first, where it is known."""
        return sorted(self._entries.items(), key=lambda waiting: _run_ms(*waiting), reverse=True)

    def _load(self, context: RankContext, entry: _Entry) -> None:
        candidate, form = next(iter(entry.to_load))
        compilation = entry.to_load.pop((candidate, form))
        with keeping_reason(entry.reasons, candidate), preflight.on_device(entry.device):
            kernel = compilation.keep(compilation.compile())
            with self._loading(context.name, candidate):
                load_kernel(kernel)
        entry.drop_failed()

    # -- the process ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the outcomes of the process, and whether it has ended."""
        if (process := self._process) is None:
            return
        has_ended = process.has_ended  # asked first, so that nothing it has told is missed
        has_ended |= not process.has_begun and time.monotonic() - self._started > START_S
        for outcome in process.read():
            entry, work = self._asked[outcome.place]
            entry.end(work, outcome)
            self._failed_starts = 0
        if has_ended:
            self._failed_starts += any(work in entry.to_compile for entry, work in self._asked)
            self._stop()

    def _start(self) -> None:
        """Start a process for the work left, in order; end one that lacks some of it."""
        wanted = [(entry, work) for _, entry in self._in_order() for work in entry.to_compile]
        # What takes most of a run is known when the times of the first runs are read.
        is_due = all(context.search is not None and not context.search.waiting for context in self._entries)
        if not (wanted and is_due) or (self._process is not None and set(wanted) <= set(self._asked)):
            return
        self._stop()
        if self._failed_starts >= MOST_FAILED_STARTS:
            self._no_child_because = "child processes do not start, or do not last"
        if not self._no_child_because:
            compilations = [entry.to_compile[work] for entry, work in wanted]
            try:
                self._process = PoolProcess(compilations, self._options)
            except OSError as error:
                self._no_child_because = f"no child ({error.strerror})"
            else:
                self._asked, self._started = wanted, time.monotonic()
                return
        remark = f"compiled in this process, without a limit: {self._no_child_because}"
        for entry, work in wanted:
            entry.counts.remark = remark
            entry.end(work, CompileOutcome(0, COMPILED, ""))

    def _stop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def _run_ms(context: RankContext, entry: _Entry) -> tuple[float, float]:
    """Return a context's device time in a run, at least and at most, in ms; zeros: not known.

    At least, as in a host-bound run the time of every small kernel is the host's.
    """
    at_least, at_most = (0.0, 0.0) if context.search is None else context.search.device_ms
    return entry.launches * at_least, entry.launches * at_most
