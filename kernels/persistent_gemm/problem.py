"""The tiles of a plain product, for the roles of `roles`.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..compat import aggregate
from ..tiles import scheduled_tile

# Elements of 2 bytes. A TMA store that begins elsewhere in a row is an illegal instruction on an H200.
ALIGNED = gl.constexpr(8)
INSTRUCTION_K = gl.constexpr(16)


@gluon.jit
def last_start(size, block, INSIDE_ROWS: gl.constexpr):
    """Return where the last tile begins: where it ends with the matrix, if TMA can begin there.

    INSIDE_ROWS: tiles begin inside rows of memory. `size`, behind all tiles, says that none is moved.
    """
    last = max(size - block, 0)
    if INSIDE_ROWS:
        last = gl.where(size % ALIGNED == 0, last, size)
    return last


@aggregate
class Problem:
    """The tiles of A @ B."""

    tiles_m: gl.tensor
    tiles_n: gl.tensor
    tiles: gl.tensor
    last_row: gl.tensor  # behind which no tile begins
    last_col: gl.tensor
    k: gl.tensor
    k_blocks: gl.tensor
    SCHEDULE: gl.constexpr
    GROUP_M: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    EXTRA_N: gl.constexpr
    BLOCK_K: gl.constexpr
    NUM_BUFFERS: gl.constexpr

    @gluon.jit
    def place(self, number):
        """Return the tile's first row of A and of C, column and k block; without such a tile, the last one's.

        A tile that would reach beyond the last row or column is moved back by so much, if TMA can begin
        there: loads from beyond are slow, see `operands`. What it shares with the tile before is computed and
        stored twice, to the same values, as both add up the k blocks in the same order: tiles of stream-K
        stay. Behind the last group of tiles the arithmetic would divide by a group of no rows.
        """
        number = min(number, self.tiles - 1)
        pid_m, pid_n = scheduled_tile(number, self.tiles_m, self.tiles_n, self.SCHEDULE, self.GROUP_M)
        row = min(pid_m * self.BLOCK_M, self.last_row)
        col = min(pid_n * (self.BLOCK_N + self.EXTRA_N), self.last_col)
        return row, row, col, 0

    @gluon.jit
    def end_steps(self):
        """Return how many times INSTRUCTION_K elements of K the last k block of a tile has."""
        return gl.cdiv(self.k - (self.k_blocks - 1) * self.BLOCK_K, INSTRUCTION_K)

    @gluon.jit
    def blocks_of(self, number):
        """Every tile has as many k blocks."""
        return self.k_blocks

    @gluon.jit
    def first_blocks(self):
        return self.k_blocks

    @gluon.jit
    def blocks_behind(self, number):
        return self.k_blocks

    @gluon.jit
    def await_rows(self, number, known):
        """All of A is there."""
        return known

    @gluon.jit
    def loaded(self):
        """Nobody waits for that."""

    @gluon.jit
    def store(self, number, epilogue, accumulator, row, col, step, STORER: gl.constexpr):
        """The accumulator is the tile."""
        epilogue.store(accumulator, row, col, step, STORER)

    @gluon.jit
    def stored(self, number):
        """Nobody waits for that."""
