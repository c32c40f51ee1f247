"""The scheduler parts: which tile comes next, asked by all partitions of a kernel for themselves.

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
from ..tiles import claim_number, reset_counter, scheduled_number


@aggregate
class StaticSchedule:
    tiles: gl.tensor
    SCHEDULE: gl.constexpr
    CHIPLETS: gl.constexpr
    CHUNK: gl.constexpr

    @staticmethod
    @gluon.jit
    def create(
        counter_ptr,
        tiles,
        SCHEDULE: gl.constexpr,
        CHIPLETS: gl.constexpr,
        CHUNK: gl.constexpr,
        SLOTS: gl.constexpr,
        READERS: gl.constexpr,
    ):
        return StaticSchedule(tiles, SCHEDULE, CHIPLETS, CHUNK)

    @gluon.jit
    def publish(self, visit):
        """Return the number of this program's tile at this visit; not below `tiles` when there is none."""
        return self.take(visit)

    @gluon.jit
    def take(self, visit):
        """Return what the loader's `publish` of this visit returns."""
        return scheduled_number(
            visit,
            gl.program_id(0),
            gl.num_programs(0),
            self.tiles,
            self.SCHEDULE,
            self.CHIPLETS,
            self.CHUNK,
        )

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
    def create(
        counter_ptr,
        tiles,
        SCHEDULE: gl.constexpr,
        CHIPLETS: gl.constexpr,
        CHUNK: gl.constexpr,
        SLOTS: gl.constexpr,
        READERS: gl.constexpr,
    ):
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
        """Return what the loader's `publish` of this visit returns, once it has."""
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
