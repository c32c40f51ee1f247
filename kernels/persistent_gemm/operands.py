"""The ring of operand buffers: TMA fills a slot with one k block of A and of B, the multiplication reads it.

What lies beyond a matrix arrives as zeros, but slowly: on an H200, 48 of 64 rows beyond cost a product of few
rows a quarter of its time. Of a matrix that is smaller than a block, only about the rows that there are come
therefore, see `blocks`. The other rows of the slot hold anything; what they are multiplied to is of rows and
columns that C has not, and its stores leave out. (Of a larger matrix, a tile reaches beyond it only if it
cannot be moved back, see `problem`.)

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..compat import aggregate, tma_load
from ..rings import ring_phase, ring_slot


@gluon.jit
def allocate_ring(desc, SLOTS: gl.constexpr, ROWS: gl.constexpr):
    """Return shared memory for SLOTS blocks of ROWS rows; the descriptor may bring only the first ones."""
    return gl.allocate_shared_memory(desc.dtype, [SLOTS, ROWS, desc.block_type.shape[1]], desc.layout)


@gluon.jit
def _load_block(desc, coord, bar, buf):
    """Start the copy of the descriptor's block to the first rows of `buf`."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    if buf.shape[0] > ROWS:
        buf = buf.slice(0, ROWS, 0)
    tma_load(desc, coord, bar, buf)


@aggregate
class Operands:
    """Two mbarriers for each slot: `full` counts the bytes of TMA, `empty` one arrival of whoever read last.

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
        a_bufs = allocate_ring(a_desc, NUM_BUFFERS, BLOCK_K if TRANS_A else BLOCK_M)
        b_bufs = allocate_ring(b_desc, B_SLOTS, BLOCK_N if TRANS_B else BLOCK_K)
        extra_bufs = b_bufs
        if EXTRA_N > 0:
            extra_bufs = allocate_ring(extra_desc, NUM_BUFFERS, EXTRA_N if TRANS_B else BLOCK_K)
        full = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(NUM_BUFFERS):
            mbarrier.init(full.index(i), count=1)
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
            TRANS_A,
            TRANS_B,
            BLOCK_N,
            EXTRA_N,
            BLOCK_K,
        )

    @gluon.jit
    def load(self, step, row, col, k, WIDE: gl.constexpr):
        """Start the copies of k block `k` of the tile at (row, col), once the slot has been read.

        WIDE: the tile has its further columns, if there are any. What lies beyond A or B and is loaded is
        counted like the rest, so each load completes `full`.
        """
        slot = ring_slot(step, self.NUM_BUFFERS)
        bar = self.full.index(slot)
        mbarrier.wait(self.empty.index(slot), ring_phase(step, self.NUM_BUFFERS) ^ 1)
        nbytes: gl.constexpr = self.a_desc.block_type.nbytes + self.b_desc.block_type.nbytes
        inner = k * self.BLOCK_K
        if WIDE and self.EXTRA_N > 0:
            mbarrier.expect(bar, nbytes + self.extra_desc.block_type.nbytes)
        else:
            mbarrier.expect(bar, nbytes)
        a_buf = self.a_bufs.index(slot)
        b_buf = self.b_bufs.index(ring_slot(step, self.B_SLOTS))
        if self.TRANS_A:
            _load_block(self.a_desc, [inner, row], bar, a_buf)
        else:
            _load_block(self.a_desc, [row, inner], bar, a_buf)
        if self.TRANS_B:
            _load_block(self.b_desc, [col, inner], bar, b_buf)
        else:
            _load_block(self.b_desc, [inner, col], bar, b_buf)
        if WIDE and self.EXTRA_N > 0:
            extra_buf = self.extra_bufs.index(slot)
            if self.TRANS_B:
                _load_block(self.extra_desc, [col + self.BLOCK_N, inner], bar, extra_buf)
            else:
                _load_block(self.extra_desc, [inner, col + self.BLOCK_N], bar, extra_buf)

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
