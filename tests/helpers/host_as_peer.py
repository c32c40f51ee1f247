"""Rank 0 of two on one GPU: the peer is the host, with pinned memory that copy engines copy as a peer's."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from operation_runs import on_ranks
from rank_programs import wait_for

from dist_autotune.kernels.exchange import operation
from dist_autotune.kernels.symm.base import SymmetricTensor
from dist_autotune.kernels.symm.cuda import CudaMemory, CudaStream
from dist_autotune.kernels.symm.ranks import SharingRanks

DEVICE, DTYPE = "cuda", torch.bfloat16
LATE_S = 0.003  # a kernel of these sizes takes a hundredth of that
PATIENCE_S = 20.0  # of a kernel


class RankOfMany(SharingRanks):
    """One rank, with which all others agree."""

    def __init__(self, rank: int, world: int) -> None:
        self.group, self.timeout_s = None, PATIENCE_S
        self.rank, self.world_size, self.members = rank, world, tuple(range(world))

    def _meet(self, step: str, value: Any) -> list[tuple[str, Any]]:
        return [(step, value)] * self.world_size


class HostAsPeer(CudaMemory):
    """Memory of this GPU and, as the peer's, pinned memory of the host, which reads and writes it at will."""

    name = "host as peer"

    def __init__(self) -> None:
        super().__init__(RankOfMany(0, 2), torch.device(DEVICE, 0), "one GPU")

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        here = torch.zeros(shape, dtype=dtype, device=self.device)
        return SymmetricTensor(here, (here, torch.zeros(shape, dtype=dtype, pin_memory=True)))

    def _release(self) -> None:
        """Nothing to do."""


@functools.cache
def stream_of_peer(device: torch.device) -> CudaStream:
    """Return a stream that nothing blocks: of another priority than side streams, and one for all tests."""
    stream = CudaStream(device)
    stream._stream = torch.cuda.Stream(device)
    stream.handle = stream._stream.cuda_stream
    return stream


class HostPeer:
    """How rank 1 writes rank 0's flags, and takes back its own."""

    def __init__(self, memory: HostAsPeer) -> None:
        self.memory, self.stream = memory, stream_of_peer(memory.device)

    def write(self, flag: torch.Tensor, value: int) -> None:
        self.memory.write_signal(flag, value, self.stream)

    def take(self, flag: torch.Tensor) -> None:
        """Wait for a flag that rank 0 sets here, and take it back."""
        wait_for(lambda: int(flag) >= 1, PATIENCE_S)
        flag.fill_(0)


def opened(
    memory: HostAsPeer, kind: Callable[..., Any], *args: Any, dtype: torch.dtype = DTYPE, **options: Any
) -> Any:
    """Return an operation of rank 0, which makes no collective: there is no process group."""
    operation.open_symmetric_memory = lambda *_, **__: memory
    return kind(*args, dtype, timeout_s=PATIENCE_S, collective=False, **options)


# Makes a test of a function of a rank, in a process of its own, which ends what may hang.
on_one_gpu = on_ranks(1, init="none", timeout_s=100.0)
