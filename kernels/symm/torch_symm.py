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

        with self._ranks.together(f"allocating {list(shape)} {dtype} on the GPU"):
            local = symmetric_memory.empty(shape, dtype=dtype, device=self.device).zero_()
            self._synchronize()  # a peer may use it as soon as the next exchange is over
        with self._ranks.together("mapping the peers' GPU memory"):
            group = self._ranks.group or dist.distributed_c10d.GroupMember.WORLD
            assert group is not None
            handle = symmetric_memory.rendezvous(local, group)
            peers = [handle.get_buffer(peer, shape, dtype) for peer in range(self.world_size)]
            peers[self.rank] = local
        return SymmetricTensor(local, tuple(peers))

    def _release(self) -> None:
        """Nothing to do: torch frees an allocation with its last tensor."""
