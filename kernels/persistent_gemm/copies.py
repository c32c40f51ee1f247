"""Which matrices of a product on Hopper pass through scratch memory (`padded`), where the estimate says so.

A copy costs what reading and writing it takes, and a kernel more. What it saves is in the estimate: loads of
rows that begin between cache lines take up to 2.4 times as long. And what TMA cannot address at all is left
to the body in plain Triton, unless copies of it let the tensor cores be fed by TMA.

The constants are of one H200 (docs/benchmarks/persistent_gemm_copies_1xH200_2026-11-20.md).
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

from ..matrices import LINE_BYTES, TMA_BYTES
from .candidates import GLUON_CANDIDATES
from .estimate import MEMORY_BYTES_PER_CLOCK, estimated_clocks
from .launch import Shape
from .padded import pitch_of
from .pruning import prune

CLOCKS_PER_US = 1980  # of an H200's SMs
# 4 TB/s, read and written bytes together, where 16 bytes are moved at a time; else a little less.
COPY_BYTES_PER_CLOCK, NARROW_COPY_BYTES_PER_CLOCK = 2020, 1600
KERNEL_CLOCKS = 2.5 * CLOCKS_PER_US  # of each kernel
# About 130 TFLOP/s: 127 for 4001 x 2003 x 999 (126 us, one H200, 2026-11-20).
PLAIN_FLOP_PER_CLOCK = 65_700
# That is worth scratch memory and further kernels. And large products take up to 13 % longer than estimated.
LEAST_GAIN = 0.1
CHOICES_KEPT = 1024
OPERAND_BYTES = 2  # of an element


@dataclass(frozen=True)
class Copies:
    """Which matrices pass through scratch memory."""

    a: bool = False
    b: bool = False
    out: bool = False


NOTHING = Copies()


@functools.lru_cache(maxsize=CHOICES_KEPT)
def plan(shape: Shape, *, out: bool) -> tuple[Copies, Shape] | None:
    """Return what to copy and the shape of the product of the copies; None if the plain body is to run.

    The shape's alignments are those of the operands as they are, 0 where TMA cannot address one; `out` says
    whether it can write the result only to scratch memory.
    """
    copies = what_to_copy(shape, out=out)
    return None if copies is None else (copies, copied(shape, copies))


def copied(shape: Shape, copies: Copies) -> Shape:
    """Return the shape of the product of the copies."""
    return replace(
        shape,
        a_alignment=LINE_BYTES if copies.a else shape.a_alignment,
        b_alignment=LINE_BYTES if copies.b else shape.b_alignment,
    )


def what_to_copy(shape: Shape, *, out: bool) -> Copies | None:
    """Return the copies with which a call should take the least time; None where the plain body should."""
    (_, a_columns), (_, b_columns) = rows_in_memory(shape)
    a_ways, b_ways = _ways(shape.a_alignment, a_columns), _ways(shape.b_alignment, b_columns)
    ways = itertools.product(a_ways, b_ways, (out,))
    clocks = {copies: estimated_total(shape, copies) for copies in itertools.starmap(Copies, ways)}
    best = min(clocks, key=clocks.__getitem__)
    if NOTHING not in clocks:  # there is something that TMA cannot address
        return best if clocks[best] <= (1 - LEAST_GAIN) * plain_clocks(shape) else None
    return best if clocks[best] <= (1 - LEAST_GAIN) * clocks[NOTHING] else NOTHING


def _ways(alignment: int, columns: int) -> tuple[bool, ...]:
    """Return whether to copy an operand: both, where it is to be found out."""
    if alignment == 0:
        return (True,)
    # Of rows shorter than a line few cross one, and the estimate knows nothing of that.
    return (False,) if alignment == LINE_BYTES or columns * OPERAND_BYTES < LINE_BYTES else (False, True)


def rows_in_memory(shape: Shape) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how many rows A and B have in memory, and of how many elements."""
    m, n, k = shape.m, shape.n, shape.k
    return ((k, m) if shape.trans_a else (m, k)), ((n, k) if shape.trans_b else (k, n))


def estimated_total(shape: Shape, copies: Copies) -> float:
    """Return about how many clocks the call takes with these copies; inf if no config fits the GPU."""
    args = {**copied(shape, copies).sizes(), **shape.constants()}
    clocks = [estimated_clocks(config.kwargs, args) for config in prune(GLUON_CANDIDATES, args)]
    return KERNEL_CLOCKS + min(clocks, default=math.inf) + copy_clocks(shape, copies)


def copy_clocks(shape: Shape, copies: Copies) -> float:
    """Return about how many clocks the copies take."""
    (a_rows, a_columns), (b_rows, b_columns) = rows_in_memory(shape)
    clocks = 0.0
    if copies.a:
        clocks += _one_copy(a_rows, a_columns, OPERAND_BYTES, shape.a_alignment)
    if copies.b:
        clocks += _one_copy(b_rows, b_columns, OPERAND_BYTES, shape.b_alignment)
    if copies.out:
        clocks += _one_copy(shape.m, shape.n, shape.out_dtype.itemsize, 0)
    return clocks


def _one_copy(rows: int, columns: int, itemsize: int, alignment: int) -> float:
    moved_bytes = rows * (columns + pitch_of(columns, itemsize)) * itemsize
    is_wide = alignment >= TMA_BYTES and columns * itemsize % TMA_BYTES == 0
    speed = COPY_BYTES_PER_CLOCK if is_wide else NARROW_COPY_BYTES_PER_CLOCK
    return KERNEL_CLOCKS + moved_bytes / speed


def plain_clocks(shape: Shape) -> float:
    """Return about how many clocks the plain body takes; small and narrow products take longer."""
    m, n, k = shape.m, shape.n, shape.k
    moved_bytes = OPERAND_BYTES * (m + n) * k + shape.out_dtype.itemsize * m * n
    work = max(2 * m * n * k / PLAIN_FLOP_PER_CLOCK, moved_bytes / MEMORY_BYTES_PER_CLOCK)
    return KERNEL_CLOCKS + work
