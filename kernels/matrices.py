"""Matrices as TMA sees them: a base address, a row length, and the block that one copy moves.

A descriptor depends on numbers alone: one that is kept holds no tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TMA_BYTES = 16  # what addresses and the distance of rows are multiples of
LINE_BYTES = 128  # of the caches: rows that begin at multiples of it are loaded fastest
ELEMENTS = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}
DESCRIPTORS_KEPT = 8192  # of one argument of a launch, 128 bytes each: one for each layer


class Matrix(NamedTuple):
    """Rows that TMA can address: `rows` of `columns` elements, `pitch` elements apart."""

    address: int
    rows: int
    columns: int
    pitch: int
    dtype: torch.dtype
    transposed: bool  # whether the rows are the columns of the tensor

    def data_ptr(self) -> int:
        """Return the address, which is all that Triton wants to know of a descriptor's base."""
        return self.address

    def is_addressable(self) -> bool:
        """Return whether TMA takes the address and the distance of rows."""
        quantum = TMA_BYTES // self.dtype.itemsize
        return self.address % TMA_BYTES == 0 and self.pitch >= self.columns and self.pitch % quantum == 0

    def alignment(self) -> int:
        """Return the most bytes, a power of two up to LINE_BYTES, of which every row begins at a multiple."""
        steps = self.address if self.rows == 1 else self.address | self.pitch * self.dtype.itemsize
        return min(steps & -steps, LINE_BYTES)


class Block(NamedTuple):
    """The block that one TMA operation moves."""

    rows: int
    columns: int


def matrix_of_rows(rows: torch.Tensor, *, transposed: bool = False) -> Matrix:
    """Return a tensor's rows, known to be as TMA wants them; `transposed` if they are another's columns."""
    number, length = rows.shape
    return Matrix(rows.data_ptr(), number, length, rows.stride(0), rows.dtype, transposed)


def as_matrix(tensor: torch.Tensor) -> Matrix | None:
    """Return the tensor's rows, or else its columns, as TMA can address them; None if it can do neither."""
    for transposed in (False, True):
        view = tensor.mT if transposed else tensor
        rows, columns = view.shape
        row_stride, column_stride = view.stride()
        if rows == 1:  # there is no second row to which the stride could lead
            quantum = TMA_BYTES // tensor.element_size()
            row_stride = -(-columns // quantum) * quantum
        matrix = Matrix(tensor.data_ptr(), rows, columns, row_stride, tensor.dtype, transposed)
        if (column_stride == 1 or columns == 1) and matrix.is_addressable():
            return matrix
    return None


def describe(matrix: Matrix, block: Block) -> TensorDescriptor:
    """Return a new descriptor."""
    return TensorDescriptor(
        matrix,
        [matrix.rows, matrix.columns],
        [matrix.pitch, 1],
        list(block),
        _layout(block, matrix.dtype),
    )


def describe_at(matrices: Sequence[Matrix], addresses: Sequence[int]) -> list[TensorDescriptor]:
    """Return descriptors of matrices that lie so, there; a config's `pre_hook` sets their blocks."""
    placed = zip(matrices, addresses, strict=True)
    return [describe(matrix._replace(address=address), Block(8, 64)) for matrix, address in placed]


def set_matrix(descriptor: TensorDescriptor, matrix: Matrix) -> None:
    """Have a descriptor of `describe` describe another matrix, with the block that it has."""
    descriptor.base, descriptor.shape = matrix, [matrix.rows, matrix.columns]
    descriptor.strides = [matrix.pitch, 1]


def set_block(descriptor: TensorDescriptor, block: Block) -> None:
    """Give a descriptor of `describe` another block: what a config's `pre_hook` does."""
    descriptor.block_shape = list(block)
    descriptor.layout = _layout(block, descriptor.base.dtype)


@functools.lru_cache(maxsize=DESCRIPTORS_KEPT)
def _layout(block: Block, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), ELEMENTS[dtype])
