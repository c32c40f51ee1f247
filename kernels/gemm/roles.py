"""The roles of the Gluon bodies for Hopper and Blackwell, and the warps that play them.

`load` fills the ring of operands; `work` multiplies, stores, or both. A variant divides them among warps:

    pipelined             one tile a program | work alone: its warps also start the loads,
    persistent            many tiles         |   NUM_BUFFERS - 1 k blocks ahead, up to the tile's end
    persistent_pipelined  many tiles         |   or across it: the next tile is loaded under the epilogue
    cooperative           load (1 warp)      | work: all other warps share a tile
    pingpong              load (1 warp)      | work, work: every second tile each; one multiplies while
                                             |   the other stores
    cooperative, Blackwell  load (1 warp)    | work multiplying (1 warp) | work storing

Where kernels or peers outside wait for stored tiles, or the other way round, a further role, `notify` (1
warp), runs beside these.

The `problem` is the part that knows the tiles. It has `tiles`, their number, and

    k_blocks                      the k blocks of each tile: one or more
    place(number)                 a tile's first row of A and of C, and its first column
    end_steps()                   JOINED only: how many instructions along K a tile's last k block needs
    await_rows(number, known)     return once those rows of A may be read. `load` alone calls it, once a tile,
                                  and passes its last result, at first 0
    loaded()                      `load` has started its last load
    store(number, epilogue, ...)  the sums are complete: have the epilogue start the tile's stores

and with `notify`, which needs a dynamic schedule:

    stored_before(visit)          a storing partition is about to store that visit, or at its end: tell
                                  `notify` once its earlier stores are in memory
    notify(number, visit, known)  `notify` is at this tile, which may not be computed yet; `known` as in
                                  `await_rows`
    notified()                    `notify` has seen all tiles

Why every wait inside a launch ends: docs/protocol.md, [Note: roles end].

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..compat import aggregate
from ..rings import ring_phase
from .any_width import WgmmaAnyWidth
from .epilogue import StoreBuffers
from .mma import Tcgen05, Wgmma
from .operands import OperandRing, allocate_mbarriers
from .problem import DynamicSchedule, StaticSchedule, slots_of_visits

LOADER_REGISTERS = gl.constexpr(24)  # the least that setmaxnreg takes; the loader is scalar code
CONSUMER_REGISTERS = gl.constexpr(240)  # 2 * 240 + 24 for each of 128 lanes: 64512 of an SM's 65536


@aggregate
class Cursor:
    """The next k block to load, in a partition that loads for itself."""

    visit: gl.tensor
    number: gl.tensor
    row: gl.tensor
    col: gl.tensor
    k: gl.tensor
    step: gl.tensor

    @staticmethod
    @gluon.jit
    def create(problem, schedule):
        number = schedule.publish(0)
        row, _row_of_c, col = problem.place(number)
        zero = gl.to_tensor(0)
        return Cursor(zero, number, row, col, zero, zero)

    @gluon.jit
    def load(self, problem, schedule, operands, last_visit):
        """Start one load, if there is one left in the tiles up to that visit; return the cursor after it."""
        visit, number, k, step = self.visit, self.number, self.k, self.step
        row, col = self.row, self.col
        if (number < problem.tiles) & (visit <= last_visit):
            operands.load(step, row, col, k)
            step += 1
            k += 1
            if k == problem.k_blocks:
                k = k * 0
                visit += 1
                number = schedule.publish(visit)
                row, _row_of_c, col = problem.place(number)
        return Cursor(visit, number, row, col, k, step)


@gluon.jit
def load(problem, schedule, operands, TAKERS: gl.constexpr):
    """Fill the ring with the k blocks of all tiles of this program."""
    step = 0
    visit = 0
    known = 0
    number = schedule.publish(0)
    while number < problem.tiles:
        known = problem.await_rows(number, known)
        row, _row_of_c, col = problem.place(number)
        for k in range(problem.k_blocks):
            operands.load(step, row, col, k)
            step += 1
        visit += 1
        number = schedule.publish(visit)
    for further in gl.static_range(1, TAKERS):  # each taker must see the end: see [Note: roles end]
        schedule.publish(visit + further)
    schedule.finish()
    problem.loaded()


@gluon.jit
def work(
    problem,
    schedule,
    operands,
    mma,
    epilogue,
    turn,
    FIRST: gl.constexpr,
    EVERY: gl.constexpr,
    DOES: gl.constexpr,
    NOTIFIES: gl.constexpr,
):
    """Multiply and store this partition's tiles: visits FIRST, FIRST + EVERY, ...

    DOES: "both", or only "multiply" or "store"; "all": also start the loads of the tile; "all_across": also
    those of the next tile, before this one is stored. NOTIFIES: `notify` runs beside.

    EVERY is 2 for ping-pong: two consumers take turns at the tensor cores. Consumer w waits for turn[w]; the
    other arrives there when it has started its last k block. At its tile j = 0, 1, ... consumer 0 needs j
    arrivals of consumer 1, which has j tiles before visit 2j: 1, 3, ..., 2j - 1. Consumer 1 needs j + 1 of
    consumer 0, which has j + 1 tiles before visit 2j + 1: 0, 2, ..., 2j.
    """
    NUM_BUFFERS: gl.constexpr = operands.NUM_BUFFERS
    LOADS: gl.constexpr = DOES == "all" or DOES == "all_across"
    step = FIRST * problem.k_blocks
    visit = gl.to_tensor(FIRST)
    cursor = visit
    if LOADS:
        cursor = Cursor.create(problem, schedule)
        if DOES == "all_across":
            for _ in gl.static_range(NUM_BUFFERS - 1):
                cursor = cursor.load(problem, schedule, operands, visit + NUM_BUFFERS)
    number = schedule.take(visit)
    while number < problem.tiles:
        cursor, step = _work_on(
            *(problem, schedule, operands, mma, epilogue, turn, cursor, number, visit, step),
            *(FIRST, EVERY, DOES, NOTIFIES),
        )
        step += (EVERY - 1) * problem.k_blocks
        visit += EVERY
        number = schedule.take(visit)
    if DOES != "multiply":
        if NOTIFIES:
            problem.stored_before(visit)
        epilogue.finish()
    if LOADS:
        schedule.finish()


@gluon.jit
def _work_on(
    problem,
    schedule,
    operands,
    mma,
    epilogue,
    turn,
    cursor,
    number,
    visit,
    step,
    FIRST: gl.constexpr,
    EVERY: gl.constexpr,
    DOES: gl.constexpr,
    NOTIFIES: gl.constexpr,
):
    """Do this partition's part of a tile, from `step` on; return the cursor and the step after it."""
    LOADS: gl.constexpr = DOES == "all" or DOES == "all_across"
    # In tiles: no less than there are buffers.
    AHEAD: gl.constexpr = operands.NUM_BUFFERS if DOES == "all_across" else 0
    if DOES != "store":
        if DOES == "all":
            for _ in gl.static_range(operands.NUM_BUFFERS - 1):
                cursor = cursor.load(problem, schedule, operands, visit)
        accumulator = mma.begin(visit)
        if EVERY == 2:
            mbarrier.wait(turn.index(FIRST), ring_phase(visit, 2) ^ (1 - FIRST))
        ENDS: gl.constexpr = 1 if operands.config.JOINED else 0  # k blocks that are multiplied in another way
        blocks = problem.k_blocks - ENDS
        for k in range(blocks):
            operands.wait_full(step)
            accumulator = accumulator.multiply(operands, step, k)
            if LOADS:
                # Into the slot of the k block before this one, under the multiplication of this.
                cursor = cursor.load(problem, schedule, operands, visit + AHEAD)
            step += 1
        if ENDS > 0:
            operands.wait_full(step)
            accumulator = accumulator.multiply_last(operands, step, blocks)
            if LOADS:
                cursor = cursor.load(problem, schedule, operands, visit + AHEAD)
            step += 1
        if EVERY == 2:
            mbarrier.arrive(turn.index(1 - FIRST), count=1)
        # Here, as it divides: no product is to wait for that.
        _row_of_a, row, col = problem.place(number)
        accumulator = accumulator.end(operands, step)
    else:
        _row_of_a, row, col = problem.place(number)
        accumulator = mma.accumulator(visit)
    if DOES != "multiply":
        mma.await_result(visit)
        if NOTIFIES:
            problem.stored_before(visit)
        problem.store(number, epilogue, accumulator, row, col, FIRST)
        mma.drained(visit)
    return cursor, step


@gluon.jit
def notify(problem, schedule):
    """Call `problem.notify` for each tile of this program, in the order of its visits."""
    visit = 0
    known = 0
    number = schedule.take(0)
    while number < problem.tiles:
        known = problem.notify(number, visit, known)
        visit += 1
        number = schedule.take(visit)
    problem.notified()


@gluon.jit
def _check(config, NOTIFIES: gl.constexpr):
    """Refuse to compile configs with parts that do not fit together."""
    if NOTIFIES:
        SPECIALIZED: gl.constexpr = config.VARIANT == "cooperative" or config.VARIANT == "pingpong"
        gl.static_assert(SPECIALIZED, "who notifies takes what a loader claims")
    WIDTH: gl.constexpr = config.BLOCK_N + config.EXTRA_N
    STORE_N: gl.constexpr = config.STORE_N
    gl.static_assert(config.NUM_BUFFERS >= 2, "a k block is loaded while another one is multiplied")
    if config.JOINED:
        gl.static_assert(not config.TENSOR_MEMORY, "for Hopper")
        gl.static_assert(STORE_N <= WIDTH, "the last piece ends with the tile")
    else:
        FILLED: gl.constexpr = config.BLOCK_N % STORE_N == 0 and config.EXTRA_N % STORE_N == 0
        gl.static_assert(FILLED, "pieces must fill the tile")
        gl.static_assert(not config.TRANS_C, "only tiles of any width have been stored by columns")


@gluon.jit
def _create_mma(problem, dtype: gl.constexpr, config):
    BLOCK_M: gl.constexpr = config.BLOCK_M
    BLOCK_N: gl.constexpr = config.BLOCK_N
    EXTRA_N: gl.constexpr = config.EXTRA_N
    if config.TENSOR_MEMORY:
        mma = Tcgen05.create(BLOCK_M, BLOCK_N, EXTRA_N)
    elif config.JOINED:
        mma = WgmmaAnyWidth.create(problem.end_steps(), dtype, config)
    else:
        mma = Wgmma.create(BLOCK_M, BLOCK_N, EXTRA_N, config.ITEM_BYTES)
    return mma


@gluon.jit
def _create_schedule(problem, counter_ptr, READERS: gl.constexpr, config):
    SLOTS: gl.constexpr = slots_of_visits(config.NUM_BUFFERS)
    if counter_ptr is None:
        schedule = StaticSchedule(problem.tiles)
    else:
        schedule = DynamicSchedule.create(counter_ptr, problem.tiles, SLOTS, READERS)
    return schedule


@gluon.jit
def run(
    problem,
    a_desc,
    b_desc,
    extra_desc,
    c_desc,
    pointwise,
    config,
    counter_ptr=None,
    NOTIFIES: gl.constexpr = False,
):
    """Multiply and store the tiles of the problem that are this program's.

    counter_ptr: int32 [2], zeros, for a dynamic schedule. NOTIFIES: beside `notify`.
    """
    _check(config, NOTIFIES)
    TENSOR_MEMORY: gl.constexpr = config.TENSOR_MEMORY
    SPECIALIZED: gl.constexpr = config.VARIANT == "cooperative" or config.VARIANT == "pingpong"
    PINGPONG: gl.constexpr = config.VARIANT == "pingpong" and not TENSOR_MEMORY

    operands = OperandRing.create(a_desc, b_desc, extra_desc, config)
    mma = _create_mma(problem, a_desc.dtype, config)
    READERS: gl.constexpr = (2 if SPECIALIZED and TENSOR_MEMORY else 1) + (1 if NOTIFIES else 0)
    schedule = _create_schedule(problem, counter_ptr, READERS, config)
    epilogue = StoreBuffers.create(c_desc, pointwise, config, 2 if PINGPONG else 1)
    turn = operands.full
    if PINGPONG:
        turn = allocate_mbarriers(2)
        for i in gl.static_range(2):
            mbarrier.init(turn.index(i), count=1)
    fence_async_shared()  # TMA and the tensor cores see the mbarriers

    if not SPECIALIZED:
        ALL: gl.constexpr = "all_across" if config.VARIANT == "persistent_pipelined" else "all"
        work(problem, schedule, operands, mma, epilogue, turn, 0, 1, ALL, NOTIFIES)
    elif TENSOR_MEMORY:
        gl.warp_specialize(
            [
                (work, (problem, schedule, operands, mma, epilogue, turn, 0, 1, "store", NOTIFIES)),
                (load, (problem, schedule, operands, 1)),
                (work, (problem, schedule, operands, mma, epilogue, turn, 0, 1, "multiply", NOTIFIES)),
            ]
            + ([(notify, (problem, schedule))] if NOTIFIES else []),
            [1, 1] + ([1] if NOTIFIES else []),
            [LOADER_REGISTERS, LOADER_REGISTERS] + ([LOADER_REGISTERS] if NOTIFIES else []),
        )
    elif PINGPONG:
        gl.warp_specialize(
            [
                (work, (problem, schedule, operands, mma, epilogue, turn, 0, 2, "both", NOTIFIES)),
                (work, (problem, schedule, operands, mma, epilogue, turn, 1, 2, "both", NOTIFIES)),
                (load, (problem, schedule, operands, 2)),
            ]
            + ([(notify, (problem, schedule))] if NOTIFIES else []),
            [4, 1] + ([1] if NOTIFIES else []),
            [CONSUMER_REGISTERS, LOADER_REGISTERS] + ([LOADER_REGISTERS] if NOTIFIES else []),
        )
    else:
        gl.warp_specialize(
            [
                (work, (problem, schedule, operands, mma, epilogue, turn, 0, 1, "both", NOTIFIES)),
                (load, (problem, schedule, operands, 1)),
            ]
            + ([(notify, (problem, schedule))] if NOTIFIES else []),
            [1] + ([1] if NOTIFIES else []),
            [LOADER_REGISTERS] + ([LOADER_REGISTERS] if NOTIFIES else []),
        )
