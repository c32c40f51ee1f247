"""The kernel of `persistent_matmul` for Hopper and Blackwell, and its tiles with stream-K.

Stream-K cuts the tiles of the last, incomplete wave along K, evenly among all programs:

    program 0   tile ........ | tile ........ | k blocks of one or
    program 1   tile ........ | tile ........ | two tiles of the tail     all end at about the same time
    ...

Which program has which k blocks is said in `tiles`. A program writes the sum over its k blocks of a tile, a
part, to float32 memory, and then counts it. Nobody waits: whoever counts the last part of a tile finds all
of them in memory, adds them up in the order of k and stores the tile. So the result does not depend on who
that is, and is the same each time. The count goes back to zero at once, for the next launch.

It is one kernel, not a second one that sums, so that the time of a candidate is all that it costs.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..compat import aggregate, partition_barrier
from ..epilogues import sums_of_a_result
from ..tiles import part_slot, stream_k_parts, stream_k_segment, stream_k_segments, stream_k_share
from .epilogue import Pointwise
from .operands import Config, item_bytes
from .problem import Problem, last_start
from .roles import run


@aggregate
class Parts:
    """The sum of a tile's parts, in place of an accumulator."""

    parts_ptr: gl.tensor
    tile: gl.tensor
    k_blocks: gl.tensor
    share: gl.tensor
    BLOCK_M: gl.constexpr
    WIDTH: gl.constexpr
    TOGETHER: gl.constexpr  # columns that a thread is to have: 16 hold gate and up, see `epilogues`

    @gluon.jit
    def piece(self, i: gl.constexpr, STORE_N: gl.constexpr):
        """Return columns i * STORE_N and following of the tile."""
        LANES_N: gl.constexpr = STORE_N // self.TOGETHER if STORE_N < 32 * self.TOGETHER else 32
        threads: gl.constexpr = [32 // LANES_N, LANES_N]
        layout: gl.constexpr = gl.BlockedLayout([1, self.TOGETHER], threads, [gl.num_warps(), 1], [1, 0])
        inside = _offsets(layout, i, self.BLOCK_M, STORE_N, self.WIDTH)
        first, count = stream_k_parts(self.tile, self.k_blocks, self.share)
        total = gl.zeros((self.BLOCK_M, STORE_N), gl.float32, layout)
        ahead = gl.load(self.room_of(first) + inside)
        for program in range(first + 1, first + count):
            further = gl.load(self.room_of(program) + inside)  # under way while the one before is added
            total += ahead
            ahead = further
        return total + ahead

    @gluon.jit
    def room_of(self, program):
        """Return where the program's part of the tile is."""
        slot = part_slot(program, self.tile, self.k_blocks, self.share, gl.num_programs(0))
        return _room(self.parts_ptr, slot, self.BLOCK_M, self.WIDTH)


@gluon.jit
def _offsets(
    layout: gl.constexpr, i: gl.constexpr, BLOCK_M: gl.constexpr, N: gl.constexpr, WIDTH: gl.constexpr
):
    """Return where the elements of columns i * N and following of a part lie."""
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))[:, None]
    col = gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]
    return row * WIDTH + col + i * N


@gluon.jit
def _room(parts_ptr, slot, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr):
    """Return where the part in that slot begins."""
    return parts_ptr + gl.cast(slot, gl.int64) * (BLOCK_M * WIDTH)


@gluon.jit
def _write(room, piece, i: gl.constexpr, WIDTH: gl.constexpr):
    """Write columns of a part, from the registers in which they are."""
    layout: gl.constexpr = piece.type.layout
    gl.store(room + _offsets(layout, i, piece.shape[0], piece.shape[1], WIDTH), piece)


@aggregate
class StreamK:
    """The whole tiles of a program, then its segments of the tail, as the `problem` of `roles`.

    Numbers are those of the strided order: below `whole`, tiles; `whole + s * programs + p` is segment s of
    program p. No program takes numbers of another. `tiles` is where this program's end.
    """

    product: Problem
    parts_ptr: gl.tensor  # float32 [2 * programs, BLOCK_M, WIDTH]
    arrivals_ptr: gl.tensor  # int32, zeros, one for each tile of the tail
    whole: gl.tensor  # so many tiles are in full waves
    tail: gl.tensor
    share: gl.tensor
    k_blocks: gl.tensor
    tiles: gl.tensor
    BLOCK_M: gl.constexpr
    WIDTH: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(product, parts_ptr, arrivals_ptr, SHORTEST: gl.constexpr):
        programs = gl.num_programs(0)
        whole = product.tiles // programs * programs
        tail = product.tiles - whole
        k_blocks = max(product.k_blocks, 1)  # without any there is no tile
        share = stream_k_share(tail, k_blocks, programs, SHORTEST)
        segments = stream_k_segments(gl.program_id(0), tail, k_blocks, share)
        return StreamK(
            *(product, parts_ptr, arrivals_ptr, whole, tail, share, k_blocks, whole + segments * programs),
            *(product.config.BLOCK_M, product.config.BLOCK_N + product.config.EXTRA_N),
        )

    @gluon.jit
    def find(self, number):
        """Return the number of the tile, and the first and the number of its k blocks."""
        tile = number
        first = number * 0
        blocks = self.k_blocks
        if number >= self.whole:
            segment = (number - self.whole) // gl.num_programs(0)
            inner, first, blocks = stream_k_segment(
                gl.program_id(0), segment, self.tail, self.k_blocks, self.share
            )
            tile = self.whole + inner
        return tile, first, blocks

    @gluon.jit
    def place(self, number):
        tile, first, _blocks = self.find(number)
        row_of_a, row, col, _first_k = self.product.place(tile)
        return row_of_a, row, col, first

    @gluon.jit
    def blocks_of(self, number):
        _tile, _first, blocks = self.find(number)
        return blocks

    @gluon.jit
    def await_rows(self, number, known):
        """All of A is there."""
        return known

    @gluon.jit
    def loaded(self):
        """Nobody waits for that."""

    @gluon.jit
    def store(self, number, epilogue, accumulator, row, col, step, STORER: gl.constexpr):
        """Store the tile, or a part of it; after the last part, the tile."""
        tile, _first, blocks = self.find(number)
        if blocks == self.k_blocks:
            epilogue.store(accumulator, row, col, step, STORER)
        else:
            inner = tile - self.whole
            self.write(accumulator, inner, epilogue.STORE_N)
            if self.was_last(inner):
                of_gates: gl.constexpr = sums_of_a_result(epilogue.pointwise.ACTIVATION) == 2
                parts = Parts(
                    *(self.parts_ptr, inner, self.k_blocks, self.share, self.BLOCK_M, self.WIDTH),
                    16 if of_gates else 4,  # of 16 bytes at a time
                )
                epilogue.store(parts, row, col, step, STORER)

    @gluon.jit
    def write(self, accumulator, tile, STORE_N: gl.constexpr):
        """Write this program's part of the tile."""
        slot = part_slot(gl.program_id(0), tile, self.k_blocks, self.share, gl.num_programs(0))
        room = _room(self.parts_ptr, slot, self.BLOCK_M, self.WIDTH)
        for i in gl.static_range(self.WIDTH // STORE_N):
            piece = accumulator.piece(i, STORE_N)
            _write(room, piece, i, self.WIDTH)

    @gluon.jit
    def was_last(self, tile):
        """Count this program's part; return whether it was the last: then all warps may read all parts.

        One thread counts, for the stores of all, which the barrier gathers: they precede its release. Whoever
        acquires the last count has seen all releases before it; another barrier, of the compiler's, hands the
        count on to the warps.
        """
        _first, count = stream_k_parts(tile, self.k_blocks, self.share)
        partition_barrier()
        before = gl.atomic_add(self.arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
        last = before == count - 1
        if last:
            gl.atomic_xchg(self.arrivals_ptr + tile, 0, sem="relaxed", scope="gpu")
        return last


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
    counter_ptr,  # int32 [2], zeros: for the dynamic schedule; with STREAM_K, one more for each program
    M,
    N,
    K,
    wanted,  # which configs the tuner may try; no constexpr, as the code is the same
    programs,  # the most that run at once: what the best config depends on, no part of the code either
    a_alignment,  # of how many bytes the rows of memory begin at multiples; for the tuner, too
    b_alignment,
    m_class,  # as what M and N are tuned, see `configs`; for the tuner alone
    n_class,
    parts_ptr,  # float32 [2 * programs, BLOCK_M, WIDTH] with STREAM_K
    row_scale_ptr,  # float32 [M], or None
    column_scale_ptr,  # float32 [N], or None
    row_bias_ptr,  # [M], or None
    column_bias_ptr,  # [N], or None
    TRANS_A: gl.constexpr,
    TRANS_B: gl.constexpr,
    TENSOR_MEMORY: gl.constexpr,  # Blackwell
    SCHEDULE: gl.constexpr,
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
    STORE_BUFFERS: gl.constexpr,  # 0: the epilogue steals operand buffers
    GROUP_M: gl.constexpr,
    STREAM_K: gl.constexpr,  # the fewest k blocks of the last wave for a program; 0: tiles are not cut
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
        *(SCHEDULE, GROUP_M, TENSOR_MEMORY, TRANS_A, TRANS_B, SWAP_AB, JOINED, ITEM_BYTES),
    )
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N + EXTRA_N)
    k_blocks = gl.cdiv(K, config.BLOCK_K)
    problem = Problem(
        tiles_m,
        tiles_n,
        tiles_m * tiles_n * min(k_blocks, 1),
        M if STREAM_K > 0 else last_start(M, BLOCK_M, TRANS_A or SWAP_AB),
        N if STREAM_K > 0 else last_start(N, BLOCK_N + EXTRA_N, not SWAP_AB),
        K,
        k_blocks,
        config,
    )
    if STREAM_K > 0:
        gl.static_assert(not JOINED, "parts are written in pieces that fill the tile")
        gl.static_assert(VARIANT == "cooperative" or VARIANT == "pingpong", "a load warp asks for segments")
        gl.static_assert(SCHEDULE == "grouped" or SCHEDULE == "strided", "a program must know its numbers")
        problem = StreamK.create(problem, parts_ptr, counter_ptr + 2, STREAM_K)
    scales, biases = (row_scale_ptr, column_scale_ptr, 1), (row_bias_ptr, column_bias_ptr)
    pointwise = Pointwise(scales, biases, M, N, ACTIVATION, SWAP_AB)
    run(problem, a_desc, b_desc, extra_desc, c_desc, counter_ptr, pointwise, config)
