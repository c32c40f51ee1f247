"""GPUs with hosts, streams, copies and peers in one virtual time: nothing runs, nothing waits.

    gpus = VirtualGpus(2).install(monkeypatch)

    def program(gpu):                                  # the program of a rank, on its GPU and host
        side, runs = torch.cuda.Stream(), itertools.count()
        def step():
            mine, peers = (gpus.flag(run, rank) for run in [next(runs)] for rank in (gpu.rank, 1 - gpu.rank))
            side.wait_stream(torch.cuda.current_stream())                     # fork
            gpu.launch(0.2, on=side, sets=mine)                               # a copy to the peer
            kernel = autotuned(ms, lambda block: gpu.launch(peers, ms[block]))
            kernel[(1,)](0, 0, 64)                                            # waits for the peer's copy
        tuned = gpus.tuned(step)
        tuned()
        return tuned.report

    reports = gpus.run(program)

The device. A stream works off its commands in order, none before the host has queued it, nor before the
events that it waits for. A command is a row of ms and flags: it takes so long, then waits, on the device,
until a flag is set, and goes on. Flags are set when a command ends. Streams do not slow each other down.
What a command waits for may be still to come, from a peer that is behind: its times are known once that is.

The host. Its time passes by what a scenario says (`pass_ms`, `host_ms=`), by `time.sleep` and by what calls
of torch.cuda cost; `time.perf_counter` and `time.monotonic` read it. Ranks take turns (`virtual_ranks`): when
one asks for what a peer may still decide, those whose hosts are behind go on first, so the answer is that of
the moment. An exchange ends for all of them `EXCHANGE_MS` after the last has come to it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from kernels_for_tests import add
from virtual_ranks import VirtualAgreement, VirtualGroup, everybodys_turn
from virtual_streams import Command, Flag, VirtualEvent, VirtualGraph, VirtualStream

from dist_autotune import EventClock, contextual_autotune
from dist_autotune import options as options_module
from dist_autotune.ranks.exchange import Decide, ExchangeWait
from dist_autotune.ranks.group import GROUPS
from dist_autotune.timing.stream_filler import CYCLES_PER_MS
from dist_autotune.triton_api.interception import INTERCEPTION

CALL_MS = 0.002  # of the host, for each call of torch.cuda that does something
LAUNCH_MS = 0.01  # of the host, for a launch
EXCHANGE_MS = 0.1  # from the last rank's part of an exchange to its end
TIMEOUT_S = 1.0  # of a launch, in virtual time


@dataclass(eq=False)
class VirtualGpu:
    """One GPU and the host of its rank. Times are ms."""

    gpus: VirtualGpus
    rank: int
    host_ms: float = 0.0
    fillers_ms: list[float] = field(default_factory=list)  # of torch.cuda._sleep
    synchronized: int = 0
    awaits: Command | None = None  # the host waits for its end
    trouble: Callable[[], BaseException] | None = None  # raised by every question and command ...
    breaks_ms: float = 0.0  # ... from this time of the host's on
    graph: VirtualGraph | None = None  # the graph that the current stream is captured into
    graphs: weakref.WeakSet[VirtualGraph] = field(default_factory=weakref.WeakSet)  # those that live
    replays: list[int] = field(default_factory=list)  # of each graph so far

    def __post_init__(self) -> None:
        self.streams: list[VirtualStream] = []
        self.stream = self.new_stream()  # the current one
        self._used: set[Any] = set()

    # -- what a scenario does ------------------------------------------------------------------------------

    def pass_ms(self, ms: float) -> None:
        """Let the host be busy with something else."""
        self.host_ms += ms

    def launch(
        self,
        *work: float | Flag,
        host_ms: float = LAUNCH_MS,
        on: VirtualStream | None = None,
        sets: Flag | Sequence[Flag] = (),
    ) -> Command:
        """Spend `host_ms` on preparing a kernel or a copy, then queue it, on the current stream or `on`."""
        self.pass_ms(host_ms)
        return self.queue(*work, on=on, sets=(sets,) if isinstance(sets, Flag) else sets)

    def first_use(self, what: Any, *host_ms: float) -> None:
        """Let the first use of something take the first of `host_ms`, its second the second, and so on."""
        for count, ms in enumerate(host_ms):
            if (what, count) not in self._used:
                self._used.add((what, count))
                self.pass_ms(ms)
                return

    def synchronize(self) -> None:
        self.synchronized += 1
        for stream in self.streams:
            self.wait_for(stream.last)

    @property
    def idle_ms(self) -> float:
        """When all is done that is queued; all of it must be known by now."""
        return max(stream.last.end_ms or 0.0 for stream in self.streams)

    # -- what torch.cuda does ------------------------------------------------------------------------------

    def call(self) -> None:
        self.pass_ms(CALL_MS)

    def new_stream(self) -> VirtualStream:
        self.streams.append(VirtualStream(self))
        return self.streams[-1]

    def queue(
        self,
        *work: float | Flag,
        on: VirtualStream | None = None,
        after: Iterable[Command] = (),
        sets: Sequence[Flag] = (),
    ) -> Command:
        self._check()
        if self.graph is not None:
            self.graph.work += work
            return Command((), 0.0, [], begin_ms=0.0, end_ms=0.0)
        stream = on or self.stream
        command = Command(tuple(work), self.host_ms, [stream.last, *after], tuple(sets))
        stream.last = command
        self.gpus.take_in(command)
        return command

    def has_done(self, command: Command) -> bool:
        """Ask, at a cost, whether the device has come so far."""
        assert self.graph is None, "operation not permitted when stream is capturing"
        self.call()
        self._check()
        if command.end_ms is None:
            self.gpus.let_catch_up(self)
        return command.end_ms is not None and self.host_ms >= command.end_ms

    def wait_for(self, command: Command) -> None:
        """Block the host until the device has come so far."""
        self.awaits = command
        if command.end_ms is None:
            self.gpus.let_catch_up(self)
        assert command.end_ms is not None, f"rank {self.rank} waits for ever: {self.gpus.why}"
        self.awaits = None
        self.host_ms = max(self.host_ms, command.end_ms)

    def sleep(self, cycles: int) -> None:
        """Take the place of torch.cuda._sleep."""
        self.call()
        self.fillers_ms.append(cycles / CYCLES_PER_MS)
        self.queue(cycles / CYCLES_PER_MS)

    def _check(self) -> None:
        if self.trouble is not None and self.host_ms >= self.breaks_ms:
            raise self.trouble()

    @contextlib.contextmanager
    def on(self, stream: VirtualStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


class VirtualGpus(list[VirtualGpu]):
    """The GPUs of all ranks.

    lag_ms: how much later than others a rank gets to know that an exchange is over.
    """

    def __init__(self, count: int, *, lag_ms: Callable[[int], float] = lambda rank: 0.0) -> None:
        super().__init__(VirtualGpu(self, rank) for rank in range(count))
        self.lag_ms = lag_ms
        self.group: TimedGroup | None = None
        self._flags: dict[Any, Flag] = {}
        self._unknown: list[Command] = []
        self._thread = threading.local()

    @property
    def here(self) -> VirtualGpu:
        """The GPU of the rank whose thread asks."""
        gpu: VirtualGpu = getattr(self._thread, "gpu", self[0])
        return gpu

    @property
    def why(self) -> str:
        """Say what nobody has set."""
        return f"nobody sets {[name for command in self._unknown for name in command.waits_for]}"

    def flag(self, *name: Any) -> Flag:
        """Return the flag of that name, the same for all ranks."""
        return self._flags.setdefault(name, Flag(str(name)))

    def tuned(self, thunk: Callable[..., Any], **options: Any) -> Any:
        """Decorate this rank's function, for all ranks."""
        chosen = {"clock": EventClock(TIMEOUT_S), "cache": False, "log_dir": None, "progress": False}
        if self.group is not None:
            chosen |= {"is_dist": True, "group": self.group.agreements[self.here.rank]}
        return contextual_autotune(thunk, **{**chosen, **options})

    def run(self, program: Callable[[VirtualGpu], Any]) -> list[Any]:
        """Return what `program` returned on each rank. Raises what it raised on one."""

        def main(agreement: VirtualAgreement) -> Any:
            self._thread.gpu = self[agreement.rank]
            return program(self.here)

        self.group = TimedGroup(self, Random(0))
        with (
            mock.patch.object(GROUPS, "of", lambda group: group),
            mock.patch.object(options_module, "_is_process_group", return_value=True),
            mock.patch.object(INTERCEPTION, "session_lock", everybodys_turn()),  # ranks never run at once
        ):
            try:
                return self.group.run(main)
            finally:
                self.group = None

    def take_in(self, command: Command) -> None:
        """Find out all times that are known with a new command."""
        self._unknown.append(command)
        before = len(self._unknown) + 1
        while len(self._unknown) < before:
            before = len(self._unknown)
            self._unknown = [command for command in self._unknown if not command.resolve()]

    def let_catch_up(self, gpu: VirtualGpu) -> None:
        """Let peers go on that are behind this rank's host; all of them, if it waits."""
        if self.group is not None:
            self.group.pass_on(self.group.agreements[gpu.rank])

    def install(self, monkeypatch: pytest.MonkeyPatch) -> VirtualGpus:
        """Take the place of torch.cuda and of Python's clocks; this thread is the first rank's."""
        self.install_device(monkeypatch)
        self._thread.gpu = self[0]
        for name in ("perf_counter", "monotonic"):
            monkeypatch.setattr(time, name, lambda: self.here.host_ms * 1e-3)
            monkeypatch.setattr(time, f"{name}_ns", lambda: round(self.here.host_ms * 1e6))
        sleep = time.sleep

        def pass_s(seconds: float) -> None:
            if hasattr(self._thread, "gpu"):
                self.here.pass_ms(seconds * 1e3)
            else:  # a thread that acts for a rank
                sleep(seconds)

        monkeypatch.setattr(time, "sleep", pass_s)
        return self

    def install_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of torch.cuda."""
        for name, value in (
            ("is_available", lambda: True),
            ("current_device", lambda: self.here.rank),
            ("device", lambda index: nullcontext()),
            ("current_stream", lambda device=None: self.here.stream),
            ("Stream", lambda *options, **more: self.here.new_stream()),
            ("stream", lambda stream: self.here.on(stream)),
            ("Event", lambda enable_timing=False, **options: VirtualEvent(self.here)),
            ("_sleep", lambda cycles: self.here.sleep(cycles)),
            ("synchronize", lambda device=None: self.here.synchronize()),
            ("CUDAGraph", lambda: VirtualGraph(self.here)),
            ("is_current_stream_capturing", lambda: self.here.graph is not None),
            ("empty_cache", lambda: None),
        ):
            monkeypatch.setattr(torch.cuda, name, value)


# ---- ranks


class TimedAgreement(VirtualAgreement):
    """One rank's `RankGroup`; its exchanges take time."""

    group: TimedGroup

    def exchange(self, payload: bytes, decide: Decide, wait: ExchangeWait) -> bytes:
        gpu, posted_ms = self.gpu, self.group.posted_ms.setdefault(self.sequence, [])
        posted_ms.append(gpu.host_ms)
        merged = super().exchange(payload, decide, wait)
        gpu.host_ms = max(posted_ms) + EXCHANGE_MS + self.group.gpus.lag_ms(self.rank)
        return merged

    @property
    def gpu(self) -> VirtualGpu:
        return self.group.gpus[self.rank]

    @property
    def can_go_on(self) -> bool:
        awaits = self.gpu.awaits
        return super().can_go_on and (awaits is None or awaits.end_ms is not None)


class TimedGroup(VirtualGroup):
    """Ranks of which the one goes on whose host is furthest behind."""

    def __init__(self, gpus: VirtualGpus, random: Random) -> None:
        self.gpus = gpus
        self.posted_ms: dict[int, list[float]] = {}  # exchange -> when ranks have come to it
        super().__init__(len(gpus), random)

    def make_agreement(self, rank: int) -> VirtualAgreement:
        return TimedAgreement(self, rank)

    def chosen(self, ready: Sequence[VirtualAgreement]) -> VirtualAgreement:
        return min(ready, key=lambda agreement: (self.gpus[agreement.rank].host_ms, agreement.rank))

    def give_up(self, alive: Sequence[VirtualAgreement]) -> None:
        waiting = [agreement.rank for agreement in alive if self.gpus[agreement.rank].awaits is not None]
        if waiting:
            self.broken = AssertionError(f"the hosts of ranks {waiting} wait for ever: {self.gpus.why}")
        else:
            super().give_up(alive)


# ---- kernels


class VirtualKernel:
    """Stands between an Autotuner and its `@jit` function."""

    def __init__(self, launch: Callable[[int], Any], function: Any) -> None:
        self.fn = function
        self.arg_names = list(function.arg_names)
        self.__name__ = function.__name__
        self._launch = launch

    def run(self, *args: Any, grid: Any, warmup: bool, BLOCK: int, **kwargs: Any) -> None:
        if not warmup:
            self._launch(BLOCK)


def autotuned(blocks: Iterable[int], launch: Callable[[int], Any], function: Any = add) -> Any:
    """Return an autotuned kernel of configs that differ in BLOCK: `launch(block)` queues what a launch is."""
    configs = [triton.Config({"BLOCK": block}) for block in blocks]
    return triton.autotune(configs, ["n"])(VirtualKernel(launch, function))
