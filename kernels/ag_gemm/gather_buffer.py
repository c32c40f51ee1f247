"""The gather buffer: room for the rows of all ranks. A row in memory:

    fp16, bf16     | K elements |
    fp8            | K bytes | scale, float32 | unused |       a row begins at a multiple of 128 bytes

One copy moves elements and scales, and one flag announces both. A row in fp8 is at most 128 bytes longer than
its elements: 3 % of 4096 of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl  # noqa: F401  # the interpreter wants to see it in every module with a kernel

from ..epilogues import Epilogue, result_columns
from ..symm.base import SymmetricMemory, SymmetricTensor
from ..tensors import (
    FP8,
    Apart,
    OwnBuffer,
    check_inner_of_fp8,
    check_out,
    check_overlap,
    check_rows,
    check_scales,
    check_tensor,
    room_in,
)
from ..tiles import on_host

SCALE = torch.float32


@triton.jit
def scaled_pitch(K):
    """Return how many bytes apart rows of K elements in fp8 begin: whole lines, with room for a float32."""
    return (K + 4 + 127) // 128 * 128


@dataclass(frozen=True)
class RowFormat:
    """Rows of k elements of that type. Raises ValueError where they cannot have a scale."""

    k: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.is_scaled:
            check_inner_of_fp8(self.k)

    @functools.cached_property
    def is_scaled(self) -> bool:
        """Return whether each row has a scale."""
        return self.dtype == FP8

    @property
    def memory(self) -> tuple[int, torch.dtype]:
        """Return how many elements of which type a row takes in memory: bytes, where it has a scale."""
        return (on_host(scaled_pitch)(self.k), torch.uint8) if self.is_scaled else (self.k, self.dtype)

    @functools.cached_property
    def product_dtype(self) -> torch.dtype:
        """Return the type of products with such rows."""
        return torch.bfloat16 if self.is_scaled else self.dtype

    def rows_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the elements [.., k] of rows in memory, a view."""
        return memory.view(self.dtype)[..., : self.k] if self.is_scaled else memory

    def scales_in(self, memory: torch.Tensor) -> torch.Tensor | None:
        """Return the scales [..] of rows in memory, a view; None where they have none."""
        return memory.view(SCALE)[..., self.k // SCALE.itemsize] if self.is_scaled else None


class GatherBuffer:
    """Symmetric memory [world_size, capacity] of rows: the ranks' chunks."""

    def __init__(self, memory: SymmetricMemory, row: RowFormat, capacity: int) -> None:
        width, of_row = row.memory
        self.symmetric: SymmetricTensor = memory.allocate((memory.world_size, capacity, width), of_row)
        self._is_dense = not row.is_scaled
        self._row, self._rank, self._world_size = row, memory.rank, memory.world_size
        self.a, self.scales = row.rows_in(self.symmetric.local), row.scales_in(self.symmetric.local)
        self.shard = self.a[memory.rank]
        chunk = self.symmetric.local[memory.rank]
        self._begin, self._own = chunk.data_ptr(), OwnBuffer(self.symmetric.local)
        self.layout_of = self._own.layout_of
        self._copy = memory.prepare_copy_here(chunk)
        self._whole = self.symmetric.local.flatten(0, 1)  # a view

    def put(self, a_shard: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Write this rank's rows, if they are not there, and their scales, if they have any; None: ones."""
        rows = a_shard.shape[0]
        if a_shard.data_ptr() != self._begin:
            if self._is_dense and a_shard.is_contiguous():
                self._copy(a_shard)
            else:
                self.shard[:rows].copy_(a_shard.detach())
        if self.scales is not None:
            own = self.scales[self._rank, :rows]
            own.fill_(1) if scale is None else own.copy_(scale.detach().reshape(-1))

    def lies_apart(self, a_shard: torch.Tensor) -> bool:
        """Return whether a collective can read the shard in place: dense, unscaled, not in this buffer."""
        return self._is_dense and a_shard.is_contiguous() and not self._own.holds(a_shard)

    def chunks(self, rows: int) -> torch.Tensor:
        """Return so many rows of each chunk, as a copy unless they are all."""
        return self._whole if rows == self.shard.shape[0] else self.symmetric.local[:, :rows].flatten(0, 1)

    def room(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where a collective gathers so many rows of each rank, and the part that is in place."""
        gather = self.symmetric.local
        return room_in(gather, self._rank, self._world_size, rows), gather[self._rank, :rows]

    def check(
        self,
        a_shard: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None,
        epilogue: Epilogue,
    ) -> None:
        """Raise TypeError or ValueError unless these are operands of a call with such rows."""
        row, device, capacity = self._row, self.shard.device, self.shard.shape[0]
        check_tensor("a_shard", a_shard, row.dtype, device)
        check_tensor("weight", weight, row.dtype, device, may_lie_by_columns=not row.is_scaled)
        rows, columns = a_shard.shape[0], weight.shape[0]
        check_rows("a_shard", rows, "m_per_rank", capacity)
        if a_shard.shape[1] != row.k or weight.shape[1] != row.k:
            given = f"a_shard {list(a_shard.shape)} and weight {list(weight.shape)}"
            raise ValueError(f"{given} must both have K={row.k} columns; the weight is [N, K], not [K, N]")
        if columns == 0:
            raise ValueError("weight has no rows; there is nothing to compute")
        epilogue.check(columns, device)
        shape = [self._world_size * rows, result_columns(epilogue.activation, columns)]
        check_out(out, shape, row.product_dtype, device)
        self._own.check_beside("out", out, "op.gathered", "peers write")
        check_overlap("a_shard", a_shard, self.symmetric.local[self._rank], "m")
        check_scales(row.dtype, device, (epilogue.scale_a, rows), (epilogue.scale_b, columns))

    def check_gathered(self, gathered: torch.Tensor, **operands: torch.Tensor | None) -> None:
        """Raise TypeError or ValueError unless all ranks' rows can be written there, beside the operands."""
        if not self._is_dense:
            raise TypeError(f"rows in {self._row.dtype} have scales: read op.gathered, and pass no tensor")
        check_tensor("gathered", gathered, self._row.dtype, self.shard.device)
        a_shard = operands["a_shard"]
        assert a_shard is not None
        shape = [self._world_size * a_shard.shape[0], self._row.k]
        if list(gathered.shape) != shape or not gathered.is_contiguous():
            given = f"gathered has shape {list(gathered.shape)} and strides {gathered.stride()}"
            raise ValueError(f"{given}; contiguous {shape} is needed")
        self._own.check_beside("gathered", gathered, "op.gathered", "peers write")
        Apart(gathered, **operands).check(gathered, *operands.values(), what="gathered")
