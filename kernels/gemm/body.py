"""The kernel of `persistent_matmul` for Hopper and Blackwell: the roles of `gemm` over the tiles of A @ B.

Each tile is one program's; no program waits for another. Measured and rejected, with figures in
docs/tried.md: the tiles of a last, incomplete wave cut along K among all programs (stream-K), and an epilogue
that borrows slots of the operand ring.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .epilogue import Pointwise
from .operands import Config, item_bytes
from .problem import Problem, last_start
from .roles import run


# Sizes only count tiles: one binary serves all shapes.
@gluon.jit(
    do_not_specialize=[
        *("M", "N", "K", "wanted", "programs"),
        *("a_alignment", "b_alignment", "m_class", "n_class"),
        *("row_scale_ptr", "column_scale_ptr", "row_bias_ptr", "column_bias_ptr"),
    ]
)
def gemm(
    a_desc,
    b_desc,
    extra_desc,
    c_desc,
    row_scale_ptr,  # float32 [M], or None
    column_scale_ptr,  # float32 [N], or None
    row_bias_ptr,  # [M], or None
    column_bias_ptr,  # [N], or None
    M,
    N,
    K,
    wanted,  # which configs the tuner may try; this and the next five are for the tuner alone
    programs,  # the most that run at once
    a_alignment,  # rows in memory begin at multiples of so many bytes
    b_alignment,
    m_class,  # of M and N, see `configs`
    n_class,
    TRANS_A: gl.constexpr,
    TRANS_B: gl.constexpr,
    TENSOR_MEMORY: gl.constexpr,  # Blackwell
    OUT: gl.constexpr,  # the type of C, for the key of the tuning
    DTYPE: gl.constexpr,  # that of A and B
    ACTIVATION: gl.constexpr,  # of `epilogues`
    VARIANT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    EXTRA_N: gl.constexpr,
    BLOCK_K: gl.constexpr,  # in 2 bytes, see `configs`
    NUM_BUFFERS: gl.constexpr,
    STORE_N: gl.constexpr,
    STORE_BUFFERS: gl.constexpr,
    GROUP_M: gl.constexpr,
    JOINED: gl.constexpr,  # the EXTRA_N columns and the others are multiplied as one, see `any_width`
    SWAP_AB: gl.constexpr,  # a tile's rows are columns of C, see `configs`
):
    """Write C = activation(row_scale * (A @ B) * column_scale + bias), half as wide if it is gated."""
    if SWAP_AB:
        gl.static_assert(JOINED, "only tiles of any width have been exchanged")
        a_desc, b_desc = b_desc, a_desc
        M, N = N, M
        row_scale_ptr, column_scale_ptr = column_scale_ptr, row_scale_ptr
        row_bias_ptr, column_bias_ptr = column_bias_ptr, row_bias_ptr
    ITEM_BYTES: gl.constexpr = item_bytes(DTYPE)
    config = Config(
        *(VARIANT, BLOCK_M, BLOCK_N, EXTRA_N, 2 * BLOCK_K // ITEM_BYTES, NUM_BUFFERS, STORE_N, STORE_BUFFERS),
        *(GROUP_M, TENSOR_MEMORY, TRANS_A, TRANS_B, SWAP_AB, JOINED, ITEM_BYTES),
    )
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N + EXTRA_N)
    k_blocks = gl.cdiv(K, config.BLOCK_K)
    problem = Problem(
        tiles_m,
        tiles_n,
        tiles_m * tiles_n * min(k_blocks, 1),
        last_start(M, BLOCK_M, TRANS_A or SWAP_AB),
        last_start(N, BLOCK_N + EXTRA_N, not SWAP_AB),
        K,
        k_blocks,
        config,
    )
    scales, biases = (row_scale_ptr, column_scale_ptr, 1), (row_bias_ptr, column_bias_ptr)
    pointwise = Pointwise(scales, biases, M, N, ACTIVATION, SWAP_AB)
    run(problem, a_desc, b_desc, extra_desc, c_desc, pointwise, config)
