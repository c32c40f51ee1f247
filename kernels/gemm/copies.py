"""Copies matrices of a product that TMA cannot address to scratch memory on Hopper, where this pays.

The rows of a copy begin at multiples of cache lines:

    source   |aaaaaaa|bbbbbbb|ccccccc|           rows one behind the other, or any strides
    scratch  |aaaaaaa.|bbbbbbb.|ccccccc.|        `.`: never written and never read

A copy costs a kernel, and the time to read and write the matrix; it saves the slower body in plain Triton.
Rejected, with figures in docs/tried.md: copies of what TMA can address, whose rows begin between cache lines,
an estimate of either way's time, and torch's own copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launches.prepared import PlainLaunch, PlainLaunches
from ..matrices import LINE_BYTES

# Of products that are worth their copies: the plain body takes about 30 us for so many operations, at the 127
# TFLOP/s of 4001 x 2003 x 999 on an H200 (2026-11-20); three copies and their kernels about 15.
LEAST_FLOP, LEAST_SIDE = 4e9, 128

WIDEST_BYTES = 16  # that a thread loads at a time
# Of a program: 32 elements of a thread, and 16 where each has a register and an address of its own.
BLOCK_ELEMENTS, NARROW_BLOCK_ELEMENTS = 4096, 2048
WIDEST_BLOCK = 256  # a block is as wide as rows are long, up to that


def runs_along_columns(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's columns are contiguous, and not its rows."""
    return tensor.stride(0) == 1 and (tensor.stride(1) != 1 or tensor.shape[1] == 1)


def room_for(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return scratch memory for the current stream's next kernels; its rows begin at multiples of LINE_BYTES.

    The allocator gives it to no other stream before they have run; in a capture it is the graph's.
    """
    pitch = triton.cdiv(columns * dtype.itemsize, LINE_BYTES) * LINE_BYTES // dtype.itemsize
    return torch.empty_strided((rows, columns), (pitch, 1), dtype=dtype, device=device)


def copies_pay(m: int, n: int, k: int) -> bool:
    """Return whether a product is worth copies of what TMA cannot address; else the plain body has it."""
    return 2 * m * n * k >= LEAST_FLOP and min(m, n, k) >= LEAST_SIDE


def copy_of(source: torch.Tensor, target: torch.Tensor) -> PlainLaunch:
    """Return the launch that copies a matrix to another, for all of these layouts: one type, any strides.

    A thread moves the largest power of two, up to 16 bytes, that divides addresses, pitches and row lengths.
    """
    (rows, columns), itemsize = source.shape, source.element_size()
    (from_row, from_column), (to_row, to_column) = source.stride(), target.stride()
    vector = 1
    if from_column == to_column == 1:
        addresses, steps = source.data_ptr() | target.data_ptr(), (columns | from_row | to_row) * itemsize
        common = addresses | steps | WIDEST_BYTES
        vector = (common & -common) // itemsize
    block_columns = min(triton.next_power_of_2(columns), WIDEST_BLOCK)
    block_rows = (BLOCK_ELEMENTS if vector > 1 else NARROW_BLOCK_ELEMENTS) // block_columns
    programs = triton.cdiv(rows, block_rows) * triton.cdiv(columns, block_columns)
    numbers = (rows, columns // vector, from_row // vector, to_row // vector, from_column, to_column)
    constants = {"VECTOR": vector, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
    is_aligned = [each.data_ptr() % WIDEST_BYTES == 0 for each in (source, target)]
    kind = (source.device, source.dtype, *is_aligned, *numbers, *constants.values())
    return PlainLaunch(_COPY, kind, programs, numbers, constants)


@triton.jit(do_not_specialize=["rows", "columns", "from_row", "to_row"])
def copy_rows(
    source_ptr,
    target_ptr,
    rows,
    columns,  # this and the pitches in units of VECTOR elements: so the compiler knows their divisors
    from_row,
    to_row,
    from_column,  # elements; a constant where it is 1
    to_column,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Copy a block of a matrix: as many programs as it has blocks."""
    across = tl.cdiv(columns * VECTOR, BLOCK_COLUMNS)
    row = (tl.program_id(0) // across) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tl.program_id(0) % across) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns * VECTOR)[None, :]
    row = tl.cast(row, tl.int64)[:, None]
    column = tl.cast(column, tl.int64)[None, :]
    from_there = source_ptr + row * (tl.cast(from_row, tl.int64) * VECTOR) + column * from_column
    to_there = target_ptr + row * (tl.cast(to_row, tl.int64) * VECTOR) + column * to_column
    tl.store(to_there, tl.load(from_there, mask=inside), mask=inside)


_COPY = PlainLaunches(copy_rows, num_warps=4)
