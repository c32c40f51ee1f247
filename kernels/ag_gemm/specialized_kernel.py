"""The device side of `AllGatherGemm` on Hopper and Blackwell: the roles of `gemm` wait for rows.

Only the load warp waits: at most once a tile, before its first load, unless it knows that the tile's rows
are here. Meanwhile the tensor cores work on the blocks that are loaded, up to NUM_BUFFERS of them.

    tiles     chunk `rank` first, which needs no wait, then in the order of arrival; inside a chunk
              down GROUP_M rows of tiles before the next column
    ragged    where BLOCK_M does not divide m, a chunk's last row of tiles is moved back to end with it: so no
              store reaches into the next chunk. So is the last column of tiles, to end with the weight, where
              TMA can begin there. Where two tiles overlap both compute the same sums, to the bit, so either
              store may be the last
    scales    the storing warps read the scale after each row, by ordinary loads. The load warp has acquired
              the flag of the rows; its arrival at the mbarrier of its loads releases that, and the storing
              warps acquire it when they wait for the mbarrier

Measured in graphs (two H100, 2026-11-26): a call of 8192 x 3584 x 8192 takes 1.012 of cuBLAS's product alone,
one of 2048 x 3584 x 8192 1.039.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..compat import aggregate
from ..exchange.chunks import part_from_peers, wait_for_rows
from ..exchange.peers import Peers
from ..gemm.epilogue import Pointwise
from ..gemm.operands import Config, item_bytes
from ..gemm.problem import end_steps_of, last_start
from ..gemm.roles import run
from ..tiles import grouped_tile, rotated_chunk
from .gather_buffer import scaled_pitch


@aggregate
class GatheredChunks:
    """The tiles of all chunks of A; the `problem` of `roles`.

    `known` counts the rows of A that are known to be here, in the order of visits. One number is enough: when
    a program is at a tile, it needs nothing more of the chunks before.
    """

    peers: gl.tuple  # Peers
    m: gl.tensor
    last_col: gl.tensor  # no tile begins after it: loads from beyond the last column are slow
    tiles_m: gl.tensor  # of a chunk
    tiles_n: gl.tensor
    tiles: gl.tensor  # of all chunks
    k_blocks: gl.tensor
    k: gl.tensor
    capacity: gl.tensor
    config: Config
    WORLD: gl.constexpr

    @gluon.jit
    def find(self, number):
        """Return the tile's chunk, its first row in that chunk and its first column.

        Without such a tile, the last one's: after the last group the arithmetic would divide by zero.
        """
        number = min(number, self.tiles - 1)
        chunk, inner = rotated_chunk(number, self.tiles_m * self.tiles_n, self.WORLD, self.peers.rank)
        pid_m, pid_n = grouped_tile(inner, self.tiles_m, self.tiles_n, self.config.GROUP_M)
        WIDTH: gl.constexpr = self.config.BLOCK_N + self.config.EXTRA_N
        row = min(pid_m * self.config.BLOCK_M, self.m - self.config.BLOCK_M)
        return chunk, row, min(pid_n * WIDTH, self.last_col)

    @gluon.jit
    def place(self, number):
        chunk, row, col = self.find(number)
        return chunk * self.capacity + row, chunk * self.m + row, col

    @gluon.jit
    def end_steps(self):
        """Return how many instructions along K the last k block of a tile needs."""
        return end_steps_of(self.k, self.k_blocks, self.config)

    @gluon.jit
    def await_rows(self, number, known):
        """Return once the tile's rows are here, or their peer is given up: then garbage is loaded."""
        chunk, row, _col = self.find(number)
        step = (chunk - self.peers.rank + self.WORLD) % self.WORLD
        before = step * self.m  # rows of the chunks that are visited before this one
        needed = row + self.config.BLOCK_M
        if (step > 0) & (known < before + needed):
            arrived = wait_for_rows(chunk, needed, self.peers, self.WORLD, True)
            known = before + min(arrived, self.m)
        return known

    @gluon.jit
    def loaded(self):
        """Wait for all chunks to be where they are read, in one program each, while others multiply."""
        part_from_peers(self.m, self.peers, self.WORLD, True)

    @gluon.jit
    def store(self, number, epilogue, accumulator, row, col, STORER: gl.constexpr):
        """The accumulator is the tile. Scales of rows lie where the rows of A do."""
        row_of_a, row_of_c, _col = self.place(number)
        epilogue.store(accumulator, row, col, STORER, row_of_a - row_of_c)


UNSPECIALIZED = [
    *("flags_ptr", "errors_ptr", "row_scale_ptr", "column_scale_ptr", "bias_ptr"),
    *("M", "N", "K", "capacity", "rank", "patience_ticks", "size_class"),
]


# Sizes only count tiles, and flags are read one by one: one binary serves all shapes.
@gluon.jit(do_not_specialize=UNSPECIALIZED)
def specialized_all_gather_gemm(
    a_desc,  # gather buffer [WORLD * capacity, K]; the first M / WORLD rows of each chunk count
    b_desc,  # weight [N, K]; without TRANS_B its transpose, [K, N]
    extra_desc,
    c_desc,  # out [M, N], or [M, N / 2] under a gated activation
    flags_ptr,  # int32 [FLAGS, WORLD]
    errors_ptr,  # int64 [WORLD], in memory that the host reads without waiting
    row_scale_ptr,  # float32 [WORLD * capacity], after the rows of A; or None
    column_scale_ptr,  # float32 [N], or None
    bias_ptr,  # [N], or None
    M,
    N,
    K,
    capacity,
    rank,
    patience_ticks,
    size_class,  # of the rows of a chunk, for the key of the tuning
    WORLD: gl.constexpr,
    TENSOR_MEMORY: gl.constexpr,  # Blackwell
    DTYPE: gl.constexpr,  # of A and B
    TRANS_B: gl.constexpr,  # the weight's rows are contiguous; else its columns
    ACTIVATION: gl.constexpr,  # of `epilogues`
    VARIANT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    EXTRA_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    STORE_N: gl.constexpr,
    STORE_BUFFERS: gl.constexpr,
    GROUP_M: gl.constexpr,
    JOINED: gl.constexpr,
):
    """Write C = activation(row_scale * (A @ B.T) * column_scale + bias), chunk `rank` first.

    M / WORLD is not below BLOCK_M.
    """
    gl.static_assert(VARIANT == "cooperative" or VARIANT == "pingpong", "a load warp is to wait")
    WIDTH: gl.constexpr = BLOCK_N + EXTRA_N
    ITEM_BYTES: gl.constexpr = item_bytes(DTYPE)
    config = Config(
        *(VARIANT, BLOCK_M, BLOCK_N, EXTRA_N, 2 * BLOCK_K // ITEM_BYTES, NUM_BUFFERS, STORE_N, STORE_BUFFERS),
        *(GROUP_M, TENSOR_MEMORY, False, TRANS_B, False, JOINED, ITEM_BYTES),
    )
    m = M // WORLD
    tiles_m = gl.cdiv(m, BLOCK_M)
    tiles_n = gl.cdiv(N, WIDTH)
    problem = GatheredChunks(
        Peers(flags_ptr, errors_ptr, rank, patience_ticks),
        *(m, last_start(N, WIDTH, True), tiles_m, tiles_n, WORLD * tiles_m * tiles_n),
        *(gl.cdiv(K, config.BLOCK_K), K, capacity, config, WORLD),
    )
    scales = (row_scale_ptr, column_scale_ptr, scaled_pitch(K) // 4)
    pointwise = Pointwise(scales, (None, bias_ptr), M, N, ACTIVATION, False)
    run(problem, a_desc, b_desc, extra_desc, c_desc, pointwise, config)
