"""The order of pushes, permits, forks and kernels, where streams share hardware queues, run in any order.

What waits at a queue's head holds up all behind. A host enqueues its commands in order. A command starts at
the head of its queue when those that it follows have ended: the one before it in its stream, or in a graph
those before it in the capture's streams. A signal or a wait leaves the queue when it has ended, a kernel or a
copy when it has started. What a command does is a generator: it yields None where others may come between, or
what must hold before it goes on.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import torch

from dist_autotune.kernels.exchange import absence
from dist_autotune.kernels.exchange.flags import AFTER, ARRIVED, DONE, FLAGS, FREE
from dist_autotune.kernels.exchange.push import ChunkPusher, Pushes, SumPusher
from dist_autotune.kernels.signals import GIVEN_UP
from dist_autotune.kernels.symm.base import Lowered, SymmetricMemory, SymmetricTensor

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


def until_lowered(word: torch.Tensor) -> Iterator[Callable[[], bool]]:
    yield lambda: int(word) == 0


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

    def prepare_copy_here(self, dst):
        def copy(src):
            for place in self.random.sample(range(src.numel()), src.numel()):
                dst.view(-1)[place] = src.reshape(-1)[place]
                yield None

        return lambda src: self.caller.add(lambda: copy(src), runs_beside=True)

    def prepare_here(self, steps):
        def run() -> None:
            for step in steps:
                if isinstance(step, Lowered):
                    self.caller.add(functools.partial(until_lowered, step.word))
                else:
                    self.write_signal(step.word, step.value, self.caller)

        return run

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


CALLS = 5
WAYS = ("eager", "eager in steps", "replay")


def raised(flags, row, peer):
    return lambda: int(flags[row.value, peer]) >= 1


class Scattering:
    """GemmReduceScatter of one rank; the sums of call c of rank r for p are c * 100 + r * 10 + p."""

    leaves = True  # its kernel waits until its sums have left

    def __init__(self, device: Device, staged: list[torch.Tensor]) -> None:
        self.device, self.flags, self.calls = device, device.flags.local, 0
        self.peers = [(device.rank + step) % device.world_size for step in range(1, device.world_size)]
        self.partial, self.staged = torch.zeros_like(staged[0]), staged[device.rank]
        self.pushes = Pushes(device, device.side, device.flags)
        symmetric = SymmetricTensor(self.staged, tuple(staged))
        self.pusher = SumPusher(self.pushes, self.partial, symmetric, with_permits=True)
        self.replay = device.capture(lambda: self.call(in_steps=True, is_capturing=True))

    def make(self, way: str) -> None:
        if way == "replay":
            self.replay()
        else:
            self.call(in_steps=way == "eager in steps", is_capturing=False)

    def call(self, *, in_steps: bool, is_capturing: bool) -> None:
        rows = (1,) * self.device.world_size
        options = {"in_pieces": True, "in_steps": in_steps, "at_once": not is_capturing}
        self.pusher.run(self.launch, rows, **options)
        self.pushes.put_back()

    def launch(self, step: int | None = None) -> None:
        of_peers = len(self.peers)
        slots = range(of_peers) if step is None else range(step, min(step + 1, of_peers))
        is_last = step in (None, of_peers)
        self.device.caller.add(lambda: self.kernel(slots, is_last, step is not None), runs_beside=True)

    def kernel(self, slots, is_last, in_steps):
        flags, rank = self.flags, self.device.rank
        number = (self.calls + 1) * 100
        for slot in slots:
            yield None
            self.partial[slot] = -1
            yield None
            self.partial[slot] = number + rank * 10 + self.peers[slot]
            if in_steps:
                yield raised(flags, FREE, self.peers[slot])
                flags[FREE.value, self.peers[slot]] = 0
            else:
                flags[DONE.value, self.peers[slot]] = 1
        if not is_last:
            return
        for slot, peer in enumerate(self.peers):
            yield raised(flags, ARRIVED, peer)
            for _ in range(2):
                assert int(self.staged[slot]) == number + peer * 10 + rank
                yield None
        if self.leaves:
            yield raised(flags, ARRIVED, rank)
        self.calls += 1


class Gathering:
    """AllGatherGemm of one rank; chunk r of call c is the number c * 10 + r."""

    def __init__(self, device: Device, gather: list[torch.Tensor]) -> None:
        self.device, self.flags, self.gather, self.calls = device, device.flags.local, gather[device.rank], 0
        self.pusher = ChunkPusher(device, SymmetricTensor(self.gather, tuple(gather)), device.flags)
        self.replay = device.capture(lambda: self.call(is_capturing=True))

    def make(self, way: str) -> None:
        if way == "replay":
            self.replay()
        else:
            self.call(is_capturing=False)

    def call(self, *, is_capturing: bool) -> None:
        add, pushes = self.device.caller.add, self.pusher.pushes
        add(self.put, runs_beside=True)
        self.pusher.start(1, 1, is_capturing=is_capturing)
        add(self.kernel, runs_beside=True)
        self.pusher.finish(is_capturing=is_capturing)
        pushes.put_back()
        add(self.read, runs_beside=True)

    def put(self):
        self.calls += 1
        self.gather[self.device.rank] = -1
        yield None
        self.gather[self.device.rank] = self.calls * 10 + self.device.rank

    def kernel(self):
        rank, world = self.device.rank, self.device.world_size
        for peer in ((rank + step) % world for step in range(1, world)):
            yield raised(self.flags, ARRIVED, peer)
            assert int(self.gather[peer]) == self.calls * 10 + peer
        yield raised(self.flags, ARRIVED, rank)

    def read(self):
        """Read `op.gathered`, as a caller may until the next call."""
        for peer in range(self.device.world_size):
            yield None
            assert int(self.gather[peer]) == self.calls * 10 + peer


def opened(kind, world: int, random: Random) -> tuple[list[Device], list[Scattering | Gathering]]:
    """Return the devices of all ranks and an operation on each; what opening has enqueued is gone."""
    flags = [torch.zeros((FLAGS, world), dtype=torch.int32) for _ in range(world)]
    ranks = [Device(rank, flags, random.randint(1, 3), random) for rank in range(world)]
    memory = [torch.zeros((world, 1, 1), dtype=torch.int32) for _ in ranks]
    operations = [kind(device, memory) for device in ranks]
    for device in ranks:
        device.forget()
    return ranks, operations


def ends(kind, seed: int) -> bool:
    """Run calls of 2 to 4 ranks; return whether they end. What a kernel reads is asserted."""
    random = Random(seed)
    ranks, operations = opened(kind, random.randint(2, 4), random)
    for _ in range(CALLS):
        is_replay = kind not in GIVING_UP and random.random() < 0.3
        for operation in operations:
            operation.make("replay" if is_replay else random.choice(WAYS[:2]))
    return Run(ranks, random).to_its_end()


def fails(kind, seeds: int) -> str:
    """Return how the first of many runs fails; empty if none does."""
    for seed in range(seeds):
        try:
            if not ends(kind, seed):
                return "deadlock"
        except AssertionError:
            return "wrong"
    return ""


@pytest.mark.parametrize("kind", [Scattering, Gathering])
def test_calls_end_and_read_what_they_should_in_any_order(kind):
    assert fails(kind, 150) == ""


@pytest.mark.parametrize("kind", [Scattering, Gathering])
def test_a_rank_that_leaves_takes_no_permit_of_a_call_that_is_under_way(kind):
    for seed in range(60):
        random = Random(seed)
        ranks, operations = opened(kind, 2, random)
        for operation in operations * 2:
            operation.make("replay")
        leaves, stays = ranks
        pushes = getattr(operations[0], "pushes", None) or operations[0].pusher.pushes
        absence.leave(pushes, 1, behind_kernels=True)
        stays.write_signal(leaves.flags.local[FREE.value, 1], 1, stays.caller)  # comes to another call
        assert Run(ranks, random).to_its_end()
        assert int(stays.flags.local[FREE.value, 0]) > GIVEN_UP.value


class GivingUp:
    """A kernel that gives up its own pushes after a while; it compares no data, which may come late."""

    def part(self):
        """Wait for the peers' data, and a while until the own data is with them."""
        flags, rank, world = self.flags, self.device.rank, self.device.world_size
        for peer in ((rank + step) % world for step in range(1, world)):
            yield raised(flags, ARRIVED, peer)
        have_left = raised(flags, ARRIVED, rank)
        for _ in range(self.device.random.choice([0, 3, 30])):
            if have_left():
                break
            yield None
        if not have_left():
            flags[AFTER.value + 1, rank] = FAR_AHEAD
        self.calls += 1

    def read(self):
        yield None


FAR_AHEAD = 1 + GIVEN_UP.value


class GatheringOrGivingUp(GivingUp, Gathering):
    def kernel(self):
        return self.part()


class ScatteringOrGivingUp(GivingUp, Scattering):
    def kernel(self, slots, is_last, in_steps):
        for slot in slots:
            yield None
            if in_steps:
                yield raised(self.flags, FREE, self.peers[slot])
                self.flags[FREE.value, self.peers[slot]] = 0
            else:
                self.flags[DONE.value, self.peers[slot]] = 1
        if is_last:
            yield from self.part()


# Without replays, which do not wait for the side stream of eager calls.
GIVING_UP = [GatheringOrGivingUp, ScatteringOrGivingUp]


@pytest.mark.parametrize("kind", GIVING_UP)
def test_calls_behind_one_that_has_given_up_its_own_pushes_end(kind):
    assert fails(kind, 60) == ""
