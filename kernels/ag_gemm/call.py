"""What a call of `AllGatherGemm` hands to its consumer, and what is cached for tensors that lie alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from dist_autotune.for_operations import Standing

from ..epilogues import ONLY_SUMS, Epilogue
from ..exchange.fill_nan import NanFiller
from ..tensors import Apart
from .choices import CallOptions, Choice


class GatherCall(NamedTuple):
    """One call on one rank, as all consumers launch it. Made in many calls: no dataclass."""

    rows: int  # of each rank's chunk
    rank: int
    world_size: int
    capacity: int  # rows for which the gather buffer has room in each chunk
    patience_ticks: int  # how long the GEMM waits for a peer
    programs: int  # the most that run at once
    flags: torch.Tensor  # int32
    errors: torch.Tensor  # int64 [world_size], which the host reads without waiting
    epilogue: Epilogue = ONLY_SUMS


class Consumer(Protocol):
    """Multiplies gather [world_size, capacity, K] with weight [N, K] into out [world_size * rows, N].

    The call's epilogue takes the float32 sums before they are rounded. A consumer is made for tensors that
    lie alike, and keeps no address of theirs.
    """

    def load(self, gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, call: GatherCall) -> None:
        """Load the kernels that `launch` would run, and write nothing."""

    def launch(self, gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, call: GatherCall) -> None:
        """Write the product of all chunks, behind its epilogue, to `out`, on the current stream."""


@dataclass(frozen=True, eq=False)
class GatherLayout:
    """Cached for calls with tensors that lie alike and epilogues of one kind; no tensor is kept."""

    rows: int  # of each rank
    size_class: int  # of the rows of all ranks
    shape: tuple[int, int]  # of the result
    options: CallOptions
    choose: Standing[Choice]  # one of the options
    fill_nan: NanFiller  # of the result; the last kernel of a call
    apart: Apart | None = None  # of a result that was given and all operands
    loaded: set[str] = field(default_factory=set)  # consumers with loaded kernels
    consumers: dict[str, Consumer] = field(default_factory=dict)  # those that have been chosen
    calls: dict[Choice, GatherCall] = field(default_factory=dict)  # without an epilogue
    mail: Callable[[int], None] | None = None  # enqueues the gather by mail, where calls may take that way


class Product(NamedTuple):
    """The operands, result and epilogue of a call. Made in each call: no dataclass."""

    a_shard: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    epilogue: Epilogue
    layout: GatherLayout  # of these tensors
