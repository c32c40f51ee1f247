"""The ring of operand buffers: TMA fills a slot with one k block of A and of B, the multiplication reads it.

Elements beyond a matrix arrive as zeros, but slowly: on an H200, 48 of 64 rows beyond cost a product of few
rows a quarter of its time. So of a matrix that is smaller than a block TMA loads little more than its rows
(`blocks_of`). The other rows of the slot hold anything; their products belong to rows and columns that C does
not have, and are not stored. (In a larger matrix a tile reaches beyond it only if it cannot be moved back,
see `problem`.)

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..compat import aggregate, reinterpret, tma_load
from ..rings import ring_phase, ring_slot
from .any_width import SWIZZLED_N

FP8 = gl.constexpr("fp8e4nv")  # as Triton calls torch.float8_e4m3fn


@gluon.constexpr_function
def item_bytes(dtype):
    """Return the size of an element of A and B, whose type is given as Triton spells it."""
    return 1 if dtype == FP8 else 2


@gluon.jit
def _load_box(desc, col, inner, bar, ring, FIRST: gl.constexpr):
    """Start a copy of the descriptor's columns to those of the ring from FIRST on."""
    COLUMNS: gl.constexpr = desc.block_type.shape[0]
    box = ring.slice(FIRST // SWIZZLED_N, COLUMNS // SWIZZLED_N, 0)
    box = reinterpret(box, desc.dtype, desc.block_type.shape, desc.layout)
    tma_load(desc, [col, inner], bar, box)


@gluon.jit
def load_columns(operands, slot, col, inner, bar):
    """Start the copies of the tile's columns, from the k-th on (`inner`), to a slot of the ring.

    Where a box of the ring begins must be known to the compiler, so there is code for each slot.
    """
    BLOCK_N: gl.constexpr = operands.config.BLOCK_N
    WIDTH: gl.constexpr = BLOCK_N + operands.config.EXTRA_N
    BOX_N: gl.constexpr = operands.b_desc.block_type.shape[0]
    FURTHER_N: gl.constexpr = operands.extra_desc.block_type.shape[0]
    for s in gl.static_range(operands.NUM_BUFFERS):
        if slot == s:
            for at in gl.static_range(0, BLOCK_N, BOX_N):
                _load_box(operands.b_desc, col + at, inner, bar, operands.b_bufs, s * WIDTH + at)
            for at in gl.static_range(BLOCK_N, WIDTH, FURTHER_N):
                _load_box(operands.extra_desc, col + at, inner, bar, operands.b_bufs, s * WIDTH + at)


@gluon.jit
def allocate_mbarriers(COUNT: gl.constexpr):
    """Return so many mbarriers, of which a role waits for one at least in every form of the kernel.

    Else the compiler has their memory overlap with that of operands: on an H200 tiles then had rows of NaN.
    """
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def allocate_ring(desc, SLOTS: gl.constexpr, ROWS: gl.constexpr):
    """Return shared memory for SLOTS blocks of ROWS rows; the descriptor may bring only the first ones."""
    return gl.allocate_shared_memory(desc.dtype, [SLOTS, ROWS, desc.block_type.shape[1]], desc.layout)


@gluon.jit
def _load_block(desc, buf, row, inner, bar, TRANS: gl.constexpr):
    """Start a copy to the first rows of `buf`: as many as the descriptor brings; TRANS: they run along K."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    if buf.shape[0] > ROWS:
        buf = buf.slice(0, ROWS, 0)
    if TRANS:
        tma_load(desc, [inner, row], bar, buf)
    else:
        tma_load(desc, [row, inner], bar, buf)


@aggregate
class Config:
    """The constants of a launch, for all parts of the body."""

    VARIANT: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    EXTRA_N: gl.constexpr
    BLOCK_K: gl.constexpr  # elements: twice the candidate's number where they have one byte
    NUM_BUFFERS: gl.constexpr
    STORE_N: gl.constexpr
    STORE_BUFFERS: gl.constexpr
    GROUP_M: gl.constexpr
    TENSOR_MEMORY: gl.constexpr  # Blackwell
    TRANS_A: gl.constexpr  # A's memory is [K, M], not [M, K]
    TRANS_B: gl.constexpr  # B's memory is [N, K], not [K, N]
    TRANS_C: gl.constexpr  # C's memory has a tile's columns as rows
    JOINED: gl.constexpr  # the EXTRA_N columns and the others are multiplied as one, see `any_width`
    ITEM_BYTES: gl.constexpr  # of an element of A and B


@aggregate
class OperandRing:
    """Two mbarriers for each slot: `full` counts the bytes of TMA, `empty` an arrival of each reader.

    B's tile may be wider than BLOCK_N by EXTRA_N columns with buffers of their own:
    a tensor's sides are powers of two, a tile 192 columns wide is two tensors. JOINED: they lie after the
    others in one ring, for an instruction that reads them all (`any_width`).
    """

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    extra_desc: tma.tensor_descriptor  # B again, EXTRA_N columns wide; b_desc itself where EXTRA_N is 0
    a_bufs: gl.shared_memory_descriptor
    b_bufs: gl.shared_memory_descriptor
    extra_bufs: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    config: Config
    NUM_BUFFERS: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(a_desc, b_desc, extra_desc, config):
        """Allocate the ring."""
        NUM_BUFFERS: gl.constexpr = config.NUM_BUFFERS
        BLOCK_N: gl.constexpr = config.BLOCK_N
        EXTRA_N: gl.constexpr = config.EXTRA_N
        BLOCK_K: gl.constexpr = config.BLOCK_K
        TRANS_B: gl.constexpr = config.TRANS_B
        JOINED: gl.constexpr = config.JOINED
        a_bufs = allocate_ring(a_desc, NUM_BUFFERS, BLOCK_K if config.TRANS_A else config.BLOCK_M)
        if JOINED:
            along_k: gl.constexpr = TRANS_B and not config.TRANS_A
            gl.static_assert(along_k and BLOCK_K * config.ITEM_BYTES == 128, "what `any_width` can read")
            b_bufs = allocate_ring(b_desc, NUM_BUFFERS * (BLOCK_N + EXTRA_N) // SWIZZLED_N, SWIZZLED_N)
        else:
            b_bufs = allocate_ring(b_desc, NUM_BUFFERS, BLOCK_N if TRANS_B else BLOCK_K)
        extra_bufs = b_bufs
        if EXTRA_N > 0 and not JOINED:
            extra_bufs = allocate_ring(extra_desc, NUM_BUFFERS, EXTRA_N if TRANS_B else BLOCK_K)
        full = allocate_mbarriers(NUM_BUFFERS)
        empty = allocate_mbarriers(NUM_BUFFERS)
        for i in gl.static_range(NUM_BUFFERS):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
        return OperandRing(
            *(a_desc, b_desc, extra_desc, a_bufs, b_bufs, extra_bufs),
            *(full, empty, config, NUM_BUFFERS),
        )

    @gluon.jit
    def load(self, step, row, col, k):
        """Start the copies of k block `k` of the tile at (row, col), once the slot has been read.

        TMA counts the zeros beyond A or B like other bytes, so each load completes `full`.
        """
        slot = ring_slot(step, self.NUM_BUFFERS)
        bar = self.full.index(slot)
        mbarrier.wait(self.empty.index(slot), ring_phase(step, self.NUM_BUFFERS) ^ 1)
        a_nbytes: gl.constexpr = self.a_desc.block_type.nbytes
        inner = k * self.config.BLOCK_K
        b_nbytes: gl.constexpr = self.b_desc.block_type.nbytes
        if self.config.JOINED:
            mbarrier.expect(bar, a_nbytes + self.joined_nbytes())
        elif self.config.EXTRA_N > 0:
            mbarrier.expect(bar, a_nbytes + b_nbytes + self.extra_desc.block_type.nbytes)
        else:
            mbarrier.expect(bar, a_nbytes + b_nbytes)
        _load_block(self.a_desc, self.a_bufs.index(slot), row, inner, bar, self.config.TRANS_A)
        if self.config.JOINED:
            load_columns(self, slot, col, inner, bar)
        else:
            BY_COLUMNS: gl.constexpr = not self.config.TRANS_B
            _load_block(self.b_desc, self.b_bufs.index(slot), col, inner, bar, BY_COLUMNS)
            if self.config.EXTRA_N > 0:
                further = col + self.config.BLOCK_N
                _load_block(self.extra_desc, self.extra_bufs.index(slot), further, inner, bar, BY_COLUMNS)

    @gluon.jit
    def wait_full(self, step):
        """Return when the step's k block is there."""
        slot = ring_slot(step, self.NUM_BUFFERS)
        mbarrier.wait(self.full.index(slot), ring_phase(step, self.NUM_BUFFERS))

    @gluon.jit
    def give_back(self, step, pred=True):
        """Give the slot of the step back: it has been read."""
        slot = ring_slot(step, self.NUM_BUFFERS)
        mbarrier.arrive(self.empty.index(slot), count=1, pred=pred)

    @gluon.jit
    def empty_bar(self, step):
        """Return the mbarrier on which the hardware arrives when it has read the step."""
        return self.empty.index(ring_slot(step, self.NUM_BUFFERS))

    @gluon.jit
    def _block(self, bufs, step, TRANS: gl.constexpr):
        buf = bufs.index(ring_slot(step, self.NUM_BUFFERS))
        if TRANS:
            buf = buf.permute((1, 0))
        return buf

    @gluon.jit
    def a(self, step):
        """Return the step's block of A, [BLOCK_M, BLOCK_K]."""
        return self._block(self.a_bufs, step, self.config.TRANS_A)

    @gluon.jit
    def b(self, step):
        """Return the step's block of B, [BLOCK_K, BLOCK_N]."""
        return self._block(self.b_bufs, step, self.config.TRANS_B)

    @gluon.jit
    def b_extra(self, step):
        """Return the step's block of B's further columns, [BLOCK_K, EXTRA_N]."""
        return self._block(self.extra_bufs, step, self.config.TRANS_B)

    @gluon.jit
    def b_offset(self, step):
        """Return how many bytes after the ring's beginning the step's block of B begins; JOINED only."""
        return ring_slot(step, self.NUM_BUFFERS) * self.joined_nbytes()

    @gluon.jit
    def joined_nbytes(self):
        """Return the size of a k block of B; JOINED only."""
        COLUMN_NBYTES: gl.constexpr = self.b_desc.block_type.nbytes // self.b_desc.block_type.shape[0]
        NBYTES: gl.constexpr = (self.config.BLOCK_N + self.config.EXTRA_N) * COLUMN_NBYTES
        return NBYTES
