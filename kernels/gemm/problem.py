"""The tiles of a plain product (`Problem`), and the schedulers: which tile comes next.

    StaticSchedule     arithmetic: every partition computes the number of a visit
    DynamicSchedule    a counter in global memory: the loading partition claims numbers and passes them on
                       through a ring in shared memory

The loader calls `publish(visit)` for visits 0, 1, 2, ... and `finish` at its end; the others `take(visit)`.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..compat import aggregate
from ..rings import ring_phase, ring_slot
from ..tiles import claim_number, grouped_tile, reset_counter
from .any_width import STEPS_OF_A_BLOCK
from .operands import Config

# Elements of 2 bytes. A TMA store that begins elsewhere in a row is an illegal instruction on an H200.
ALIGNED = gl.constexpr(8)


@gluon.constexpr_function
def slots_of_visits(num_buffers):
    """Return how many visits the loader may publish before all partitions have taken the first of them.

    A partition that loads for itself publishes up to `num_buffers` before it takes the first. With fewer
    slots the loader would wait for takers that wait for it: see [Note: roles end].
    """
    return num_buffers + 2


@aggregate
class StaticSchedule:
    tiles: gl.tensor

    @gluon.jit
    def publish(self, visit):
        """Return the number of this program's tile at this visit; not below `tiles` when there is none."""
        return self.take(visit)

    @gluon.jit
    def take(self, visit):
        """Return the number that the loader publishes for this visit."""
        return gl.program_id(0) + visit * gl.num_programs(0)

    @gluon.jit
    def finish(self):
        """Nothing to put back."""


@aggregate
class DynamicSchedule:
    counter_ptr: gl.tensor
    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    tiles: gl.tensor
    SLOTS: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(counter_ptr, tiles, SLOTS: gl.constexpr, READERS: gl.constexpr):
        """Allocate the ring; each of READERS partitions takes every number that is meant for it."""
        numbers = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
        full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLOTS):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=READERS)
        return DynamicSchedule(counter_ptr, numbers, full, empty, tiles, SLOTS)

    @gluon.jit
    def publish(self, visit):
        """Claim the next number, pass it on and return it; not below `tiles` when there is none."""
        slot = ring_slot(visit, self.SLOTS)
        mbarrier.wait(self.empty.index(slot), ring_phase(visit, self.SLOTS) ^ 1)
        number = claim_number(self.counter_ptr)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.numbers.index(slot).store(gl.full([1], number, gl.int32, layout))
        mbarrier.arrive(self.full.index(slot), count=1)
        return number

    @gluon.jit
    def take(self, visit):
        """Wait for the number that the loader publishes for this visit, and return it."""
        slot = ring_slot(visit, self.SLOTS)
        mbarrier.wait(self.full.index(slot), ring_phase(visit, self.SLOTS))
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        number = gl.max(self.numbers.index(slot).load(layout), 0)
        mbarrier.arrive(self.empty.index(slot), count=1)
        return number

    @gluon.jit
    def finish(self):
        """Let the last program of the launch put the counter back."""
        reset_counter(self.counter_ptr, gl.num_programs(0))


@gluon.jit
def last_start(size, block, INSIDE_ROWS: gl.constexpr):
    """Return the last start of a tile: it then ends with the matrix, if TMA can begin there, else `size`.

    INSIDE_ROWS: tiles begin inside rows of memory. No tile begins at `size`, so none is moved.
    """
    last = max(size - block, 0)
    if INSIDE_ROWS:
        last = gl.where(size % ALIGNED == 0, last, size)
    return last


@gluon.jit
def end_steps_of(k, k_blocks, config):
    """Return how many of the STEPS_OF_A_BLOCK instructions the last one of so many k blocks needs."""
    INSTRUCTION_K: gl.constexpr = config.BLOCK_K // STEPS_OF_A_BLOCK
    return gl.cdiv(k - (k_blocks - 1) * config.BLOCK_K, INSTRUCTION_K)


@aggregate
class Problem:
    """The tiles of A @ B."""

    tiles_m: gl.tensor
    tiles_n: gl.tensor
    tiles: gl.tensor
    last_row: gl.tensor  # no tile begins after it, nor after the next
    last_col: gl.tensor
    k: gl.tensor
    k_blocks: gl.tensor
    config: Config

    @gluon.jit
    def place(self, number):
        """Return the tile's first row of A and of C, and first column; without such a tile, the last one's.

        A tile that would reach beyond the last row or column is moved back to end there, if TMA can begin
        there: loads from beyond are slow, see `operands`. Where it overlaps the tile before, both compute and
        store the same values, as they add up the k blocks in the same order. (For a number beyond the last
        tile the arithmetic would divide by a group of no rows.)
        """
        number = min(number, self.tiles - 1)
        pid_m, pid_n = grouped_tile(number, self.tiles_m, self.tiles_n, self.config.GROUP_M)
        row = min(pid_m * self.config.BLOCK_M, self.last_row)
        col = min(pid_n * (self.config.BLOCK_N + self.config.EXTRA_N), self.last_col)
        return row, row, col

    @gluon.jit
    def end_steps(self):
        """Return how many of the STEPS_OF_A_BLOCK instructions the last k block of a tile needs."""
        return end_steps_of(self.k, self.k_blocks, self.config)

    @gluon.jit
    def await_rows(self, number, known):
        """All of A is there."""
        return known

    @gluon.jit
    def loaded(self):
        """Nobody waits for that."""

    @gluon.jit
    def store(self, number, epilogue, accumulator, row, col, STORER: gl.constexpr):
        """The accumulator is the tile."""
        epilogue.store(accumulator, row, col, STORER)
