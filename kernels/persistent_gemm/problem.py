"""The tiles of a plain product, for the roles of `roles`.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..compat import aggregate
from ..tiles import scheduled_tile
from .widths import column_of

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
    """The tiles of A @ B; or of the products of each of several parts of K, one below the other in C."""

    tiles_m: gl.tensor
    tiles_n: gl.tensor
    tiles: gl.tensor  # of all splits
    last_row: gl.tensor  # behind which no tile begins
    last_col: gl.tensor
    wide: gl.tensor  # so many columns of tiles, the first ones, have EXTRA_N columns more
    k: gl.tensor
    splits: gl.tensor
    k_blocks: gl.tensor  # of a split
    split_rows: gl.tensor  # from one split's rows of C to the next one's
    SCHEDULE: gl.constexpr
    GROUP_M: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    EXTRA_N: gl.constexpr
    BLOCK_K: gl.constexpr
    NUM_BUFFERS: gl.constexpr
    STAGGER: gl.constexpr  # whether neighbours begin at different k blocks
    SPREAD: gl.constexpr  # whether there are tiles without their EXTRA_N columns

    @gluon.jit
    def place(self, number):
        """Return the tile's first row of A and of C, column and k block; without such a tile, the last one's.

        A tile that would reach beyond the last row or column is moved back by so much, if TMA can begin
        there: loads from beyond are slow, see `operands`. What it shares with the tile before is computed and
        stored twice, to the same values, as long as both add up the k blocks in the same order: tiles of
        STAGGER and of stream-K stay.

        STAGGER: rows that are a power of two apart lie in few of the memory's channels and of L2's slices, as
        far as one k block goes. Neighbours that are at different k blocks use more of them.
        """
        split, pid_m, pid_n = self.find(number)
        row = min(pid_m * self.BLOCK_M, self.last_row)
        col = min(column_of(pid_n, self.wide, self.BLOCK_N, self.EXTRA_N), self.last_col)
        first_k = split * self.k_blocks
        if self.STAGGER:
            first_k += (pid_m + pid_n) % max(self.k_blocks, 1)  # without any there is no tile
        return row, row + split * self.split_rows, col, first_k

    @gluon.jit
    def find(self, number):
        """Return the tile's part of K, row and column among the tiles; without such a tile, the last one's.

        Behind the last group the arithmetic would divide by a group of no rows.
        """
        number = min(number, self.tiles - 1)
        each = self.tiles_m * self.tiles_n
        split = number // each
        pid_m, pid_n = scheduled_tile(
            number - split * each, self.tiles_m, self.tiles_n, self.SCHEDULE, self.GROUP_M
        )
        return split, pid_m, pid_n

    @gluon.jit
    def is_wide(self, number):
        """Return whether the tile has its EXTRA_N columns."""
        _split, _pid_m, pid_n = self.find(number)
        return pid_n < self.wide

    @gluon.jit
    def k_block(self, first_k, k):
        """Return the number of the tile's k-th k block; `first_k` is what `place` says."""
        if self.STAGGER:
            k_block = first_k // self.k_blocks * self.k_blocks + (first_k + k) % self.k_blocks
        else:
            k_block = first_k + k
        return k_block

    @gluon.jit
    def end_steps(self):
        """Return how many times INSTRUCTION_K elements of K the last k block has, the same for all tiles.

        All that fit a k block, where tiles come to the end of K at other times, or some do not come to it.
        """
        STEPS: gl.constexpr = self.BLOCK_K // INSTRUCTION_K
        if self.STAGGER:
            steps = gl.to_tensor(STEPS)
        else:
            steps = gl.cdiv(self.k - (self.k_blocks - 1) * self.BLOCK_K, INSTRUCTION_K)
            steps = gl.where(self.splits == 1, steps, STEPS)
        return steps

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
    def store(self, number, epilogue, accumulator, row, col, step, STORER: gl.constexpr, WIDE: gl.constexpr):
        """The accumulator is the tile."""
        epilogue.store(accumulator, row, col, step, STORER, WIDE)

    @gluon.jit
    def stored(self, number):
        """Nobody waits for that."""
