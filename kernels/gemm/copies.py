"""Copies matrices of a product that TMA cannot address to scratch memory on Hopper, where this pays.

The rows of a copy begin at multiples of cache lines:

    source   |aaaaaaa|bbbbbbb|ccccccc|           rows one behind the other, or any strides
    scratch  |aaaaaaa.|bbbbbbb.|ccccccc.|        `.`: never written and never read

A copy costs a kernel of torch's, and the time to read and write the matrix; it saves the slower body in plain
Triton. Rejected, with figures in docs/tried.md: copies of what TMA can address, whose rows begin between
cache lines, a kernel of our own, and an estimate of either way's time.
"""

from __future__ import annotations

import torch
import triton

from ..matrices import LINE_BYTES, Matrix, matrix_of_rows

# Of products that are worth their copies: the plain body takes about 30 us for so many operations, at the 127
# TFLOP/s of 4001 x 2003 x 999 on an H200 (2026-11-20); three copies and their kernels about 15.
LEAST_FLOP, LEAST_SIDE = 4e9, 128


def runs_along_columns(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's columns are contiguous, and not its rows."""
    return tensor.stride(0) == 1 and (tensor.stride(1) != 1 or tensor.shape[1] == 1)


def room_for(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return scratch memory for the current stream's next kernels; its rows begin at multiples of LINE_BYTES.

    The allocator gives it to no other stream before they have run; in a capture it is the graph's.
    """
    pitch = triton.cdiv(columns * dtype.itemsize, LINE_BYTES) * LINE_BYTES // dtype.itemsize
    return torch.empty_strided((rows, columns), (pitch, 1), dtype=dtype, device=device)


def padded_copy(tensor: torch.Tensor, *, transposed: bool) -> tuple[Matrix, torch.Tensor]:
    """Return a copy as TMA reads it, and its memory; keep that until the kernel is launched.

    Its rows begin at multiples of LINE_BYTES; with `transposed`, they are the tensor's columns.
    """
    source = tensor.mT if transposed else tensor
    rows, columns = source.shape
    room = room_for(rows, columns, source.dtype, source.device)
    room.copy_(source.detach())
    return matrix_of_rows(room, transposed=transposed), room


def copies_pay(m: int, n: int, k: int) -> bool:
    """Return whether a product is worth copies of what TMA cannot address; else the plain body has it."""
    return 2 * m * n * k >= LEAST_FLOP and min(m, n, k) >= LEAST_SIDE
