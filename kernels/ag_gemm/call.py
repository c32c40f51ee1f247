"""What a call of `AllGatherGemm` hands to its consumer, and what is cached for tensors that lie alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dist_autotune.for_operations import CachedChoice

from ..epilogues import Epilogue
from ..gemm.launch import ChunkBody
from ..launches.prepared import PlainLaunch
from ..tensors import Apart
from .choices import Choice


class GatherMemory(NamedTuple):
    """What no call of an operation changes."""

    table: torch.Tensor  # int64 [2 * world_size]: where `gather` and `flags` of each rank lie
    counts: torch.Tensor  # int32 [world_size + 2], zeros
    gather: torch.Tensor  # [world_size, capacity, K]
    flags: torch.Tensor  # int32
    errors: torch.Tensor  # int64 [world_size], which the host reads without waiting
    rank: int
    world_size: int


class Product(NamedTuple):
    """The operands, result and epilogue of a call. Made in each call: no dataclass."""

    a_shard: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    epilogue: Epilogue
    layout: GatherLayout  # of these tensors
    gathered: torch.Tensor | None = None  # where the caller wants all ranks' rows


# It multiplies the gathered rows with weight [N, K] into out [world_size * rows, N]; the epilogue takes the
# float32 sums before they are rounded.
Consumer = ChunkBody[Product]


@dataclass(frozen=True, eq=False)
class GatherLayout:
    """Cached for calls with tensors that lie alike and epilogues of one kind; no tensor is kept."""

    rows: int  # of each rank
    size_class: int  # of the rows of all ranks
    shape: tuple[int, int]  # of the result
    choose: CachedChoice[Choice]
    fill_nan: PlainLaunch  # of the result; the last kernel of a call
    apart: Apart | None = None  # of a result that was given and all operands
    consumers: dict[str, Consumer] = field(default_factory=dict)  # those that have been chosen; loaded
    mail: Callable[[int], None] | None = None  # enqueues the gather by mail, where calls may take that way
