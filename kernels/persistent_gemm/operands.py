"""The ring of operand buffers: TMA fills a slot with one k block of A and of B, the multiplication reads it.

What lies beyond a matrix arrives as zeros, but slowly: on an H200, 48 of 64 rows beyond cost a product of few
rows a quarter of its time. Where a matrix is smaller than a block, `blocks` therefore cuts loads into pieces,
and those that would bring no row are left out. The rows of such a piece hold anything; what they are
multiplied to is of rows and columns that C has not, and its stores leave out. (A larger matrix has no tile
that reaches beyond it, see `problem`.)

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..compat import aggregate, tma_load
from ..rings import ring_phase, ring_slot


@gluon.jit
def allocate_ring(desc, SLOTS: gl.constexpr, PIECES: gl.constexpr = 1):
    """Return shared memory for SLOTS blocks of PIECES of the descriptor's, one below the other."""
    ROWS: gl.constexpr = PIECES * desc.block_type.shape[0]
    return gl.allocate_shared_memory(desc.dtype, [SLOTS, ROWS, desc.block_type.shape[1]], desc.layout)


@gluon.jit
def _load_rows(desc, row, inner, bar, buf, PIECES: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Start the copies of rows `row` and following, or of such columns; of pieces, those that have any.

    What comes in pieces is expected here, by one arrival: how many bytes one can expect is a constant.
    """
    if TRANSPOSED:
        tma_load(desc, [inner, row], bar, buf)
    elif PIECES == 1:
        tma_load(desc, [row, inner], bar, buf)
    else:
        ROWS: gl.constexpr = desc.block_type.shape[0]
        left = desc.shape[0] - row
        mbarrier.expect(bar, 0, pred=left <= 0)
        for i in gl.static_range(PIECES):
            more = left > (i + 1) * ROWS if i + 1 < PIECES else False
            mbarrier.expect(bar, (i + 1) * desc.block_type.nbytes, pred=(left > i * ROWS) & (not more))
        for i in gl.static_range(PIECES):
            tma_load(desc, [row + i * ROWS, inner], bar, buf.slice(i * ROWS, ROWS, 0), pred=left > i * ROWS)


@aggregate
class Operands:
    """Two mbarriers for each slot: `full` counts the bytes of TMA, `empty` one arrival of whoever read last.

    `full` has one arrival for all that comes whole, and one for each that comes in pieces.

    B may have more slots than the ring has steps in flight (`B_SLOTS`), for an epilogue that borrows the
    two that are not in use. B's tile may be wider than BLOCK_N by EXTRA_N columns with buffers of their own:
    a tensor's sides are powers of two, a tile 192 columns wide is two tensors.
    """

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    extra_desc: tma.tensor_descriptor  # B again, EXTRA_N columns wide; b_desc itself where EXTRA_N is 0
    a_bufs: gl.shared_memory_descriptor
    b_bufs: gl.shared_memory_descriptor
    extra_bufs: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    NUM_BUFFERS: gl.constexpr
    B_SLOTS: gl.constexpr
    A_PIECES: gl.constexpr
    B_PIECES: gl.constexpr
    EXTRA_PIECES: gl.constexpr
    TRANS_A: gl.constexpr  # A's memory is [K, M], not [M, K]
    TRANS_B: gl.constexpr  # B's memory is [N, K], not [K, N]
    BLOCK_N: gl.constexpr
    EXTRA_N: gl.constexpr
    BLOCK_K: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(
        a_desc,
        b_desc,
        extra_desc,
        NUM_BUFFERS: gl.constexpr,
        STOLEN: gl.constexpr,
        TRANS_A: gl.constexpr,
        TRANS_B: gl.constexpr,
        BLOCK_M: gl.constexpr,
        BLOCK_N: gl.constexpr,
        EXTRA_N: gl.constexpr,
        BLOCK_K: gl.constexpr,
    ):
        """Allocate the ring; STOLEN slots more for B."""
        B_SLOTS: gl.constexpr = NUM_BUFFERS + STOLEN
        # Columns of memory come whole.
        A_PIECES: gl.constexpr = 1 if TRANS_A else BLOCK_M // a_desc.block_type.shape[0]
        B_PIECES: gl.constexpr = BLOCK_N // b_desc.block_type.shape[0] if TRANS_B else 1
        EXTRA_PIECES: gl.constexpr = (
            EXTRA_N // extra_desc.block_type.shape[0] if TRANS_B and EXTRA_N > 0 else 1
        )
        a_bufs = allocate_ring(a_desc, NUM_BUFFERS, A_PIECES)
        b_bufs = allocate_ring(b_desc, B_SLOTS, B_PIECES)
        extra_bufs = b_bufs
        if EXTRA_N > 0:
            extra_bufs = allocate_ring(extra_desc, NUM_BUFFERS, EXTRA_PIECES)
        arrivals: gl.constexpr = 1 + (A_PIECES > 1) + (B_PIECES > 1) + (EXTRA_PIECES > 1)
        full = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(NUM_BUFFERS):
            mbarrier.init(full.index(i), count=arrivals)
            mbarrier.init(empty.index(i), count=1)
        return Operands(
            a_desc,
            b_desc,
            extra_desc,
            a_bufs,
            b_bufs,
            extra_bufs,
            full,
            empty,
            NUM_BUFFERS,
            B_SLOTS,
            A_PIECES,
            B_PIECES,
            EXTRA_PIECES,
            TRANS_A,
            TRANS_B,
            BLOCK_N,
            EXTRA_N,
            BLOCK_K,
        )

    @gluon.jit
    def load(self, step, row, col, k):
        """Start the copies of k block `k` of the tile at (row, col), once the slot has been read.

        What lies beyond A or B and is loaded is counted like the rest, so each load completes `full`.
        """
        slot = ring_slot(step, self.NUM_BUFFERS)
        bar = self.full.index(slot)
        mbarrier.wait(self.empty.index(slot), ring_phase(step, self.NUM_BUFFERS) ^ 1)
        whole_a: gl.constexpr = self.a_desc.block_type.nbytes if self.A_PIECES == 1 else 0
        whole_b: gl.constexpr = self.b_desc.block_type.nbytes if self.B_PIECES == 1 else 0
        whole_extra: gl.constexpr = (
            self.extra_desc.block_type.nbytes if self.EXTRA_N > 0 and self.EXTRA_PIECES == 1 else 0
        )
        mbarrier.expect(bar, whole_a + whole_b + whole_extra)
        inner = k * self.BLOCK_K
        _load_rows(self.a_desc, row, inner, bar, self.a_bufs.index(slot), self.A_PIECES, self.TRANS_A)
        b_buf = self.b_bufs.index(ring_slot(step, self.B_SLOTS))
        _load_rows(self.b_desc, col, inner, bar, b_buf, self.B_PIECES, not self.TRANS_B)
        if self.EXTRA_N > 0:
            extra_buf = self.extra_bufs.index(slot)
            further = col + self.BLOCK_N
            _load_rows(self.extra_desc, further, inner, bar, extra_buf, self.EXTRA_PIECES, not self.TRANS_B)

    @gluon.jit
    def wait_full(self, step):
        """Return when the step's k block is there."""
        slot = ring_slot(step, self.NUM_BUFFERS)
        mbarrier.wait(self.full.index(slot), ring_phase(step, self.NUM_BUFFERS))

    @gluon.jit
    def empty_bar(self, step):
        """Return the mbarrier on which the step's reader arrives."""
        return self.empty.index(ring_slot(step, self.NUM_BUFFERS))

    @gluon.jit
    def a(self, step):
        """Return the step's block of A, [BLOCK_M, BLOCK_K]."""
        buf = self.a_bufs.index(ring_slot(step, self.NUM_BUFFERS))
        if self.TRANS_A:
            buf = buf.permute((1, 0))
        return buf

    @gluon.jit
    def b(self, step):
        """Return the step's block of B, [BLOCK_K, BLOCK_N]."""
        buf = self.b_bufs.index(ring_slot(step, self.B_SLOTS))
        if self.TRANS_B:
            buf = buf.permute((1, 0))
        return buf

    @gluon.jit
    def b_extra(self, step):
        """Return the step's block of B's further columns, [BLOCK_K, EXTRA_N]."""
        buf = self.extra_bufs.index(ring_slot(step, self.NUM_BUFFERS))
        if self.TRANS_B:
            buf = buf.permute((1, 0))
        return buf
