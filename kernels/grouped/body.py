"""Who plays the roles of a grouped GEMM on Hopper: those of `gemm.roles`, and one that gathers.

    cooperative   load (1 warp) | gather (2 warps) | work: eight warps, or four, share a tile
    pingpong      load (1 warp) | gather (2 warps) | work, work: four warps each have every second tile

The `problem` has what `gemm.roles` asks for, and for who gathers

    rows_to_gather(number, rows)   where the rows of A begin that the tile's `rows` are
    elements()                     how many elements each of them has, a multiple of 8

**It ends** as `gemm.roles` does: the load warp counts steps like everybody, and starts each once. Who gathers
needs of a step that it was granted, which the load warp does when the slot has been read; `full` needs of who
gathers nothing but that. Rows are read behind `await_rows` of their tile: the load warp has returned from it
when it grants the tile's first step.

**At the end** of the gathering partition its last copies may be under way: who multiplies waits for them.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..compat import aggregate
from ..gemm.mma import Wgmma
from ..gemm.operands import allocate_mbarriers
from ..gemm.problem import StaticSchedule
from ..gemm.roles import LOADER_REGISTERS, load, work
from .operands import GATHER_WARPS, GatheredOperands

# Who gathers and the load warp are one warpgroup: 2 * 216 + 72 for each of 128 lanes, 64512 of an SM's 65536.
GATHER_REGISTERS = gl.constexpr(72)
CONSUMER_REGISTERS = gl.constexpr(216)


@gluon.constexpr_function
def _of_rows(columns, warps):
    """Return the layout from which a piece is stored: a warp has its 16 rows of the accumulator's 64.

    So the piece is turned within the warp. A thread stores 16 bytes, neighbours those of the same row.
    """
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([16 * lanes // 32, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def rows_to_store(config):
    """Return the numbers of a tile's rows, as `RowStores` wants where they go."""
    layout: gl.constexpr = _of_rows(config.STORE_N, gl.num_warps())
    return gl.arange(0, config.BLOCK_M, gl.SliceLayout(1, layout))


@aggregate
class RowStores:
    """The epilogue for rows of C that lie anywhere; the columns, a multiple of 8, begin at 16 bytes."""

    c_ptr: gl.tensor
    stride: gl.tensor  # of C's rows, a multiple of 8
    N: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    STORE_N: gl.constexpr

    @gluon.jit
    def store(self, accumulator, rows, real, is_product, col):
        """Store those rows of a tile that are real; zeros unless `is_product`."""
        layout: gl.constexpr = _of_rows(self.STORE_N, gl.num_warps())
        # All are multiples of 8, which the compiler must see to store 16 bytes at a time.
        stride, col, end = self.stride // 8 * 8, col // 8 * 8, self.N // 8 * 8
        rows_ptr = self.c_ptr + rows.to(gl.int64) * stride
        columns = col + gl.arange(0, self.STORE_N, gl.SliceLayout(0, layout))
        for i in gl.static_range(self.BLOCK_N // self.STORE_N):
            piece = gl.where(is_product, accumulator.piece(i, self.STORE_N), 0.0)
            piece = gl.convert_layout(piece.to(self.c_ptr.dtype.element_ty), layout)
            mask = real[:, None] & (columns < end - i * self.STORE_N)[None, :]
            gl.store(rows_ptr[:, None] + (columns + i * self.STORE_N)[None, :], piece, mask=mask)

    @gluon.jit
    def finish(self):
        """Stores of registers need no shared memory."""


@gluon.jit
def gather(problem, schedule, operands):
    """Fill the ring with the rows of A of all tiles of this program."""
    step = 0
    visit = 0
    number = schedule.take(visit)
    while number < problem.tiles:
        rows_ptr = problem.rows_to_gather(number, operands.rows())
        left = problem.elements()
        for _ in range(problem.blocks_of(number)):
            operands.gather(step, rows_ptr, left)
            rows_ptr += operands.config.BLOCK_K
            left -= operands.config.BLOCK_K
            step += 1
        visit += 1
        number = schedule.take(visit)


@gluon.jit
def run(problem, b_desc, epilogue, config):
    """Multiply and store the tiles of the problem that are this program's."""
    PINGPONG: gl.constexpr = config.VARIANT == "pingpong"
    gl.static_assert(PINGPONG or config.VARIANT == "cooperative", "somebody else is to gather")
    operands = GatheredOperands.create(b_desc, config)
    mma = Wgmma.create(config.BLOCK_M, config.BLOCK_N, 0, config.ITEM_BYTES)
    schedule = StaticSchedule(problem.tiles, "strided")
    turn = operands.full
    if PINGPONG:
        turn = allocate_mbarriers(2)
        for i in gl.static_range(2):
            mbarrier.init(turn.index(i), count=1)
    fence_async_shared()  # TMA sees the mbarriers
    if PINGPONG:
        gl.warp_specialize(
            [
                (work, (problem, schedule, operands, mma, epilogue, turn, 0, 2, "both", False)),
                (work, (problem, schedule, operands, mma, epilogue, turn, 1, 2, "both", False)),
                (gather, (problem, schedule, operands)),
                (load, (problem, schedule, operands, 2)),
            ],
            [4, GATHER_WARPS, 1],
            [CONSUMER_REGISTERS, GATHER_REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (work, (problem, schedule, operands, mma, epilogue, turn, 0, 1, "both", False)),
                (gather, (problem, schedule, operands)),
                (load, (problem, schedule, operands, 1)),
            ],
            [GATHER_WARPS, 1],
            [GATHER_REGISTERS, LOADER_REGISTERS],
        )
