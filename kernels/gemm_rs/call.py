"""What a call of `GemmReduceScatter` hands to its body, and what is cached for tensors that lie alike."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dist_autotune.for_operations import CachedChoice

from ..gemm.launch import ChunkBody
from ..launches.prepared import PlainLaunch
from ..tensors import Apart


class ScatterMemory(NamedTuple):
    """The tensors of an operation that no call changes."""

    table: torch.Tensor  # int64 [2 * world_size]: where `staged` and `flags` of each rank lie
    partial: torch.Tensor  # [max(1, world_size - 1), capacity, N]: sums on their way to the peers
    staged: torch.Tensor  # of the same shape: the peers' sums for this rank
    flags: torch.Tensor
    counts: torch.Tensor
    errors: torch.Tensor


class ScatterOperands(NamedTuple):
    """The caller's tensors: out [M / W, N] gets this rank's rows of sum(a @ weight.T + addend).

    In fp8 there may be scales of the rows of a and of the weight, and there is no addend.
    """

    a: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    addend: torch.Tensor | None
    scale_a: torch.Tensor | None = None
    scale_weight: torch.Tensor | None = None


# It multiplies, hands over chunks and adds the peers' sums.
Body = ChunkBody[ScatterOperands]


class ScatterLayout(NamedTuple):
    """Cached for calls whose tensors lie alike; no tensor of theirs is kept."""

    all_rows: int
    size_class: int
    rows: tuple[int, ...]  # of each rank
    shape: tuple[int, int]  # of the result
    body: Body
    storing: dict[str, Body]  # by `operation.STORES`: that store to the peers, if calls may take them
    launches: CachedChoice[str]  # of a call, see `operation.LAUNCHES`
    apart: Apart  # of the result and all operands
    fill_nan: PlainLaunch  # of the result
