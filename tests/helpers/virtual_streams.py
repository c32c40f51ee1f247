"""Streams of a virtual GPU: commands and when they end, events, graphs. See `virtual_gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from virtual_gpu import VirtualGpu


@dataclass(eq=False)
class Flag:
    """Set once, by the command that ends then."""

    name: str = ""
    at_ms: float | None = None


@dataclass(eq=False)
class Command:
    """What a stream is to do: `work` in order, after other commands, not before it was queued."""

    work: tuple[float | Flag, ...]
    queued_ms: float
    after: list[Command]
    sets: tuple[Flag, ...] = ()
    begin_ms: float | None = None  # None: not known yet
    end_ms: float | None = None

    @property
    def ms(self) -> float:
        assert self.begin_ms is not None
        assert self.end_ms is not None, f"nobody has set {self.waits_for}"
        return self.end_ms - self.begin_ms

    @property
    def waits_for(self) -> list[str]:
        return [flag.name for flag in self.work if isinstance(flag, Flag) and flag.at_ms is None]

    def resolve(self) -> bool:
        """Find out when it begins and ends; return whether that is known."""
        if any(command.end_ms is None for command in self.after):
            return False
        self.begin_ms = max([self.queued_ms, *(command.end_ms or 0.0 for command in self.after)])
        at_ms = self.begin_ms
        for part in self.work:
            if not isinstance(part, Flag):
                at_ms += part
            elif part.at_ms is None:
                return False
            else:
                at_ms = max(at_ms, part.at_ms)
        self.end_ms, self.after = at_ms, []
        for flag in self.sets:
            assert flag.at_ms is None, f"flag {flag.name} is set twice"
            flag.at_ms = at_ms
        return True


class VirtualStream:
    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu = gpu
        self.last = Command((), 0.0, [], begin_ms=0.0, end_ms=0.0)

    def wait_event(self, event: VirtualEvent) -> None:
        self.gpu.call()
        self.gpu.queue(on=self, after=[event.command])

    def wait_stream(self, stream: VirtualStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        event = event or VirtualEvent(self.gpu)
        event.record(self)
        return event

    def query(self) -> bool:
        return self.gpu.has_done(self.last)


class VirtualEvent:
    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu = gpu
        self.command = Command((), 0.0, [], begin_ms=0.0, end_ms=0.0)  # done, as long as it is not recorded

    @property
    def at_ms(self) -> float:
        assert self.command.end_ms is not None
        return self.command.end_ms

    def record(self, stream: VirtualStream | None = None) -> None:
        self.gpu.call()
        self.command = self.gpu.queue(on=stream)

    def query(self) -> bool:
        return self.gpu.has_done(self.command)

    def elapsed_time(self, end: VirtualEvent) -> float:
        return end.at_ms - self.at_ms


class VirtualGraph:
    """A `torch.cuda.CUDAGraph` of work on one stream, without flags."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu, self.place = gpu, len(gpu.replays)
        self.work: list[float | Flag] = []
        gpu.graphs.add(self)
        gpu.replays.append(0)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert self.gpu.graph is None
        assert pool is None or pool in self.gpu.graphs, "the memory has gone with its graph"
        self.gpu.graph = self

    def capture_end(self) -> None:
        assert self.gpu.graph is self
        self.gpu.graph = None

    def pool(self) -> VirtualGraph:
        return self

    def replay(self) -> None:
        assert self in self.gpu.graphs
        self.gpu.replays[self.place] += 1
        self.gpu.launch(*self.work)

    def reset(self) -> None:
        self.gpu.graphs.discard(self)
