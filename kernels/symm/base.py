"""The protocol of symmetric memory: the same allocation on each rank, mapped by all of them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, NamedTuple, Protocol, Self

import torch

from dist_autotune.for_operations import leave_unchecked

from .ranks import SharingRanks, SymmetricMemoryError


@dataclass(frozen=True)
class SymmetricTensor:
    """One allocation of the same shape on each rank."""

    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]  # by rank; the own entry is `local`

    def addresses(self, *others: SymmetricTensor) -> torch.Tensor:
        """Return an int64 table of where each rank's part lies, then those of others; they stay mapped."""
        parts = tuple(part for tensor in (self, *others) for part in tensor.peers)
        pointers = [part.data_ptr() for part in parts]
        table = torch.tensor(pointers, dtype=torch.int64, device=self.local.device)
        table.points_to = parts  # type: ignore[attr-defined]
        return table


class SideStream(Protocol):
    """A queue of copies and signals that runs beside the caller's own work."""

    def fork(self) -> None:
        """Order later work on this stream after the caller's work so far."""

    def join(self) -> None:
        """Order the caller's later work after all work on this stream so far."""


class Copy(NamedTuple):
    """As `SymmetricMemory.copy`."""

    dst: torch.Tensor
    src: torch.Tensor


class Write(NamedTuple):
    """As `SymmetricMemory.write_signal`."""

    word: torch.Tensor
    value: int


class Wait(NamedTuple):
    """As `SymmetricMemory.wait_signal`."""

    word: torch.Tensor
    value: int


class Lowered(NamedTuple):
    """A wait until a word is 0, on the caller's stream: see `SymmetricMemory.prepare_here`."""

    word: torch.Tensor


Step = Copy | Write | Wait


class Shared(abc.ABC):
    """A resource that all ranks of a group have opened; a context manager."""

    @abc.abstractmethod
    def close(self) -> None:
        """Meet the peers and give it back."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Stop using it without meeting the peers: the way out of a rank that has failed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()  # the peers may be anywhere: a rank that fails must not wait for them


class SymmetricMemory(Shared):
    """Memory of all ranks of a group, and the operations that order them against each other.

    `allocate`, `barrier` and `close` are collective. A step that fails on one rank raises on all; a peer that
    does not come raises after `timeout_s`.
    """

    name: ClassVar[str]  # as in open_symmetric_memory(backend=...)

    def __init__(self, ranks: SharingRanks, device: torch.device, reason: str) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.device = device
        self.group, self.timeout_s = ranks.group, ranks.timeout_s
        self.reason = reason  # why this backend was chosen
        self._ranks = ranks
        self._allocations: list[SymmetricTensor] = []
        self._held: list[torch.Tensor] = []
        self._is_closed = False

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """Return zeros of this shape on every rank, each of them mapped by every rank."""
        self._check_open()
        request = [list(shape), str(dtype)]
        requests = self._ranks.exchange("allocating", request)
        if any(other != request for other in requests):
            asked = "; ".join(f"rank {rank}: {shape} {dtype}" for rank, (shape, dtype) in enumerate(requests))
            raise ValueError(
                f"the ranks allocate different tensors: {asked}. Pass the same shape and dtype on all"
            )
        if min(shape, default=1) <= 0:
            raise ValueError(f"cannot allocate shape {list(shape)}: every dimension must be at least 1")
        tensor = self._map(tuple(shape), dtype)
        leave_unchecked(tensor.local, *tensor.peers)
        self._allocations.append(tensor)
        return tensor

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a tensor that kernels and streams write to, as long as this memory; return it."""
        leave_unchecked(tensor)
        self._held.append(tensor)
        return tensor

    def require_equal(self, name: str, value: str | int | float) -> None:
        """Raise ValueError on every rank unless all pass the same value; collective."""
        self._check_open()
        values = self._ranks.exchange(f"comparing {name}", value)
        if any(other != value for other in values):
            passed = "; ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(values))
            raise ValueError(f"the ranks pass different values of {name}: {passed}. Pass the same on all")

    def barrier(self) -> None:
        """Wait for this rank's device, then until every rank has come here."""
        self._check_open()
        self._synchronize()
        self._ranks.exchange("a barrier", None)

    def close(self) -> None:
        """Give the memory back once every rank has come here; a second call does nothing.

        Where a peer does not come, or has abandoned its part, so is this rank's, to the end of the process.
        """
        if self._is_closed:
            return
        try:
            self._synchronize()
            self._ranks.meet_to_close()
            self._release()
        except Exception:
            self.abandon()
            raise
        self._is_closed = True
        self._allocations.clear()
        self._held.clear()

    def abandon(self) -> None:
        """Stop using the memory without meeting the peers: the way out of a rank that has failed."""
        self._ranks.abandon()
        self._is_closed = True
        self._held.clear()

    @abc.abstractmethod
    def side_stream(self) -> SideStream:
        """Return a new stream for `copy`, `write_signal` and `wait_signal`."""

    @abc.abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: SideStream) -> None:
        """Enqueue a copy between contiguous tensors of one size, this rank's or a peer's."""

    def prepare_copy_here(self, dst: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Return a function that copies a contiguous tensor to the beginning of `dst`, also contiguous.

        It enqueues that on the caller's current stream.
        """
        room = dst.view(-1)

        def run(src: torch.Tensor) -> None:
            room[: src.numel()].copy_(src.detach().view(-1))

        return run

    def prepare_here(self, steps: Sequence[Write | Lowered]) -> Callable[[], None]:
        """Return a function that enqueues the steps on the caller's current stream.

        A CUDA stream waits without a bound: the caller must make sure that the word becomes 0. On the CPU it
        is 0 as soon as a call has returned.
        """
        writes = [step for step in steps if isinstance(step, Write)]

        def run() -> None:
            for word, value in writes:
                word.fill_(value)

        return run

    def mark(self) -> Callable[[], bool]:
        """Return what tells whether all work so far is done, on the caller's stream and on side streams."""
        return lambda: True

    @abc.abstractmethod
    def write_signal(self, word: torch.Tensor, value: int, stream: SideStream) -> None:
        """Enqueue the setting of an int32 word, after everything before it on the stream is visible."""

    @abc.abstractmethod
    def wait_signal(self, word: torch.Tensor, value: int, stream: SideStream) -> None:
        """Enqueue a wait for `word - value >= 0` (int32, wrapping), the word being this rank's own.

        A CUDA stream waits without a bound: the caller must make sure that a kernel sets the word when its
        patience ends. On the CPU the wait fails after a few times `timeout_s`.
        """

    def prepare(self, steps: Sequence[Step], stream: SideStream) -> Callable[[], None]:
        """Return a function that enqueues the steps in their order."""

        return lambda: self.enqueue(steps, stream)

    def enqueue(self, steps: Iterable[Step], stream: SideStream) -> None:
        """Enqueue the steps one by one."""
        for step in steps:
            if isinstance(step, Copy):
                self.copy(step.dst, step.src, stream)
            elif isinstance(step, Write):
                self.write_signal(step.word, step.value, stream)
            else:
                self.wait_signal(step.word, step.value, stream)

    @abc.abstractmethod
    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        """Return zeroed memory that all ranks agreed on; raise on all ranks or on none."""

    @abc.abstractmethod
    def _synchronize(self) -> None:
        """Wait for the device."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Give back `_allocations`, last first; every rank is here. If it raises, they are abandoned."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise SymmetricMemoryError(f"this {self.name} memory of {self._ranks} is closed; open another")
