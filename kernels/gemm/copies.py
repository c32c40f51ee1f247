"""Copies matrices of a product that TMA cannot address to scratch memory on Hopper, where this pays.

The rows of a copy begin at multiples of cache lines:

    source   |aaaaaaa|bbbbbbb|ccccccc|           rows one behind the other, or any strides
    scratch  |aaaaaaa.|bbbbbbb.|ccccccc.|        `.`: never written and never read

A copy costs a kernel of torch's, and the time to read and write the matrix; it saves the slower body in plain
Triton. Rejected, with figures in docs/tried.md: copies of what TMA can address, whose rows begin between
cache lines, and a kernel of our own.

The constants are of one H200 (docs/benchmarks/persistent_gemm_copies_1xH200_2026-11-20.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton

from ..epilogues import result_columns
from ..matrices import LINE_BYTES, Matrix, matrix_of_rows
from .configs import GLUON_CANDIDATES, in_words
from .pruning import MEMORY_BYTES_PER_CLOCK, GemmShape, estimated_clocks, prune

CLOCKS_PER_US = 1980  # of an H200's SMs
COPY_BYTES_PER_CLOCK = 1000  # about 2 TB/s, read and written bytes together
KERNEL_CLOCKS = 2.5 * CLOCKS_PER_US  # of each kernel
# About 130 TFLOP/s: 127 for 4001 x 2003 x 999 (126 us, one H200, 2026-11-20).
PLAIN_FLOP_PER_CLOCK = 65_700
# From which on copies are made: they take memory, and large products take up to 13 % longer than estimated.
LEAST_GAIN = 0.1


def pitch_of(columns: int, itemsize: int) -> int:
    """Return how many elements apart the rows of scratch memory begin."""
    return triton.cdiv(columns * itemsize, LINE_BYTES) * LINE_BYTES // itemsize


def runs_along_columns(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's columns are contiguous, and not its rows."""
    return tensor.stride(0) == 1 and (tensor.stride(1) != 1 or tensor.shape[1] == 1)


def room_for(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return scratch memory for the current stream's next kernels; its rows begin at multiples of LINE_BYTES.

    The allocator gives it to no other stream before they have run; in a capture it is the graph's.
    """
    pitch = pitch_of(columns, dtype.itemsize)
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


@dataclass(frozen=True)
class Copies:
    """Which matrices pass through scratch memory."""

    a: bool = False
    b: bool = False
    out: bool = False


NOTHING = Copies()


def copied(shape: GemmShape, copies: Copies) -> GemmShape:
    """Return the shape of the product of the copies."""
    return replace(
        shape,
        a_alignment=LINE_BYTES if copies.a else shape.a_alignment,
        b_alignment=LINE_BYTES if copies.b else shape.b_alignment,
    )


def what_to_copy(shape: GemmShape, *, out: bool) -> Copies | None:
    """Return the copies of what TMA cannot address; None where the plain body is estimated as fast.

    The shape's alignments are those of the caller's operands, 0 where TMA cannot address one. out: TMA cannot
    write the caller's result, only scratch memory.
    """
    copies = Copies(shape.a_alignment == 0, shape.b_alignment == 0, out)
    pays = estimated_total(shape, copies) <= (1 - LEAST_GAIN) * plain_clocks(shape)
    return copies if pays else None


def estimated_total(shape: GemmShape, copies: Copies) -> float:
    """Return about how many clocks the call takes with these copies; inf if no config fits the GPU."""
    args = {**copied(shape, copies).sizes(), **shape.constants()}
    configs, words = prune(GLUON_CANDIDATES, args), in_words(args)
    clocks = [estimated_clocks(config.kwargs, words) for config in configs]
    return KERNEL_CLOCKS + min(clocks, default=math.inf) + copy_clocks(shape, copies)


def copy_clocks(shape: GemmShape, copies: Copies) -> float:
    """Return about how many clocks the copies take."""
    m, n, k, itemsize = shape.m, shape.n, shape.k, shape.dtype.itemsize
    columns = result_columns(shape.epilogue.activation, n)
    matrices = (
        (copies.a, *((k, m) if shape.trans_a else (m, k)), itemsize),
        (copies.b, *((n, k) if shape.trans_b else (k, n)), itemsize),
        (copies.out, m, columns, shape.out_dtype.itemsize),
    )
    moved = [
        rows * (row + pitch_of(row, size)) * size for is_copied, rows, row, size in matrices if is_copied
    ]
    return len(moved) * KERNEL_CLOCKS + sum(moved) / COPY_BYTES_PER_CLOCK


def plain_clocks(shape: GemmShape) -> float:
    """Return about how many clocks the plain body takes; small and narrow products take longer."""
    m, n, k = shape.m, shape.n, shape.k
    moved_bytes = shape.dtype.itemsize * (m + n) * k + shape.out_dtype.itemsize * m * n
    work = max(2 * m * n * k / PLAIN_FLOP_PER_CLOCK, moved_bytes / MEMORY_BYTES_PER_CLOCK)
    return KERNEL_CLOCKS + work
