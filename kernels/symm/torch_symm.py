"""Symmetric memory of torch.distributed: peers' allocations mapped into each process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .base import SymmetricTensor
from .cuda import CudaMemory


class TorchMemory(CudaMemory):
    """`torch.distributed._symmetric_memory`, with the backend that torch has chosen."""

    name = "torch"

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        if self.world_size == 1:
            alone = torch.zeros(shape, dtype=dtype, device=self.device)
            return SymmetricTensor(alone, (alone,))
        import torch.distributed._symmetric_memory as symmetric_memory

        local: torch.Tensor | None = None
        error: Exception | None = None
        try:
            local = symmetric_memory.empty(shape, dtype=dtype, device=self.device).zero_()
            self._synchronize()  # a peer may use it as soon as the next exchange is over
        except RuntimeError as caught:
            error = caught
        self._ranks.raise_together(f"allocating {list(shape)} {dtype} on the GPU", error)
        peers: tuple[torch.Tensor, ...] = ()
        try:
            assert local is not None
            group = self._ranks.group or dist.distributed_c10d.GroupMember.WORLD
            assert group is not None
            handle = symmetric_memory.rendezvous(local, group)
            mapped = [handle.get_buffer(peer, shape, dtype) for peer in range(self.world_size)]
            mapped[self.rank] = local
            peers = tuple(mapped)
        except RuntimeError as caught:
            error = caught
        self._ranks.raise_together("mapping the peers' GPU memory", error)
        return SymmetricTensor(peers[self.rank], peers)

    def _release(self) -> None:
        """Nothing to do: torch frees an allocation with its last tensor."""
