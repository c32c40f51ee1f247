"""Hopper's MMA part for tiles of any width, a multiple of 8: one instruction for all columns (`JOINED`).

A tensor's sides are powers of two, so `mma.Wgmma` multiplies 144 columns as 128 and 16. An instruction for 16
columns takes as long as one for 34 to 52 would, as it reads all rows. The hardware has instructions for any
multiple of 8 columns. Here they are written in PTX (`inline_asm`, since Triton 3.9):

    B in shared memory   a slot of the ring has the tile's columns, not a power of two of them, so that the
                         ring is as deep as it can be. TMA brings boxes of a power of two columns: some for
                         BLOCK_N, and smaller ones for EXTRA_N
    the accumulator      tensors of 8 columns, "strips"; a thread has 4 registers of each 64 rows of a strip,
                         in the order of the instruction's operands

Descriptors of shared memory and the order of registers: PTX ISA, `wgmma.mma_async`, "matrix descriptor".
Along K an operand has 128 bytes, with TMA's swizzle of as many; an instruction multiplies 32 of them.

A store takes STORE_N columns, which need not divide the tile's: the last piece then begins earlier, and
columns of both pieces are stored twice, with the same values. The last k block of a tile may reach beyond K,
where TMA reads zeros: if a quarter or half of it is enough, only one or two of its four instructions start.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..compat import aggregate, inline_asm

STRIP_N = gl.constexpr(8)  # the narrowest instruction
SWIZZLED_N = gl.constexpr(8)  # columns after which the swizzle repeats: slots begin at multiples of it

SWIZZLE_128 = 1 << 62
ROW_GROUP = (1024 >> 4) << 32  # 8 rows of 128 bytes; in units of 16 bytes, like all addresses there
UNUSED = 1 << 16  # the distance along K, which a swizzled operand of one swizzle's width has not
STEP_OFFSET = 32 >> 4  # from an instruction's part of K to the next
STEPS_OF_A_BLOCK = gl.constexpr(4)  # of K
WARPGROUP_ROWS = 64 * 128 >> 4  # bytes of a warpgroup's rows


@gluon.constexpr_function
def piece_start(i, store_n, width):
    """Return the column of a tile at which a stored piece begins: the last one ends with the tile."""
    return min(i * store_n, width - store_n)


@gluon.constexpr_function
def _products(width, dtype, warpgroups, reps, steps):
    """Return the PTX that starts a k block, then waits until all products before it are complete.

    $0 and following are the sums; then come A's address, B's, and the offset of B's block in bytes. `reps`:
    each warpgroup has so many times 64 rows, 64 * warpgroups apart. `steps`: so many times 32 bytes of K are
    multiplied, from the first on.
    """
    strips, is_byte = width // 8, dtype == "e4m3"
    depth, by_rows = (32, "") if is_byte else (16, ", 0, 0")  # only operands of 2 bytes can lie the other way
    registers = 4 * strips * reps
    lines = [".reg .b32 a, b, rows;", ".reg .b64 left, right;", ".reg .pred adds;", "setp.eq.u32 adds, 0, 0;"]
    lines += [f"bfe.u32 a, ${registers}, 4, 14;"]
    lines += [f"add.u32 b, ${registers + 1}, ${registers + 2};", "bfe.u32 b, b, 4, 14;"]
    if warpgroups > 1:  # then the partition begins with thread 0
        lines += [
            "mov.u32 rows, %tid.x;",
            "shr.u32 rows, rows, 7;",
            f"mad.lo.u32 a, rows, {WARPGROUP_ROWS}, a;",
        ]
    lines += ["wgmma.fence.sync.aligned;"]
    for step in range(steps):
        for rep in range(reps):
            first = [4 * (strip * reps + rep) for strip in range(strips)]
            sums = ", ".join(f"${at + i}" for at in first for i in range(4))
            a_offset = step * STEP_OFFSET + rep * warpgroups * WARPGROUP_ROWS
            for name, start, offset in (("left", "a", a_offset), ("right", "b", step * STEP_OFFSET)):
                lines += [f"add.u32 rows, {start}, {offset};", f"cvt.u64.u32 {name}, rows;"]
                lines += [f"or.b64 {name}, {name}, {SWIZZLE_128 | ROW_GROUP | UNUSED};"]
            shape = f"m64n{width}k{depth}.f32.{dtype}.{dtype}"
            lines += [f"wgmma.mma_async.sync.aligned.{shape} {{{sums}}}, left, right, adds, 1, 1{by_rows};"]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 1;"]
    return "\n".join(["{", *lines, "}"])


@gluon.constexpr_function
def _in_place(registers, numbers):
    """Return the constraints of PTX that updates registers; further operands come before them."""
    return ",".join([*["=f"] * registers, *["r"] * numbers, *map(str, range(registers))])


@gluon.constexpr_function
def _strip(block_m, warps):
    """Return the type of 8 columns of an accumulator, its rows divided among the warps."""
    layout = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8, 16])
    return gl.distributed_type(gl.float32, [block_m, 8], layout)


@gluon.constexpr_function
def _name_in_ptx(dtype, item_bytes):
    if item_bytes == 1:
        return "e4m3"
    return "bf16" if dtype == gl.bfloat16 else "f16"


@gluon.constexpr_function
def _times(kind, count):
    return (kind,) * count


@gluon.jit
def _side_by_side(strips, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Return so many strips, a power of two, as one tensor. A thread keeps its columns: no data moves."""
    if COUNT == 1:
        columns = strips[FIRST]
    else:
        left = _side_by_side(strips, FIRST, COUNT // 2)
        right = _side_by_side(strips, FIRST + COUNT // 2, COUNT // 2)
        both = gl.join(left, right).permute((0, 2, 1))
        columns = both.reshape((left.shape[0], 2 * left.shape[1]))
    return columns


@aggregate
class WgmmaAnyWidth:
    end_steps: gl.tensor  # how many instructions a tile's last k block needs: 1 to STEPS_OF_A_BLOCK
    BLOCK_M: gl.constexpr
    WIDTH: gl.constexpr
    DTYPE: gl.constexpr  # of A and B, as PTX spells it

    @staticmethod
    @gluon.jit
    def create(end_steps, dtype: gl.constexpr, config):
        width: gl.constexpr = config.BLOCK_N + config.EXTRA_N
        return WgmmaAnyWidth(end_steps, config.BLOCK_M, width, _name_in_ptx(dtype, config.ITEM_BYTES))

    @gluon.jit
    def begin(self, visit):
        """Return zeros."""
        strip: gl.constexpr = _strip(self.BLOCK_M, gl.num_warps())
        zeros = gl.zeros((self.BLOCK_M, STRIP_N), gl.float32, strip.layout)
        strips = (zeros,) * (self.WIDTH // STRIP_N)
        return AnyWidthAccumulator(strips, self)

    @gluon.jit
    def await_result(self, visit):
        """Nothing to wait for: `end` has."""

    @gluon.jit
    def drained(self, visit):
        """Nobody else uses the registers."""


@aggregate
class AnyWidthAccumulator:
    strips: gl.tuple  # of [BLOCK_M, 8]
    mma: WgmmaAnyWidth

    @gluon.jit
    def multiply(self, operands, step, k):
        """Start the step's k block, then give back the slot of the block before it; see `mma`."""
        return self.start(operands, step, k, STEPS_OF_A_BLOCK)

    @gluon.jit
    def multiply_last(self, operands, step, k):
        """Do so for the last k block of a tile: multiply few of the zeros after K."""
        accumulator = self
        if self.mma.end_steps <= 1:
            accumulator = self.start(operands, step, k, 1)
        elif self.mma.end_steps <= 2:
            accumulator = self.start(operands, step, k, 2)
        else:
            accumulator = self.start(operands, step, k, STEPS_OF_A_BLOCK)
        return accumulator

    @gluon.jit
    def start(self, operands, step, k, STEPS: gl.constexpr):
        """Start so many steps of a k block, then give back the slot of the block before it."""
        COUNT: gl.constexpr = self.mma.WIDTH // STRIP_N
        REPS: gl.constexpr = self.mma.BLOCK_M // (16 * gl.num_warps())
        strip: gl.constexpr = _strip(self.mma.BLOCK_M, gl.num_warps())
        addresses = (operands.a(step), operands.b_bufs, operands.b_offset(step))
        strips = inline_asm(
            _products(self.mma.WIDTH, self.mma.DTYPE, gl.num_warps() // 4, REPS, STEPS),
            _in_place(4 * REPS * COUNT, 3),
            addresses + self.strips,
            _times(strip, COUNT),
        )
        operands.give_back(step + operands.NUM_BUFFERS - 1, pred=k > 0)
        return AnyWidthAccumulator(strips, self.mma)

    @gluon.jit
    def end(self, operands, step):
        """Wait for the last k block and give its slot back; `step` is the one behind it."""
        COUNT: gl.constexpr = self.mma.WIDTH // STRIP_N
        REPS: gl.constexpr = self.mma.BLOCK_M // (16 * gl.num_warps())
        strip: gl.constexpr = _strip(self.mma.BLOCK_M, gl.num_warps())
        strips = inline_asm(
            "wgmma.wait_group.sync.aligned 0;",
            _in_place(4 * REPS * COUNT, 0),
            self.strips,
            _times(strip, COUNT),
        )
        operands.give_back(step + operands.NUM_BUFFERS - 1)
        return AnyWidthAccumulator(strips, self.mma)

    @gluon.jit
    def piece(self, i: gl.constexpr, STORE_N: gl.constexpr):
        """Return STORE_N columns, from `piece_start` on."""
        first: gl.constexpr = piece_start(i, STORE_N, self.mma.WIDTH) // STRIP_N
        return _side_by_side(self.strips, first, STORE_N // STRIP_N)
