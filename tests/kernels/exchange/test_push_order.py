"""The order of pushes, permits, forks and kernels: hosts and queues that streams share, in random orders."""

from __future__ import annotations

from random import Random

import pytest
import torch
from shared_queues import Device, Run, devices

from dist_autotune.kernels.exchange.flags import ARRIVED, DONE, FREE
from dist_autotune.kernels.exchange.push import ChunkPusher, Pushes, SumPusher
from dist_autotune.kernels.symm import SymmetricTensor

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
        add, pushes = self.device.caller.add, self.pusher._pushes
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


def ends(kind, seed: int) -> bool:
    """Run calls of 2 to 4 ranks; return whether they end. What a kernel reads is asserted."""
    random = Random(seed)
    world = random.randint(2, 4)
    ranks = devices(world, random)
    memory = [torch.zeros((world, 1, 1), dtype=torch.int32) for _ in ranks]
    operations = [kind(device, memory) for device in ranks]
    for device in ranks:
        device.forget()  # what opening has enqueued
    for _ in range(CALLS):
        is_replay = random.random() < 0.3
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
def test_a_side_stream_that_does_not_wait_for_its_fork_is_found(kind, monkeypatch):
    fork = Pushes.fork
    monkeypatch.setattr(Pushes, "fork", lambda self, **options: fork(self, **options)[-len(self.before) :])
    assert fails(kind, 50)


def test_sums_that_the_next_call_overwrites_before_they_have_left_are_found(monkeypatch):
    monkeypatch.setattr(Scattering, "leaves", False)
    assert fails(Scattering, 150) == "wrong"


def test_pushes_that_are_enqueued_before_their_kernel_are_found(monkeypatch):
    """They wait for its DONE at the head of a queue."""
    run = SumPusher.run

    def push_first(self, launch, *args, in_steps, **options):
        run(self, launch if in_steps else lambda: None, *args, in_steps=in_steps, **options)
        if not in_steps:
            launch()

    monkeypatch.setattr(SumPusher, "run", push_first)
    assert fails(Scattering, 50) == "deadlock"
