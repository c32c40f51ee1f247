"""The kernel of `AllGatherMoE` for Hopper: the roles of `grouped` wait for chunks.

Only the load warp waits: once a tile, for the stages up to the tile's last one that it has not waited for
yet. Rows are gathered, and weights loaded, when it has; the tensor cores go on with what was there before.

    tiles     of the plan's table for blocks of BLOCK_M rows, down GROUP_M blocks before the next column
    rows      behind a block's end are its last one again: multiplied, not stored
    columns   the last ones of an expert are moved back to end with its matrix, so that no tile reads the next
              expert's; what two tiles share is stored twice, the same
    dropped   choices are blocks of their own. One k block is multiplied, as no tile may have none; zeros are
              stored

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..compat import aggregate
from ..exchange.peers import ARRIVED, Peers, release_if_given_up, wait_for_flag
from ..gemm.operands import Config
from ..gemm.problem import last_start
from ..grouped.body import RowStores, rows_to_store, run
from ..tiles import grouped_tile
from .flags import NOT_PUSHED
from .products import table_of
from .routing import ENTRY


@gluon.jit
def _places(entry_ptr, rows):
    """Return the places of a block's rows among the sorted choices; the last one's behind its end."""
    return gl.minimum(gl.load(entry_ptr + 1) + rows, gl.load(entry_ptr + 2) - 1)


@aggregate
class Blocks:
    """The tiles of a table of blocks; the `problem` of `grouped`.

    `known` is the last stage that is known to have come; 0 is this rank's own chunk.
    """

    peers: gl.tuple  # `Peers`
    a_ptr: gl.tensor
    rows_ptr: gl.tensor
    sources_ptr: gl.tensor
    table_ptr: gl.tensor
    blocks: gl.tensor  # at least 1, for the arithmetic
    tiles_n: gl.tensor
    tiles: gl.tensor
    last_col: gl.tensor  # behind which no tile begins
    N: gl.tensor
    K: gl.tensor
    experts: gl.tensor
    topk: gl.tensor
    config: Config
    WORLD: gl.constexpr
    SORTED: gl.constexpr

    @gluon.jit
    def find(self, number):
        """Return where the tile's block is in the table, and its first column.

        Without such a tile, the last one's.
        """
        number = min(number, max(self.tiles, 1) - 1)
        block, pid_n = grouped_tile(number, self.blocks, self.tiles_n, self.config.GROUP_M)
        return self.table_ptr + block * ENTRY, min(pid_n * self.config.BLOCK_N, self.last_col)

    @gluon.jit
    def place(self, number):
        """Return where the tile's rows go, and where it is in the experts' weights, one below the other.

        Who multiplies asks under the last products of the tile, which hide the loads.
        """
        entry_ptr, col = self.find(number)
        expert = min(gl.load(entry_ptr), self.experts - 1)
        first_k = 0
        if self.config.TRANS_B:
            col += expert * self.N
        else:
            first_k = expert * (self.K // self.config.BLOCK_K)
        rows = _places(entry_ptr, rows_to_store(self.config))
        if not self.SORTED:
            rows = gl.load(self.rows_ptr + rows)
        return 0, rows, col, first_k

    @gluon.jit
    def blocks_of(self, number):
        """Every tile has as many k blocks, but for those of dropped choices."""
        entry_ptr, _col = self.find(number)
        return gl.where(gl.load(entry_ptr) < self.experts, gl.cdiv(self.K, self.config.BLOCK_K), 1)

    @gluon.jit
    def elements(self):
        """Return how many elements a row of A has, and let the compiler see that they are whole 16 bytes."""
        return self.K // 8 * 8

    @gluon.jit
    def rows_to_gather(self, number, rows):
        """Return where the tile's rows begin: [BLOCK_M]."""
        entry_ptr, _col = self.find(number)
        sources = gl.load(self.sources_ptr + _places(entry_ptr, rows)) // self.topk
        return self.a_ptr + sources.to(gl.int64) * self.elements()

    @gluon.jit
    def await_rows(self, number, known):
        """Return once the tile's chunks are here, or their peers are given up: then it loads garbage."""
        entry_ptr, _col = self.find(number)
        stage = gl.load(entry_ptr + 3)
        while known < stage:
            known += 1
            peer = (self.peers.rank + known) % self.WORLD
            wait_for_flag(ARRIVED, NOT_PUSHED, peer, self.peers, self.WORLD)
        return known

    @gluon.jit
    def loaded(self):
        """Wait for all pushes: they are a part of this call, whether a tile needed them or not."""
        for peer in range(gl.program_id(0), self.WORLD, gl.num_programs(0)):
            if peer != self.peers.rank:
                value = wait_for_flag(ARRIVED, NOT_PUSHED, peer, self.peers, self.WORLD)
                if self.SORTED:  # a call may have no other kernel
                    release_if_given_up(value, peer, self.peers, self.WORLD)

    @gluon.jit
    def store(self, number, epilogue, accumulator, row, col, step, STORER: gl.constexpr):
        """Store the tile's rows where their choices are, or in the order of the table."""
        entry_ptr, col = self.find(number)
        real = rows_to_store(self.config) < gl.load(entry_ptr + 2) - gl.load(entry_ptr + 1)
        epilogue.store(accumulator, row, real, gl.load(entry_ptr) < self.experts, col)


# Sizes only count tiles: one binary serves all shapes.
@gluon.jit(
    do_not_specialize=[
        *("size_class", "N", "K", "experts", "topk", "capacity", "stride_cm", "rank", "patience_ticks")
    ]
)
def specialized_all_gather_moe(
    b_desc,  # weights [experts * N, K]; BY_COLUMNS [experts * K, N]
    a_ptr,  # gather buffer: tokens of K elements, those of chunk p behind p * (tokens of a chunk)
    c_ptr,  # out [choices, N], rows stride_cm apart
    rows_ptr,  # of the plan: the row of `out` of each sorted choice
    sources_ptr,  # of the plan: topk times the token in the gather buffer, plus the choice
    ends_ptr,  # of the plan, as is the next
    tables_ptr,
    flags_ptr,  # int32 [7, WORLD]
    errors_ptr,  # int64 [WORLD], in memory that the host reads without waiting
    size_class,  # the power of two that the number of choices is tuned as
    N,
    K,
    experts,
    topk,
    capacity,  # blocks of a table
    stride_cm,
    rank,
    patience_ticks,
    WORLD: gl.constexpr,
    HEIGHTS: gl.constexpr,
    BY_COLUMNS: gl.constexpr,  # the weights' columns are contiguous, not their rows
    SORTED: gl.constexpr,  # the rows of `out` are the sorted choices
    VARIANT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    STORE_N: gl.constexpr,
    GROUP_M: gl.constexpr,
    BY_ARRIVAL: gl.constexpr,  # tiles in the order in which chunks arrive; else expert by expert
):
    """Write each choice's token times its expert's B.T; zeros for a choice that is dropped.

    N, K and stride_cm are multiples of 8; BY_COLUMNS, K is one of BLOCK_K.
    """
    config = Config(
        *(VARIANT, BLOCK_M, BLOCK_N, 0, BLOCK_K, NUM_BUFFERS, STORE_N, 1),
        *("grouped", GROUP_M, False, False, not BY_COLUMNS, False, False, 2),
    )
    table = table_of(BLOCK_M) + (0 if BY_ARRIVAL else HEIGHTS)
    blocks = gl.load(ends_ptr + ((table + 1) * WORLD - 1))
    tiles_n = gl.cdiv(N, BLOCK_N)
    problem = Blocks(
        *(Peers(flags_ptr, errors_ptr, rank, patience_ticks), a_ptr, rows_ptr, sources_ptr),
        *(tables_ptr + table * capacity * ENTRY, max(blocks, 1), tiles_n, blocks * tiles_n),
        *(last_start(N, BLOCK_N, True), N, K, experts, topk, config, WORLD, SORTED),
    )
    epilogue = RowStores(c_ptr, stride_cm, N, BLOCK_M, BLOCK_N, STORE_N)
    run(problem, b_desc, epilogue, config)
