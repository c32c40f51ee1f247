"""The kernel of `persistent_matmul` for Hopper and Blackwell: a plain product, for the roles of `roles`.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..compat import aggregate
from ..tiles import scheduled_tile
from .roles import run


@aggregate
class Problem:
    """The tiles of A @ B; or of the products of each of several parts of K, one below the other in C."""

    tiles_m: gl.tensor
    tiles_n: gl.tensor
    tiles: gl.tensor  # of all splits
    k_blocks: gl.tensor  # of a split
    split_rows: gl.tensor  # from one split's rows of C to the next one's
    SCHEDULE: gl.constexpr
    GROUP_M: gl.constexpr
    BLOCK_M: gl.constexpr
    WIDTH: gl.constexpr
    NUM_BUFFERS: gl.constexpr

    @gluon.jit
    def place(self, number):
        """Return the tile's first row of A and of C, column and k block; without such a tile, the last one's.

        Behind the last group the arithmetic would divide by a group of no rows.
        """
        number = min(number, self.tiles - 1)
        each = self.tiles_m * self.tiles_n
        split = number // each
        pid_m, pid_n = scheduled_tile(
            number - split * each, self.tiles_m, self.tiles_n, self.SCHEDULE, self.GROUP_M
        )
        row = pid_m * self.BLOCK_M
        return row, row + split * self.split_rows, pid_n * self.WIDTH, split * self.k_blocks

    @gluon.jit
    def await_rows(self, number, known):
        """All of A is there."""
        return known

    @gluon.jit
    def loaded(self):
        """Nobody waits for that."""

    @gluon.jit
    def stored(self, number):
        """Nobody waits for that."""


# Sizes only count tiles: one binary serves all shapes.
@gluon.jit(do_not_specialize=["M", "N", "K", "splits", "split_rows", "wanted"])
def gemm(
    a_desc,
    b_desc,
    extra_desc,
    c_desc,
    counter_ptr,  # int32 [2], zeros: for the dynamic schedule
    M,
    N,
    K,
    splits,  # into how many parts K is cut: C then holds as many partial products, one below the other
    split_rows,
    wanted,  # which configs the tuner may try; no constexpr, as the code is the same
    TRANS_A: gl.constexpr,
    TRANS_B: gl.constexpr,
    TENSOR_MEMORY: gl.constexpr,  # Blackwell
    SCHEDULE: gl.constexpr,
    OUT: gl.constexpr,  # the type of C, for the key of the tuning
    DTYPE: gl.constexpr,  # that of A and B
    VARIANT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    EXTRA_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    STORE_N: gl.constexpr,
    STORE_BUFFERS: gl.constexpr,  # 0: the epilogue steals operand buffers
    GROUP_M: gl.constexpr,
):
    """Write C = A @ B; or, of each of `splits` parts of K, the product, `split_rows` rows apart."""
    WIDTH: gl.constexpr = BLOCK_N + EXTRA_N
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, WIDTH)
    # As many for each split: the last one's may lie beyond K, where TMA reads zeros.
    k_blocks = gl.cdiv(gl.cdiv(K, BLOCK_K), splits)
    tiles = tiles_m * tiles_n * splits * min(k_blocks, 1)
    problem = Problem(
        tiles_m, tiles_n, tiles, k_blocks, split_rows, SCHEDULE, GROUP_M, BLOCK_M, WIDTH, NUM_BUFFERS
    )
    run(
        problem,
        a_desc,
        b_desc,
        extra_desc,
        c_desc,
        counter_ptr,
        TRANS_A,
        TRANS_B,
        TENSOR_MEMORY,
        SCHEDULE,
        VARIANT,
        BLOCK_M,
        BLOCK_N,
        EXTRA_N,
        BLOCK_K,
        NUM_BUFFERS,
        STORE_N,
        STORE_BUFFERS,
    )
