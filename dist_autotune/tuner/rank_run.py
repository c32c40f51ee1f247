"""This rank's part in the runs of a session: launches, samples, reports."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from msgspec.structs import replace

from .. import settings
from ..bits.outputs import OutputComparison
from ..compilation.compiler import CompileCounts, CompiledContext, CompileOptions, Compiler
from ..errors import CaptureFailed, TuningError
from ..formatting import described
from ..launch.fast_path import CallUnderWay
from ..launch.rank_context import part_of
from ..logs import decisions
from ..logs.records import Note, Preflighted, RunStarted
from ..ranks.exchange import PATIENCE
from ..search.messages import HostTimes, Part, RunReport
from ..search.orders import RunOrder
from ..search.reports import SOURCE_OF
from ..search.rules import BY_LAUNCH
from ..timing.device_errors import as_launch_failed
from ..timing.graph_replays import GraphReplays
from ..timing.samples import Samples
from ..timing.stream_filler import LONGEST_MS, StreamFiller
from ..timing.synchronized_start import SynchronizedStart
from ..triton_api import interception
from .function_state import FunctionState
from .recorder import Recorder

COMPILING_SHARE = 0.8  # of the time that peers wait; then the candidates left have failed


class RankRun:
    """This rank's runs: `begin`, `timed`, `report`, `apply_order` and `apply_outcomes`, or `abandon`."""

    def __init__(self, state: FunctionState, log: Recorder) -> None:
        options, clock = state.function.options, state.function.clock
        self.launched: set[str] = set()  # contexts, in any run so far
        self.has_time: bool | None = None  # some sample here has given one; None: no run was a sample
        self.shares_clock = False  # all ranks read one monotonic clock
        self._whole = Samples(clock)  # of whole runs
        self._replays = GraphReplays()
        self.is_replayed = False  # replays judge the run under way
        self._state, self._log = state, log
        self._waits = options.mode == "replay"  # for the device, after each run
        named, is_needed = (*options.preserve, *options.outputs), state.orders.verifies
        self.outputs = OutputComparison(clock, named, state.function.group.rank) if is_needed else None
        self._start = SynchronizedStart()
        make_filler = getattr(clock, "filler", lambda longest_ms: None)  # of `EventClock`
        longest_ms = LONGEST_MS[options.mode] if options.filler_ms is None else options.filler_ms
        self._filler: StreamFiller | None = make_filler(longest_ms)
        self._most_lead_ms = math.inf if self._waits else longest_ms
        self._compiler: Compiler | None = None  # made when there is something to compile
        self.apart = 0  # runs without a trial that come before the next exchange
        self._exchange_s = 0.0  # of the last one, with the report and what follows
        self._apart_s: list[float] = []  # that such runs took since then
        self._step_began = time.monotonic()
        self._late_ms = 0.0  # by how much this rank's host was late in the last trial

    def begin(self) -> CallUnderWay:
        """Begin the next run and write its plan to the log; return its launches."""
        state, orders = self._state, self._state.orders
        # All that it launches counts for what judges it, or still waits for the time of a run before.
        is_judged = orders.run.next_run.judged is not None or orders.run.is_pending or orders.verifies
        launches = state.dispatcher.begin_run(tunes=orders.rules.tunes, reports_all=is_judged)
        self._whole.begin_run()
        plan = decisions.plan_of(orders)
        self._log.write(RunStarted(run=orders.runs, plan=plan))
        on_trial = {name: orders.contexts[name].digests[index] for name, index in plan.items()}
        state.guard.begin_run(orders.runs, on_trial)
        return launches

    def begin_apart(self) -> CallUnderWay:
        """Begin a run without a trial, of which nothing is reported; return its launches."""
        return self._state.dispatcher.begin_apart()

    def end_apart(self, launches: CallUnderWay) -> None:
        """End a run without a trial; the next report announces the keys that only it has launched."""
        self.apart -= 1
        self._state.registry.meet_apart(launches.new or ())
        self._apart_s.append(self._end_step())

    def _end_step(self) -> float:
        """Return the seconds since the run before, or the exchange after that, has ended."""
        began, self._step_began = self._step_began, time.monotonic()
        return self._step_began - began

    def end_exchange(self) -> None:
        """Note the time between the end of the last run and the next one."""
        self._exchange_s = self._end_step()

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Fill the stream before the block where the run is a trial; time the block where runs are judged."""
        order, time_spent = self._state.orders.run, self._state.time_spent
        planned = order.next_run
        is_timed = planned.judged is not None and self._whole.report is None
        self.is_replayed = is_timed and self._state.function.is_replayed
        is_timed = is_timed and not self.is_replayed
        self._late_ms = 0.0 if self.is_replayed else self._late_ms  # replays are queued ahead
        is_filled = planned.tries and not (self.is_replayed or interception.is_capturing())
        filler = self._filler if is_filled else None
        compiled_s = time_spent.seconds.compiling_s
        start_of_run = functools.partial(self._start.lead_ms, follows_fit=planned.follows_fit)
        if filler is None:
            start_of_run(0.0)  # peers learn how late this rank comes in any case
        else:
            length_ms = filler.length_ms(order.host.wanted_ms or filler.wanted_ms)
            # Online a trial begins no later than `filler_ms`, and at once if that does not cover the host.
            most_ms = self._most_lead_ms if self._waits or length_ms else 0.0
            filler.begin(lambda: start_of_run(length_ms, most_ms))
        mark = self._whole.start() if is_timed else None
        yield
        if is_timed:
            self._whole.stop(mark)
        if filler is not None:
            self._late_ms = filler.end(1e3 * (time_spent.seconds.compiling_s - compiled_s))
        if self.outputs is not None:
            self.outputs.end_run(is_compared=planned.compares_outputs)

    def capture(self, function: Callable[[], Any]) -> None:
        """Capture the run, made once more; raises CaptureFailed."""
        try:
            self._replays.capture(function)
        except TuningError:
            raise
        except Exception as error:
            setup, launched = self._state.function, ", ".join(self._state.registry.launched())
            raise CaptureFailed(
                f"objective='graph': rank {setup.group.rank} cannot capture {setup.name} "
                f"into a CUDA graph ({launched}): {described(error)}"
            ) from error

    def replay(self, put_back: Callable[[], None]) -> None:
        """Replay the captured graph; its times are the run's sample. put_back: see `GraphReplays.replay`."""
        with as_launch_failed(if_reported=not self._replays.has_graph):
            self._replays.replay(self._whole, put_back)

    def report(self, elapsed_s: float) -> RunReport:
        """Compile new candidates, read the clocks that are ready, and return this rank's report on the run.

        Online, it is compiled while the next runs go on. elapsed_s: since the session's first call.
        """
        state, function = self._state, self._state.function
        if state.dispatcher.to_preflight or self._compiler:
            with state.compiling(), state.guard.paused():
                for context, counts in self._preflight():
                    about, run = state.registry.by_name[context.name].identity, state.orders.runs
                    kernel, key = about.source.short_name, about.key_text
                    self._log.write(Preflighted(run=run, kernel=kernel, key=key, **asdict(counts)))
        parts = state.registry.report_run(waits=self._waits)
        whole, judged = Part(), state.orders.run.next_run.judged
        if judged is not None or self._whole.report is not None:
            whole = part_of(self._whole.report_run(judged or "", waits=self._waits))
        state.guard.end_run()
        self.launched.update(parts)
        sources = {SOURCE_OF + name: texts for name, texts in state.registry.new_sources().items()}
        host: dict[str, Any] = {}
        if self.shares_clock and not function.is_alone:
            host |= self._start.stamp()
        if (filler := self._filler) is not None:
            host |= {"wanted_ms": filler.wanted_ms, "enqueue_ms": filler.host_ms, "late_ms": self._late_ms}
        report = RunReport(
            sources,
            parts=parts,
            run=whole,
            host=HostTimes(**host),
            elapsed_s=elapsed_s,
            step_s=self._end_step(),
            apart=len(self._apart_s),
            apart_s=statistics.median(self._apart_s or [0.0]),
            exchange_s=self._exchange_s,
        )
        if self.outputs is not None:
            report = replace(report, bits=self.outputs.report_run())
            if self.outputs.remark:
                self._log.write(Note(text=self.outputs.remark))
        return report

    def _preflight(self) -> list[tuple[CompiledContext, CompileCounts]]:
        """Compile the candidates of new contexts, online beside later runs; return the complete contexts."""
        state, function = self._state, self._state.function
        position, count = function.group.ranks.index(function.group.rank), len(function.group.ranks)
        if (compiler := self._compiler) is None:
            options = CompileOptions(
                *settings.place_on_host(position, count),
                jobs=function.options.compile_jobs,
                in_background=not self._waits,
            )
            compiler = Compiler(options, functools.partial(state.guard.launching, loads=True))
            self._compiler = compiler
        compiler.keep_only(lambda context: context.needs_candidates)
        state.dispatcher.preflight(compiler)
        if not self._waits:
            return compiler.advance()
        peers_wait_s = COMPILING_SHARE * PATIENCE * function.timeout_s if count > 1 else math.inf
        return compiler.advance(time.monotonic() + peers_wait_s)

    def apply_order(self, order: RunOrder) -> None:
        """Take over when the next run begins, and the names that the ranks have agreed on."""
        self._start.apply_exchange(order.host.sent_ns, order.host.lag_ns)
        self.apart, self._apart_s = order.next_run.apart, []
        if self._compiler is not None:
            self._compiler.pause(goes_on=order.next_run.compiles)
        self._state.registry.rename(order.names)
        self.launched = {order.names.get(name, name) for name in self.launched}

    def apply_outcomes(self, run: int) -> None:
        """Record this rank's part in the run; keep the samples that count, and drop the others."""
        orders, registry, whole = self._state.orders, self._state.registry, self._whole
        order = orders.run
        counts, waiting = order.counts, order.is_pending
        if whole.report is not None and not waiting:
            self._log.record_whole_run(run, whole, counts=counts)
            if counts and whole.sample is not None:
                self.has_time = True
        for rank_context in registry.reported():
            context = orders.contexts[rank_context.name]
            outcome = order.outcomes[rank_context.name]
            is_news = self._waits or outcome.kind != "incumbent" or outcome.index is not None
            if is_news and rank_context.samples.is_read:
                self._log.record_trial(run, context, rank_context, outcome, whole)
            if outcome.kind == "sample":
                by_launch = outcome.judge == BY_LAUNCH and rank_context.samples.sample is not None
                self.has_time = bool(self.has_time) or by_launch
        registry.apply_outcomes(orders.contexts, order.outcomes, late_ms=order.host.late_ms)
        whole.apply_outcome(waiting=waiting, counts=counts, late_ms=order.host.late_ms)

    def abandon(self) -> None:
        """Drop samples and reports of the run under way: no rank counts it."""
        self.apart = 0
        if self.outputs is not None:
            self.outputs.abandon_run()
        self._state.dispatcher.abandon_run()
        self._whole.abandon_run()
        self._replays.close()
        if self._compiler is not None:
            self._compiler.keep_only(lambda context: context.announced)

    def close(self) -> None:
        """End compiling in the background; keep no graph."""
        self._replays.close()
        if self._compiler is not None:
            self._compiler.close()
