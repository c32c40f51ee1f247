"""The contexts that wait for candidates: these are compiled in another process, and loaded between runs.

In replay mode the rank waits until all are loaded; online it loads a few after each run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from ..search.context import Context
from ..triton_api.launch import Launch, load_kernel
from . import preflight
from .binaries import has_binary, why_not_shared
from .compiler_child import START_S
from .pool import (
    BY_RANK,
    CACHED,
    COMPILED,
    POLL_S,
    Compilation,
    CompileCounts,
    CompileOutcome,
    PoolOptions,
)
from .pool_process import PoolProcess
from .preflight import keeping_reason

FORMS = 8  # of a context: the candidates are compiled for so many; further ones by their launches
Work: TypeAlias = tuple[str, int]  # a candidate, and the form of launch that it is compiled for

LOADING_SHARE = 0.25  # that loading may add to the time from run to run; one candidate in any case
MOST_PRIORITY = 255
MOST_FAILED_STARTS = 3  # of processes that end and tell of no candidate; then this one compiles


@dataclass
class CompileState:
    """How far the candidates of one context are compiled."""

    is_preflighted: bool = False  # the candidates that the search has named are compiled, or in a backlog
    waves: int = 0  # `Context.waves` when they were added: the search names more candidates in waves
    has_all: bool = False  # a backlog has all candidates, also those that the search has not named
    left: int = 0  # candidates that a backlog has not compiled or loaded yet
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
    """What a backlog reads and writes of a `RankContext`."""

    name: str
    search: Context | None  # None: no rank has announced it
    announced: bool
    launches_per_run: int
    compile: CompileState
    bans: dict[str, str]

    @property
    def outside_race(self) -> Collection[str]:
        """Return the candidates that the search does not try next."""


@dataclass(eq=False)
class _Entry:
    """The candidates of one context that are not compiled or loaded yet."""

    counts: CompileCounts
    began: float
    device: int  # of the context's first launch
    forms: int = 0  # how many forms of launch have been added
    to_compile: dict[Work, Compilation] = field(default_factory=dict)
    to_load: dict[Work, Compilation] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # failed candidates that are not banned yet
    unwanted: Collection[str] = ()  # candidates that the search does not try next, and may never try
    is_waited_for: bool = True  # the context's trials wait for candidates
    is_new: bool = True  # no process has been asked to compile its candidates

    @property
    def left(self) -> int:
        """Return how many of the candidates that are tried next are not compiled and loaded."""
        works = (*self.to_compile, *self.to_load)
        return len({candidate for candidate, _ in works if candidate not in self.unwanted})

    @property
    def loadable(self) -> Work | None:
        return next((work for work in self.to_load if work[0] not in self.unwanted), None)

    def end(self, work: Work, outcome: CompileOutcome) -> None:
        """Record how a compilation ended."""
        if (compilation := self.to_compile.pop(work, None)) is None:
            return  # its candidate has failed in another form
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


class Backlog:
    """Compiles in another process the candidates that contexts wait for, and loads them in this one.

    The context that may gain most device time in a run comes first. The process is given all candidates of a
    context, and compiles those that are tried next.

    loading: entered, with context and candidate, while this process loads that candidate.
    """

    def __init__(
        self, options: PoolOptions, loading: Callable[[str, str], AbstractContextManager[None]]
    ) -> None:
        self._options, self._loading = options, loading
        self._entries: dict[CompiledContext, _Entry] = {}
        self._process: PoolProcess | None = None
        self._asked: list[tuple[_Entry, Work]] = []  # of the process
        self._started = 0.0
        self._failed_starts = 0  # processes in a row that told of no candidate
        # Why this process compiles; empty: children do.
        self._no_child_because = "no limit is set" if options.limit_s <= 0 else why_not_shared()
        self._advanced: float | None = None  # when `advance` has last ended

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, context: CompiledContext, launch: Launch, configs: Mapping[str, Any]) -> None:
        """Let `context` wait until `configs` are compiled for a form of launch; `launch` is not kept.

        A context may wait for several forms. A candidate that fails in one of them has failed.
        """
        if (entry := self._entries.get(context)) is None:
            counts, device = CompileCounts(workers=self._options.workers), preflight.current_device()
            entry = self._entries[context] = _Entry(counts, time.monotonic(), device)
        limit_s = min(self._options.limit_s, self._options.until - time.monotonic())
        planned = preflight.plan(launch, configs, limit_s)
        entry.counts.remark = entry.counts.remark or planned.remark
        entry.reasons.update(planned.reasons)
        unwanted = context.outside_race
        for candidate, kernel in planned.kernels.items():
            if candidate in unwanted:
                entry.to_load[candidate, entry.forms] = _there(kernel)
                continue
            with keeping_reason(entry.reasons, candidate), self._loading(context.name, candidate):
                load_kernel(kernel)
        for candidate, compilation in self._options.in_turn(list(planned.compilations.items())):
            if not self._no_child_because and has_binary(compilation.key):
                if candidate not in unwanted:
                    entry.counts.add(CACHED)
                entry.to_load[candidate, entry.forms] = compilation
            else:
                entry.to_compile[candidate, entry.forms] = compilation
        entry.forms += 1
        entry.drop_failed()

    def finish(self) -> Iterator[tuple[CompiledContext, CompileCounts]]:
        """Wait until all is compiled and loaded; yield the contexts."""
        while any(entry.is_waited_for for entry in self._entries.values()):
            yield from self.advance(waits=True)
            if self._process is not None:
                time.sleep(POLL_S[self._options.in_background])

    def advance(self, *, waits: bool = False) -> Iterator[tuple[CompiledContext, CompileCounts]]:
        """Load compiled candidates and ban failed ones; yield the contexts whose candidates are complete.

        waits: load all that are compiled, not as many as LOADING_SHARE allows. Contexts that are no longer
        tuned are dropped.
        """
        now = time.monotonic()
        until = now if self._advanced is None else now + LOADING_SHARE * (now - self._advanced)
        until = math.inf if waits else until
        self._drop(lambda context: context.search is None or context.search.is_tuned_by_launches)
        for context, entry in self._entries.items():
            entry.unwanted = context.outside_race
            if entry.left and not entry.is_waited_for:
                entry.is_waited_for, entry.began = True, now
        self._read()
        self._start(waits=waits)
        may_load = True
        for context, entry in self._in_order():
            while may_load and (work := entry.loadable) is not None:
                self._load(context, entry, work)
                may_load = time.monotonic() < until
            context.bans.update(entry.reasons)
            entry.reasons = {}
            context.compile.left = entry.left
            if entry.is_waited_for and not entry.left:
                counts, entry.counts = entry.counts, CompileCounts(workers=self._options.workers)
                counts.seconds, entry.is_waited_for = time.monotonic() - entry.began, False
                counts.remark = "; ".join(filter(None, (counts.remark, context.compile.remark)))
                if not (entry.to_compile or entry.to_load):
                    del self._entries[context]
                    context.compile.forms.clear()
                yield context, counts
        if not self._entries:
            self._stop()
        self._advanced = time.monotonic()

    def drop_unannounced(self) -> None:
        """Drop the contexts that a failed run brought: their next launch is their first."""
        self._drop(lambda context: context.announced)

    def close(self) -> None:
        """Drop all, and end the process."""
        self._drop(lambda context: False)
        self._stop()

    def _drop(self, stays: Callable[[CompiledContext], bool]) -> None:
        for context, entry in list(self._entries.items()):
            if not stays(context):
                del self._entries[context]
                context.compile.left, context.compile.is_preflighted = 0, False
                context.compile.forms.clear()
                entry.to_compile.clear()
        if not self._entries:
            self._stop()

    def _in_order(self) -> list[tuple[CompiledContext, _Entry]]:
        """Return the contexts, the one first that may gain most in a run."""
        return sorted(self._entries.items(), key=lambda waiting: _gain_ms(waiting[0]), reverse=True)

    def _load(self, context: CompiledContext, entry: _Entry, work: Work) -> None:
        compilation, candidate = entry.to_load.pop(work), work[0]
        with keeping_reason(entry.reasons, candidate), preflight.on_device(entry.device):
            kernel = compilation.keep(compilation.compile())
            with self._loading(context.name, candidate):
                load_kernel(kernel)
        entry.drop_failed()

    # -- the process ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Apply the outcomes that the process has told, and notice that it has ended."""
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

    def _start(self, *, waits: bool) -> None:
        """Let the process compile the next candidates, in order; start another if it lacks some."""
        entries = [entry for _, entry in self._in_order()]
        wanted = [(e, work) for e in entries for work in e.to_compile if work[0] not in e.unwanted]
        # What takes most of a run is known when the times of the first runs are read.
        new = [context for context, entry in self._entries.items() if entry.is_new]
        is_due = waits or all(context.search is not None and not context.search.waiting for context in new)
        if wanted and is_due and not (self._process and set(wanted) <= set(self._asked)):
            self._stop()
            known = [(entry, work) for entry in entries for work in entry.to_compile]
            self._make_process(wanted, known, waits=waits)
        if self._process is not None:
            self._process.prefer(self._priorities(entries))

    def _priorities(self, entries: list[_Entry]) -> list[int]:
        place = {id(entry): min(place, MOST_PRIORITY - 1) for place, entry in enumerate(entries)}
        return [
            MOST_PRIORITY - place[id(entry)]
            if work in entry.to_compile and work[0] not in entry.unwanted
            else 0
            for entry, work in self._asked
        ]

    def _make_process(
        self, wanted: list[tuple[_Entry, Work]], known: list[tuple[_Entry, Work]], *, waits: bool
    ) -> None:
        if self._failed_starts >= MOST_FAILED_STARTS:
            self._no_child_because = "child processes do not start, or do not last"
        if not self._no_child_because:
            self._asked, self._started = known, time.monotonic()
            compilations = [entry.to_compile[work] for entry, work in known]
            priorities = self._priorities([entry for _, entry in self._in_order()])
            try:
                self._process = PoolProcess(compilations, self._options, priorities)
            except OSError as error:
                self._no_child_because = f"no child ({error.strerror})"
            else:
                for entry, _ in known:
                    entry.is_new = False
                return
        executor = ThreadPoolExecutor(self._options.workers)
        for entry, work in wanted:
            if waits:  # else each is compiled where it is loaded
                compilation = entry.to_compile[work]
                compiles = executor.submit(compilation.compile).result
                entry.to_compile[work] = replace(compilation, compile=compiles)
            entry.end(work, CompileOutcome(0, COMPILED, remark=f"{BY_RANK}: {self._no_child_because}"))
        executor.shutdown(wait=False)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def _there(kernel: Any) -> Compilation:
    """Return a compilation that returns a kernel which was compiled before."""
    return Compilation("", lambda: kernel, lambda found: found)


def _gain_ms(context: CompiledContext) -> tuple[float, float]:
    """Return a lower and an upper estimate of what a context may gain in a run; zeros: not known.

    The lower one comes first: in a host-bound run the time of every small kernel is the host's.
    """
    if (search := context.search) is None:
        return 0.0, 0.0
    at_least, at_most = search.device_ms
    chance = context.launches_per_run * search.promise
    return chance * at_least, chance * at_most
