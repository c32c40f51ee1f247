"""The warp-specialised body of `elementwise_add`: one warp loads by TMA, others add, one stores by TMA.

    load (1 warp)            add (4 warps)                       store (1 warp)
    wait empty[s]      <---- fence, arrive empty[s]
    TMA a, b -> full[s] ---> wait full[s], read
                             wait out_empty[t]           <------ arrive out_empty[t]
                             write, fence, arrive out_full[t] -> wait out_full[t], TMA, wait till it is read

Each partition visits the same blocks in the same order and counts them alike. Nothing can stop: the loader
waits for blocks that have been read, the adder for loads that were started and for stores that the storer has
started before, the storer for blocks that the adder writes, and the first use of a slot for nobody (`rings`).
The fences: TMA goes through the async proxy. It may overwrite a slot only after the reads that it cannot see
(so the adder fences before it gives the slot back), and read one only after the writes (so it fences again).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..compat import tma_load, tma_store
from ..rings import ring_phase, ring_slot

MOVER_REGISTERS = gl.constexpr(24)  # the least that setmaxnreg takes


@gluon.jit
def _load_blocks(a_desc, b_desc, a_bufs, b_bufs, full, empty, blocks, blocks_n):
    BUFFERS: gl.constexpr = a_bufs.shape[0]
    ROWS: gl.constexpr = a_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = a_desc.block_type.shape[1]
    visit = 0
    block = gl.program_id(0)
    while block < blocks:
        slot = ring_slot(visit, BUFFERS)
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), ring_phase(visit, BUFFERS) ^ 1)
        mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        place = [block // blocks_n * ROWS, block % blocks_n * COLUMNS]
        tma_load(a_desc, place, bar, a_bufs.index(slot))
        tma_load(b_desc, place, bar, b_bufs.index(slot))
        visit += 1
        block += gl.num_programs(0)


@gluon.jit
def _add_blocks(a_bufs, b_bufs, out_bufs, full, empty, out_full, out_empty, blocks):
    BUFFERS: gl.constexpr = a_bufs.shape[0]
    OUT_BUFFERS: gl.constexpr = out_bufs.shape[0]
    # A warp reads a row's neighbouring elements, 16 bytes a thread.
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    visit = 0
    block = gl.program_id(0)
    while block < blocks:
        slot = ring_slot(visit, BUFFERS)
        mbarrier.wait(full.index(slot), ring_phase(visit, BUFFERS))
        a = a_bufs.index(slot).load(layout)
        b = b_bufs.index(slot).load(layout)
        fence_async_shared()
        mbarrier.arrive(empty.index(slot), count=1)
        total = (a.to(gl.float32) + b.to(gl.float32)).to(out_bufs.dtype)
        out_slot = ring_slot(visit, OUT_BUFFERS)
        mbarrier.wait(out_empty.index(out_slot), ring_phase(visit, OUT_BUFFERS) ^ 1)
        out_bufs.index(out_slot).store(total)
        fence_async_shared()
        mbarrier.arrive(out_full.index(out_slot), count=1)
        visit += 1
        block += gl.num_programs(0)


@gluon.jit
def _store_blocks(out_desc, out_bufs, out_full, out_empty, blocks, blocks_n):
    OUT_BUFFERS: gl.constexpr = out_bufs.shape[0]
    ROWS: gl.constexpr = out_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = out_desc.block_type.shape[1]
    visit = 0
    block = gl.program_id(0)
    while block < blocks:
        slot = ring_slot(visit, OUT_BUFFERS)
        mbarrier.wait(out_full.index(slot), ring_phase(visit, OUT_BUFFERS))
        tma_store(out_desc, [block // blocks_n * ROWS, block % blocks_n * COLUMNS], out_bufs.index(slot))
        # The oldest of the stores in flight has been read out of its slot: the next one to be written.
        tma.store_wait(pendings=OUT_BUFFERS - 1)
        oldest = ring_slot(visit + 1, OUT_BUFFERS)
        mbarrier.arrive(out_empty.index(oldest), count=1, pred=visit >= OUT_BUFFERS - 1)
        visit += 1
        block += gl.num_programs(0)
    tma.store_wait(pendings=0)  # shared memory must outlive the stores that read it


@gluon.jit
def warp_specialized_add(
    a_desc,
    b_desc,
    out_desc,
    rows,
    columns,
    DTYPE: gl.constexpr,  # for the key of the tuning
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    BUFFERS: gl.constexpr,
    OUT_BUFFERS: gl.constexpr,
):
    """Write out = a + b, blocks of ROWS x COLUMNS."""
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [BUFFERS, ROWS, COLUMNS], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [BUFFERS, ROWS, COLUMNS], b_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [OUT_BUFFERS, ROWS, COLUMNS], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    out_full = gl.allocate_shared_memory(gl.int64, [OUT_BUFFERS, 1], mbarrier.MBarrierLayout())
    out_empty = gl.allocate_shared_memory(gl.int64, [OUT_BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(OUT_BUFFERS):
        mbarrier.init(out_full.index(i), count=1)
        mbarrier.init(out_empty.index(i), count=1)
    fence_async_shared()  # TMA sees the mbarriers
    blocks_n = gl.cdiv(columns, COLUMNS)
    blocks = gl.cdiv(rows, ROWS) * blocks_n
    gl.warp_specialize(
        [
            (_add_blocks, (a_bufs, b_bufs, out_bufs, full, empty, out_full, out_empty, blocks)),
            (_load_blocks, (a_desc, b_desc, a_bufs, b_bufs, full, empty, blocks, blocks_n)),
            (_store_blocks, (out_desc, out_bufs, out_full, out_empty, blocks, blocks_n)),
        ],
        [1, 1],
        [MOVER_REGISTERS, MOVER_REGISTERS],
    )
