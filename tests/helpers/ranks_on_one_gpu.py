"""All ranks of an operation on one GPU, in one process: each has a stream and a share of the SMs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from host_as_peer import DEVICE, PATIENCE_S, RankOfMany

from dist_autotune.kernels.exchange import operation
from dist_autotune.kernels.symm.base import SymmetricTensor
from dist_autotune.kernels.symm.cuda import CudaMemory

Parts = tuple[torch.Tensor, ...]  # of one allocation, by rank


class MemoryOfOneGpu(CudaMemory):
    """Memory of all ranks on this GPU; parts: what has been allocated, the same list for all ranks."""

    name = "one GPU"

    def __init__(self, rank: int, world: int, parts: list[Parts]) -> None:
        super().__init__(RankOfMany(rank, world), torch.device(DEVICE, 0), "one GPU")
        self._parts, self._allocated = parts, 0

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        if self._allocated == len(self._parts):
            world = range(self.world_size)
            self._parts.append(tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in world))
        parts, self._allocated = self._parts[self._allocated], self._allocated + 1
        return SymmetricTensor(parts[self.rank], parts)

    def _release(self) -> None:
        """Nothing to do."""


@contextmanager
def ranks_of(world: int, kind: Callable[..., Any], *args: Any, **options: Any) -> Iterator[list[Any]]:
    """Open the operation of each rank, with a share of the SMs; no two of them can make a collective."""
    parts: list[Parts] = []
    with ExitStack() as stack:
        ranks = []
        for rank in range(world):
            memory = MemoryOfOneGpu(rank, world, parts)
            operation.open_symmetric_memory = lambda *_, memory=memory, **__: memory
            op = kind(*args, timeout_s=PATIENCE_S, **options)
            op._facts = op._facts._replace(sms=op._facts.sms // world)
            ranks.append(stack.enter_context(op))
        torch.cuda.synchronize()
        yield ranks
