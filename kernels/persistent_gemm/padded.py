"""Copies of matrices in scratch memory whose rows begin at multiples of cache lines, and back.

    source   |aaaaaaa|bbbbbbb|ccccccc|           rows one behind the other, or any strides
    scratch  |aaaaaaa.|bbbbbbb.|ccccccc.|        `.`: never written and never read

As many elements are moved at a time as addresses, rows and their lengths are multiples of, up to 16 bytes.
What is copied once is launched without Triton's dispatch the next time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import triton
import triton.language as tl

from ..matrices import LINE_BYTES, Matrix, matrix_of_rows
from ..prepared_launch import PreparedLaunch

WIDEST_BYTES = 16  # that a thread loads at a time
WARPS = 4
# Of a program: 32 elements of a thread, and 16 where each has a register and an address of its own.
BLOCK_ELEMENTS, NARROW_BLOCK_ELEMENTS = 4096, 2048
WIDEST_BLOCK = 256  # a block is as wide as rows are long, up to that
LAUNCHES_KEPT = 512

_LAUNCHES: OrderedDict[tuple[Any, ...], PreparedLaunch] = OrderedDict()


def pitch_of(columns: int, itemsize: int) -> int:
    """Return how many elements apart the rows of scratch memory begin."""
    return triton.cdiv(columns * itemsize, LINE_BYTES) * LINE_BYTES // itemsize


def runs_along_columns(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's columns are what is contiguous, and not its rows."""
    return tensor.stride(0) == 1 and (tensor.stride(1) != 1 or tensor.shape[1] == 1)


def room_for(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return scratch memory for the current stream's next kernels; its rows begin at multiples of LINE_BYTES.

    The allocator gives it to nobody on another stream before they have run; in a capture it is the graph's.
    """
    pitch = pitch_of(columns, dtype.itemsize)
    return torch.empty_strided((rows, columns), (pitch, 1), dtype=dtype, device=device)


def padded_copy(tensor: torch.Tensor, *, transposed: bool) -> tuple[Matrix, torch.Tensor]:
    """Return a copy as TMA reads it, and its memory, which is to be kept until the kernel is launched.

    Its rows begin at multiples of LINE_BYTES; with `transposed`, they are the tensor's columns.
    """
    source = tensor.mT if transposed else tensor
    rows, columns = source.shape
    room = room_for(rows, columns, source.dtype, source.device)
    copy(source, room)
    return matrix_of_rows(room, transposed=transposed), room


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Write the matrix `source` to `target`, of the same type, on the current stream; any strides.

    Quick where the rows of both are contiguous.
    """
    from_address, to_address = source.data_ptr() % WIDEST_BYTES, target.data_ptr() % WIDEST_BYTES
    strides = (*source.stride(), *target.stride())
    key = (source.device, source.dtype, from_address, to_address, source.shape, strides)
    prepared = _LAUNCHES.get(key)
    if prepared is not None:
        prepared(source, target)
        return
    numbers = _numbers(source, target, from_address | to_address)
    rows, columns, *_, vector, block_rows, block_columns = numbers
    grid = (triton.cdiv(rows, block_rows) * triton.cdiv(columns * vector, block_columns), 1, 1)
    launched = copy_rows[grid](source, target, *numbers, num_warps=WARPS)
    if hasattr(launched, "packed_metadata"):  # compiled for a GPU, not interpreted
        _LAUNCHES[key] = PreparedLaunch(launched, grid, (), numbers)
        if len(_LAUNCHES) > LAUNCHES_KEPT:
            _LAUNCHES.popitem(last=False)


def _numbers(source: torch.Tensor, target: torch.Tensor, addresses: int) -> tuple[int, ...]:
    """Return the arguments of `copy_rows` behind the two matrices."""
    (rows, columns), itemsize = source.shape, source.element_size()
    (from_row, from_column), (to_row, to_column) = source.stride(), target.stride()
    vector = 1
    if from_column == to_column == 1:
        steps = addresses | (columns | from_row | to_row) * itemsize | WIDEST_BYTES
        vector = (steps & -steps) // itemsize
    block_columns = min(triton.next_power_of_2(columns), WIDEST_BLOCK)
    sizes = (rows, columns // vector, from_row // vector, to_row // vector, from_column, to_column)
    elements = BLOCK_ELEMENTS if vector > 1 else NARROW_BLOCK_ELEMENTS
    return (*sizes, vector, elements // block_columns, block_columns)


@triton.jit(do_not_specialize=["rows", "columns", "from_row", "to_row"])
def copy_rows(
    source_ptr,
    target_ptr,
    rows,
    columns,  # this and the distances of rows in VECTOR elements: the compiler then knows what divides them
    from_row,
    to_row,
    from_column,  # elements; a constant where it is 1
    to_column,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    across = tl.cdiv(columns * VECTOR, BLOCK_COLUMNS)
    row = (tl.program_id(0) // across) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tl.program_id(0) % across) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns * VECTOR)[None, :]
    row = tl.cast(row, tl.int64)[:, None]
    column = tl.cast(column, tl.int64)[None, :]
    from_there = source_ptr + row * (tl.cast(from_row, tl.int64) * VECTOR) + column * from_column
    to_there = target_ptr + row * (tl.cast(to_row, tl.int64) * VECTOR) + column * to_column
    tl.store(to_there, tl.load(from_there, mask=inside), mask=inside)
