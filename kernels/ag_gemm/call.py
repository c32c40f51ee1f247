"""What a call of `AllGatherGemm` is, for the kernels of either family, besides the tensors they multiply."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Call(NamedTuple):
    """One call on one rank; every family launches from this alone. Made in each call: no dataclass."""

    rows: int  # of each rank's chunk
    rank: int
    world_size: int
    slots: int  # of the gather buffer, each with room for `capacity` rows
    capacity: int
    epoch: int
    base: int  # what ARRIVED was before this call; 0 in the lane of captured calls
    pushed: int  # 1 in the lane of captured calls
    patience_ticks: int  # how long the GEMM waits for a peer
    programs: int  # the most that run at once
    words: torch.Tensor  # int32, those of the lane that the call takes
    errors: torch.Tensor  # int64 [world_size], which the host reads without waiting
    stamps: torch.Tensor | None = None  # int64 [tiles, 4], if the kernel is to write when it did what


class Consumer(Protocol):
    """Multiplies with a weight and into a result of one place and shape. It keeps neither, but their numbers.

    gather [slots, capacity, K], weight [N, K] and out [world_size * rows, N], with contiguous rows, are those
    that it was made for, or others in their place.
    """

    def load(self, gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, call: Call) -> None:
        """Load what `launch` would run, and write nothing."""

    def launch(self, gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, call: Call) -> None:
        """Write the product of all chunks to `out`, on the current stream."""
