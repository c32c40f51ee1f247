"""Devices whose streams share hardware queues, run in any order: what waits at a head holds up all behind.

A host enqueues its commands in order. A command starts at the head of its queue when those that it follows
have ended: the one before it in its stream, or in a graph those before it in the capture's streams. A signal
or a wait leaves the queue when it has ended, a kernel or a copy when it has started. What a command does is a
generator: it yields None where others may come between, or what must hold before it goes on.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import torch

from dist_autotune.kernels.exchange.flags import FLAGS
from dist_autotune.kernels.symm.base import SymmetricMemory, SymmetricTensor

Work = Callable[[], Iterator[Callable[[], bool] | None]]


@dataclass(eq=False)
class Command:
    stream: Stream
    queue: int
    work: Work
    follows: list[Command]
    runs_beside: bool  # others of its queue
    has_ended: bool = False
    goes_on_if: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        self._steps = self.work()

    def can_start(self) -> bool:
        return all(each.has_ended for each in self.follows)

    def can_go_on(self) -> bool:
        return self.goes_on_if is None or self.goes_on_if()

    def go_on(self) -> None:
        try:
            self.goes_on_if = next(self._steps)
        except StopIteration:
            self.has_ended = True


def nothing() -> Iterator[None]:
    yield from ()


class Stream:
    """A stream of a device; as a side stream it forks from and joins the caller's."""

    def __init__(self, device: Device) -> None:
        self.device, self.queue = device, device.random.randrange(device.queues)
        self.last: list[Command] = []

    def add(self, work: Work, *, runs_beside: bool = False) -> Command:
        command = Command(self, self.queue, work, self.last, runs_beside)
        self.last = [command]
        self.device.enqueued.append(command)
        return command

    def fork(self) -> None:
        self.last = [*self.last, *self.device.caller.last]
        self.add(nothing)

    def join(self) -> None:
        caller = self.device.caller
        caller.last = [*caller.last, *self.last]
        caller.add(nothing)


class Device(SymmetricMemory):
    """The device of one rank, its memory and what its host enqueues."""

    def __init__(self, rank: int, flags: list[torch.Tensor], queues: int, random: Random) -> None:
        self.rank, self.world_size, self.queues, self.random = rank, len(flags), queues, random
        self.device = types.SimpleNamespace(type="cuda")
        self.flags = SymmetricTensor(flags[rank], tuple(flags))
        self.enqueued: list[Command] = []
        self.caller, self.side = Stream(self), Stream(self)

    def side_stream(self) -> Stream:
        return self.side

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def copy(self, dst, src, stream) -> None:
        def work():
            read = src.clone()
            yield None
            dst.fill_(-1)  # half of it
            yield None
            dst.copy_(read if torch.equal(read, src) else torch.full_like(read, -2))

        stream.add(work, runs_beside=True)

    def copy_here(self, dst, src) -> None:
        def work():
            for place in self.random.sample(range(src.numel()), src.numel()):
                dst.view(-1)[place] = src.reshape(-1)[place]
                yield None

        self.caller.add(work, runs_beside=True)

    def write_here(self, word, value) -> None:
        self.write_signal(word, value, self.caller)

    def write_signal(self, word, value, stream) -> None:
        def work():
            word.fill_(value)
            yield None

        stream.add(work)

    def wait_signal(self, word, value, stream) -> None:
        def work():
            yield lambda: int(word) >= value

        stream.add(work)

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return what replays the call, each branch on some queue; to be called before all others."""
        streams = self.caller, self.side
        self.forget()
        call()
        nodes = self.enqueued
        self.forget()

        def replay() -> None:
            root, made = self.caller.last, {}
            queues = {stream: self.random.randrange(self.queues) for stream in streams}
            for node in nodes:
                follows = [made[each] for each in node.follows] or root
                made[node] = Command(node.stream, queues[node.stream], node.work, follows, node.runs_beside)
                self.enqueued.append(made[node])
            self.caller.last = [*made.values()]
            self.caller.add(nothing)

        return replay

    def forget(self) -> None:
        self.enqueued, self.caller.last, self.side.last = [], [], []

    def _map(self, *_): ...
    def _synchronize(self): ...
    def _release(self): ...


def devices(world: int, random: Random) -> list[Device]:
    flags = [torch.zeros((FLAGS, world), dtype=torch.int32) for _ in range(world)]
    return [Device(rank, flags, random.randint(1, 3), random) for rank in range(world)]


@dataclass
class Run:
    """Runs what all hosts have enqueued, in an order that `random` chooses."""

    devices: list[Device]
    random: Random
    started: list[Command] = field(default_factory=list)

    def to_its_end(self) -> bool:
        """Return whether all commands have ended; otherwise nothing can go on."""
        hosts = [iter(device.enqueued) for device in self.devices]
        queues: list[list[list[Command]]] = [[[] for _ in range(each.queues)] for each in self.devices]
        haste = [self.random.choice([1, 1, 5, 30]) for _ in hosts]  # of a host
        left = [len(device.enqueued) for device in self.devices]
        while True:
            heads = [
                queue
                for of_rank in queues
                for queue in of_rank
                if queue and queue[0].can_start() and queue[0].can_go_on()
            ]
            ready = [command for command in self.started if command.can_go_on()]
            behind = [rank for rank, count in enumerate(left) if count]
            if not (heads or ready or behind):
                return not self.started and not any(queue for of_rank in queues for queue in of_rank)
            choices = [*heads, *ready, *(rank for rank in behind for _ in range(haste[rank]))]
            chosen = self.random.choice(choices)
            if isinstance(chosen, int):
                left[chosen] -= 1
                command = next(hosts[chosen])
                queues[chosen][command.queue].append(command)
            elif isinstance(chosen, list):
                self._start(chosen)
            else:
                self._go_on(chosen)

    def _start(self, queue: list[Command]) -> None:
        if queue[0].runs_beside:
            self.started.append(queue.pop(0))
        else:
            queue[0].go_on()
            if queue[0].has_ended:
                queue.pop(0)

    def _go_on(self, command: Command) -> None:
        command.go_on()
        if command.has_ended:
            self.started.remove(command)
