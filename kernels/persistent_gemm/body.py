"""The kernel of `persistent_matmul` for Hopper and Blackwell: a plain product, for the roles of `roles`.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .problem import Problem, last_start
from .roles import run
from .stream_k import StreamK


# Sizes only count tiles: one binary serves all shapes.
@gluon.jit(
    do_not_specialize=[
        *("M", "N", "K", "wanted", "programs"),
        *("a_alignment", "b_alignment", "m_class", "n_class"),
    ]
)
def gemm(
    a_desc,
    b_desc,
    extra_desc,
    c_desc,
    counter_ptr,  # int32 [2], zeros: for the dynamic schedule; with STREAM_K, one more for each program
    M,
    N,
    K,
    wanted,  # which configs the tuner may try; no constexpr, as the code is the same
    programs,  # the most that run at once: what the best config depends on, no part of the code either
    a_alignment,  # of how many bytes the rows of memory begin at multiples; for the tuner, too
    b_alignment,
    m_class,  # as what M and N are tuned, see `size_classes`; for the tuner alone
    n_class,
    parts_ptr,  # float32 [2 * programs, BLOCK_M, WIDTH] with STREAM_K
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
    STREAM_K: gl.constexpr,  # the fewest k blocks of the last wave for a program; 0: tiles are not cut
    JOINED: gl.constexpr,  # the EXTRA_N columns and the others are multiplied as one, see `any_width`
    TEAMS: gl.constexpr,  # that share a tile, see `roles`
    CTAS: gl.constexpr,  # of a program, which is a cluster: two halve the rows of each tile, see `clusters`
    SWAP_AB: gl.constexpr,  # a tile's rows are columns of C, see `blocks`
):
    """Write C = A @ B."""
    gl.static_assert(gl.num_ctas() == CTAS, "num_ctas of the launch must be CTAS of the config")
    if CTAS > 1:
        gl.static_assert(not TENSOR_MEMORY, "only Hopper's roles have been divided among CTAs")
        gl.static_assert(SCHEDULE != "dynamic" and STREAM_K == 0, "one CTA would have to tell the other")
    if SWAP_AB:
        gl.static_assert(JOINED, "only tiles of any width have been exchanged")
        a_desc, b_desc = b_desc, a_desc
        M, N = N, M
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N + EXTRA_N)
    k_blocks = gl.cdiv(K, BLOCK_K)
    problem = Problem(
        tiles_m,
        tiles_n,
        tiles_m * tiles_n * min(k_blocks, 1),
        M if STREAM_K > 0 else last_start(M, BLOCK_M, TRANS_A or SWAP_AB),
        N if STREAM_K > 0 else last_start(N, BLOCK_N + EXTRA_N, not SWAP_AB),
        K,
        k_blocks,
        SCHEDULE,
        GROUP_M,
        BLOCK_M,
        BLOCK_N,
        EXTRA_N,
        BLOCK_K,
        NUM_BUFFERS,
    )
    if STREAM_K > 0:
        gl.static_assert(not JOINED, "parts are written in pieces that fill the tile")
        gl.static_assert(VARIANT == "cooperative" or VARIANT == "pingpong", "a load warp asks for segments")
        gl.static_assert(SCHEDULE == "grouped" or SCHEDULE == "strided", "a program must know its numbers")
        problem = StreamK.create(problem, parts_ptr, counter_ptr + 2, STREAM_K)
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
        JOINED,
        TEAMS,
        SWAP_AB,
    )
