"""The MMA parts: the same few calls for Hopper's and for Blackwell's tensor cores.

    begin(visit)                    the accumulator of the next tile
    accumulator.multiply(...)       start one k block; the slot of a block that is done becomes empty
    accumulator.end(...)            no more k blocks
    await_result(visit)             the sums are complete
    accumulator.piece(i, ...)       STORE_N columns of them
    drained(visit)                  the accumulator may be used again

    Wgmma      the accumulator is in registers; the warps that multiply also store. The rows of a tile that is
               two accumulators wide may pass through registers, too: shared memory is read once for both
    Tcgen05    two accumulators are in tensor memory, so one partition multiplies while another stores

`any_width` has a third one, for Hopper.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..compat import aggregate, load_accumulator
from ..rings import ring_phase, ring_slot

# ---- Hopper


# The widest further accumulator whose products take their rows from registers, where 8 warps share a tile.
# On an H200 a k block then takes 5 % less time for 128 + 32 columns, and more for 128 + 64, or with 4 warps.
WIDEST_FROM_REGISTERS = gl.constexpr(32)


@gluon.jit
def _columns(tensor, i: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the i-th COLUMNS columns. Halving keeps a thread's columns with it: no data moves."""
    HALF: gl.constexpr = tensor.shape[1] // 2
    if HALF < COLUMNS:
        columns = tensor
    else:
        left, right = tensor.reshape((tensor.shape[0], 2, HALF)).permute((0, 2, 1)).split()
        if i < HALF // COLUMNS:
            columns = _columns(left, i, COLUMNS)
        else:
            columns = _columns(right, i - HALF // COLUMNS, COLUMNS)
    return columns


@aggregate
class WgmmaAccumulator:
    main: gl.tensor  # [BLOCK_M, BLOCK_N]
    extra: gl.tensor  # [BLOCK_M, EXTRA_N]; `main` where EXTRA_N is 0
    BLOCK_N: gl.constexpr
    EXTRA_N: gl.constexpr
    FROM_REGISTERS: gl.constexpr

    @gluon.jit
    def multiply(self, operands, step, k):
        """Start the step's k block, then give back the slot of the block before it.

        One k block stays in flight, so the tensor cores never wait for the barriers. Once at most this one is
        outstanding, the one before has read its slot: in every warp, as `arrive` waits for all of them.
        """
        if self.FROM_REGISTERS:
            main, extra = self._multiply_from_registers(operands, step)
        elif self.EXTRA_N > 0:
            main = warpgroup_mma(operands.a(step), operands.b(step), self.main, is_async=True)
            extra = warpgroup_mma(operands.a(step), operands.b_extra(step), self.extra, is_async=True)
            main, extra = warpgroup_mma_wait(num_outstanding=2, deps=(main, extra))
        else:
            main = warpgroup_mma(operands.a(step), operands.b(step), self.main, is_async=True)
            main = warpgroup_mma_wait(num_outstanding=1, deps=(main,))
            extra = main
        # At k = 0 there is none to give back: `end` gave back the tile before.
        operands.give_back(step + operands.NUM_BUFFERS - 1, pred=k > 0)
        return WgmmaAccumulator(main, extra, self.BLOCK_N, self.EXTRA_N, self.FROM_REGISTERS)

    @gluon.jit
    def _multiply_from_registers(self, operands, step):
        """Start the products of a k block, half of K at a time; return when the block before it is done.

        Registers that products in flight read must not be written. Each half has registers of its own, and is
        loaded when the products of the same half of the block before are done; meanwhile the tensor cores
        work on the half between. TMA overwrites the rows after the block's `empty`, which is after these
        loads; the fence orders that for the async proxy, under the products.
        """
        HALF: gl.constexpr = operands.config.BLOCK_K // 2
        IN_A_REGISTER: gl.constexpr = 4 // operands.config.ITEM_BYTES
        rows_of_main: gl.constexpr = gl.DotOperandLayout(0, self.main.type.layout, IN_A_REGISTER)
        rows_of_extra: gl.constexpr = gl.DotOperandLayout(0, self.extra.type.layout, IN_A_REGISTER)
        main, extra = self.main, self.extra
        for half in gl.static_range(2):
            main, extra = warpgroup_mma_wait(num_outstanding=2, deps=(main, extra))
            rows = operands.a(step).slice(half * HALF, HALF, 1).load(rows_of_main)
            if half == 1:
                fence_async_shared()
            main = warpgroup_mma(rows, operands.b(step).slice(half * HALF, HALF, 0), main, is_async=True)
            rows = gl.convert_layout(rows, rows_of_extra)  # the same registers
            columns = operands.b_extra(step).slice(half * HALF, HALF, 0)
            extra = warpgroup_mma(rows, columns, extra, is_async=True)
        return warpgroup_mma_wait(num_outstanding=4, deps=(main, extra))

    @gluon.jit
    def end(self, operands, step):
        """Wait for the last k block and give its slot back; `step` is the one behind it."""
        if self.EXTRA_N > 0:
            main, extra = warpgroup_mma_wait(num_outstanding=0, deps=(self.main, self.extra))
        else:
            main = warpgroup_mma_wait(num_outstanding=0, deps=(self.main,))
            extra = main
        operands.give_back(step + operands.NUM_BUFFERS - 1)
        return WgmmaAccumulator(main, extra, self.BLOCK_N, self.EXTRA_N, self.FROM_REGISTERS)

    @gluon.jit
    def piece(self, i: gl.constexpr, STORE_N: gl.constexpr):
        """Return columns i * STORE_N and following of the tile."""
        FROM_MAIN: gl.constexpr = self.BLOCK_N // STORE_N
        if i < FROM_MAIN:
            columns = _columns(self.main, i, STORE_N)
        else:
            columns = _columns(self.extra, i - FROM_MAIN, STORE_N)
        return columns


@gluon.constexpr_function
def _rows_over_warps(columns, warps, item_bytes):
    """Return the layout of an accumulator with its rows divided among the warps."""
    shape = [16, columns, 32 // item_bytes]
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=shape)


@aggregate
class Wgmma:
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    EXTRA_N: gl.constexpr
    FROM_REGISTERS: gl.constexpr
    ITEM_BYTES: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, EXTRA_N: gl.constexpr, ITEM_BYTES: gl.constexpr):
        narrow: gl.constexpr = EXTRA_N > 0 and EXTRA_N <= WIDEST_FROM_REGISTERS
        return Wgmma(BLOCK_M, BLOCK_N, EXTRA_N, narrow and gl.num_warps() == 8, ITEM_BYTES)

    @gluon.jit
    def begin(self, visit):
        """Return zeros, spread over the warps of this partition; each warpgroup has whole rows."""
        layout: gl.constexpr = _rows_over_warps(self.BLOCK_N, gl.num_warps(), self.ITEM_BYTES)
        main = gl.zeros((self.BLOCK_M, self.BLOCK_N), gl.float32, layout)
        extra = main
        if self.EXTRA_N > 0:
            extra_layout: gl.constexpr = _rows_over_warps(self.EXTRA_N, gl.num_warps(), self.ITEM_BYTES)
            extra = gl.zeros((self.BLOCK_M, self.EXTRA_N), gl.float32, extra_layout)
        return WgmmaAccumulator(main, extra, self.BLOCK_N, self.EXTRA_N, self.FROM_REGISTERS)

    @gluon.jit
    def await_result(self, visit):
        """Nothing to wait for: `end` has."""

    @gluon.jit
    def drained(self, visit):
        """Nobody else uses the registers."""


# ---- Blackwell


@aggregate
class Tcgen05Accumulator:
    memory: tensor_memory_descriptor  # [BLOCK_M, BLOCK_N]
    ready: gl.shared_memory_descriptor

    @gluon.jit
    def multiply(self, operands, step, k):
        """Start the step's k block; the hardware arrives at the slot's `empty` when it has read it."""
        tcgen05_mma(operands.a(step), operands.b(step), self.memory, use_acc=k > 0)
        tcgen05_commit(operands.empty_bar(step))
        return self

    @gluon.jit
    def end(self, operands, step):
        """Let the hardware arrive at `ready` when all k blocks are done."""
        tcgen05_commit(self.ready)
        return self

    @gluon.jit
    def piece(self, i: gl.constexpr, STORE_N: gl.constexpr):
        """Return columns i * STORE_N and following of the tile."""
        return load_accumulator(self.memory.slice(i * STORE_N, STORE_N))


@aggregate
class Tcgen05:
    memory: tensor_memory_descriptor  # [2, BLOCK_M, BLOCK_N]: all of an SM's at 128 x 256
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @staticmethod
    @gluon.jit
    def create(BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, EXTRA_N: gl.constexpr):
        gl.static_assert(EXTRA_N == 0, "tiles of two widths are for accumulators in registers")
        layout: gl.constexpr = TensorMemoryLayout([BLOCK_M, BLOCK_N], col_stride=1)
        memory = allocate_tensor_memory(gl.float32, [2, BLOCK_M, BLOCK_N], layout)
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
        return Tcgen05(memory, ready, empty)

    @gluon.jit
    def accumulator(self, visit):
        """Return the accumulator of this visit's tile."""
        slot = ring_slot(visit, 2)
        return Tcgen05Accumulator(self.memory.index(slot), self.ready.index(slot))

    @gluon.jit
    def begin(self, visit):
        """Return the accumulator, once the tile before the last has been read out of it."""
        mbarrier.wait(self.empty.index(ring_slot(visit, 2)), ring_phase(visit, 2) ^ 1)
        return self.accumulator(visit)

    @gluon.jit
    def await_result(self, visit):
        """Return when the tile's sums are complete."""
        mbarrier.wait(self.ready.index(ring_slot(visit, 2)), ring_phase(visit, 2))

    @gluon.jit
    def drained(self, visit):
        """Let the accumulator be used again: every warp has it in registers."""
        mbarrier.arrive(self.empty.index(ring_slot(visit, 2)), count=1)
