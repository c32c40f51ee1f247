"""The ring of operands whose rows of A lie anywhere: warps gather them, while TMA brings B.

Hopper's TMA brings boxes, no rows that are listed. So two warps copy A's rows by `cp.async`, 16 bytes a
thread, to where TMA's swizzle would have put them. A step of the ring:

    load warp      waits for `empty`, lets the gathering warps begin (`granted`), starts TMA for B
    these warps    wait for `granted`, start their copies; each thread arrives at `full` once its own are done
    multiplier     waits for `full`: the load warp's arrival with TMA's bytes, and one of each thread

`cp.async` writes through the generic proxy and the tensor cores read through the async proxy: whoever has
waited for `full` puts a proxy fence behind it, under the products of the step before.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..compat import aggregate, gather_load, tma_load
from ..gemm.operands import Config, allocate_mbarriers, allocate_ring
from ..rings import ring_phase, ring_slot

# With the load warp and eight that multiply, twelve are allotted: with more, ptxas has no registers for an
# instruction of 256 columns.
GATHER_WARPS = gl.constexpr(2)


@gluon.constexpr_function
def _over_rows(block_k, warps):
    """Return the layout in which warps copy rows: a row's 16-byte parts to neighbouring threads."""
    lanes_k = min(block_k // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes_k, lanes_k], [warps, 1], [1, 0])


@aggregate
class GatheredOperands:
    """In place of `gemm.operands.Operands`, with B one accumulator wide."""

    b_desc: tma.tensor_descriptor
    a_bufs: gl.shared_memory_descriptor
    b_bufs: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    granted: gl.shared_memory_descriptor  # the slot may be written, with rows of A that have come
    config: Config
    NUM_BUFFERS: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(b_desc, config):
        """Allocate the ring."""
        NUM_BUFFERS: gl.constexpr = config.NUM_BUFFERS
        BLOCK_M: gl.constexpr = config.BLOCK_M
        BLOCK_K: gl.constexpr = config.BLOCK_K
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], b_desc.dtype)
        a_bufs = gl.allocate_shared_memory(b_desc.dtype, [NUM_BUFFERS, BLOCK_M, BLOCK_K], layout)
        b_bufs = allocate_ring(b_desc, NUM_BUFFERS, b_desc.block_type.shape[0])
        full = allocate_mbarriers(NUM_BUFFERS)
        empty = allocate_mbarriers(NUM_BUFFERS)
        granted = allocate_mbarriers(NUM_BUFFERS)
        for i in gl.static_range(NUM_BUFFERS):
            mbarrier.init(full.index(i), count=1 + 32 * GATHER_WARPS)
            mbarrier.init(empty.index(i), count=1)
            mbarrier.init(granted.index(i), count=1)
        return GatheredOperands(b_desc, a_bufs, b_bufs, full, empty, granted, config, NUM_BUFFERS)

    @gluon.jit
    def load(self, step, row, col, k):
        """Let the step's rows be gathered and start the copy of B, once the slot has been read."""
        slot = ring_slot(step, self.NUM_BUFFERS)
        bar = self.full.index(slot)
        mbarrier.wait(self.empty.index(slot), ring_phase(step, self.NUM_BUFFERS) ^ 1)
        mbarrier.arrive(self.granted.index(slot), count=1)
        b_nbytes: gl.constexpr = self.b_desc.block_type.nbytes
        mbarrier.expect(bar, b_nbytes)
        inner = k * self.config.BLOCK_K
        if self.config.TRANS_B:
            tma_load(self.b_desc, [col, inner], bar, self.b_bufs.index(slot))
        else:
            tma_load(self.b_desc, [inner, col], bar, self.b_bufs.index(slot))

    @gluon.jit
    def rows(self):
        """Return the numbers of a tile's rows, as `gather` wants where they begin."""
        layout: gl.constexpr = _over_rows(self.config.BLOCK_K, gl.num_warps())
        return gl.arange(0, self.config.BLOCK_M, gl.SliceLayout(1, layout))

    @gluon.jit
    def gather(self, step, rows_ptr, left):
        """Start the copies of a k block, once it is granted.

        rows_ptr [BLOCK_M]: where the block begins in each row; left: how many elements the rows still have, a
        multiple of 8. Behind them zeros are written.
        """
        gl.static_assert(gl.num_warps() == GATHER_WARPS, "`full` counts their threads")
        layout: gl.constexpr = _over_rows(self.config.BLOCK_K, gl.num_warps())
        offs_k = gl.arange(0, self.config.BLOCK_K, gl.SliceLayout(0, layout))
        slot = ring_slot(step, self.NUM_BUFFERS)
        mbarrier.wait(self.granted.index(slot), ring_phase(step, self.NUM_BUFFERS))
        a_ptrs = rows_ptr[:, None] + offs_k[None, :]
        gather_load(self.a_bufs.index(slot), a_ptrs, mask=(offs_k < left)[None, :])
        async_copy.mbarrier_arrive(self.full.index(slot), increment_count=False)

    @gluon.jit
    def wait_full(self, step):
        """Return when the step's k block is there for the tensor cores."""
        slot = ring_slot(step, self.NUM_BUFFERS)
        mbarrier.wait(self.full.index(slot), ring_phase(step, self.NUM_BUFFERS))
        fence_async_shared()

    @gluon.jit
    def give_back(self, step, pred=True):
        """Say that the step has been read."""
        slot = ring_slot(step, self.NUM_BUFFERS)
        mbarrier.arrive(self.empty.index(slot), count=1, pred=pred)

    @gluon.jit
    def a(self, step):
        """Return the step's block of A, [BLOCK_M, BLOCK_K]."""
        return self.a_bufs.index(ring_slot(step, self.NUM_BUFFERS))

    @gluon.jit
    def b(self, step):
        """Return the step's block of B, [BLOCK_K, BLOCK_N]."""
        buf = self.b_bufs.index(ring_slot(step, self.NUM_BUFFERS))
        if self.config.TRANS_B:
            buf = buf.permute((1, 0))
        return buf
