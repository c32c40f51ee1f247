"""The device side of `GemmReduceScatter` on Hopper and Blackwell: the roles of `gemm` hand over chunks.

    load      claims tiles one by one, in the order of their chunks: for peers, `rank` + 1 first, then own
    work      multiplies, scales (in fp8) and stores. A tile for a peer goes by TMA to the partial sums. To a
              tile of the own chunk it adds the peers' sums, in float32, before it rounds
    notify    counts the tiles for peers that are in memory and hands over complete chunks. In the own chunk
              it waits for the peers' sums, a part of the rows at a time, and lets `work` go on
    STORES    a tile for a peer goes into that peer's memory, by plain stores, once `notify` has seen the
              permits of all; it counts the tile and tells the peer: see [Note: rows leave with the tile].
              It has not run between GPUs
    ragged    as in `ag_gemm`: a last row or column of tiles is moved back to end with its chunk. Where two
              tiles overlap both compute the same sums, to the bit

Why `notify` may count a tile, and waits for no other program: docs/protocol.md, Inside a Gluon kernel.

`stored` is a ring with a slot for each visit that may be published. A storing partition is not ahead of the
loader, which is at most that many visits ahead of `notify`: so `notify` sees each phase before the next.

Measured (two H200, 2026-11-26, four shapes): the plain kernel takes 1.004 to 1.038 times as long, in graphs
up to 1.083, torch's fused operation 1.044 to 1.081. Rejected: all chunks in one launch where there are many
rows, 1.02 to 1.13 times as long.

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..compat import aggregate, partition_barrier
from ..exchange.chunks import part_from_peers
from ..exchange.flags import FREE, NO_PERMIT
from ..exchange.peers import Peers, wait_for_all
from ..exchange.stores import count_stored, let_peers_write, memory_of
from ..gemm.any_width import piece_start
from ..gemm.epilogue import Pointwise, complete_stores
from ..gemm.operands import Config, allocate_mbarriers, item_bytes
from ..gemm.problem import end_steps_of, slots_of_visits
from ..gemm.roles import run
from ..rings import ring_phase, ring_slot
from ..signals import count_up, notify, poll_until
from ..tiles import grouped_tile, rotated_chunk
from .handover import await_sums, count_tile

PARTS = gl.constexpr(4)  # of the own rows; `notify` lets `work` into one after the other


@gluon.constexpr_function
def storers_of(variant, tensor_memory):
    """Return how many partitions store, in turn."""
    return 2 if variant == "pingpong" and not tensor_memory else 1


@aggregate
class Summed:
    """The sums of a tile with their addends, in place of an accumulator."""

    accumulator: gl.tuple  # of one element: its type depends on the MMA part
    scaling: Pointwise
    row_of_a: gl.tensor
    pointers: gl.tuple  # to this rank's addend, [BLOCK_M, N], or None; to the peers' sums
    between: gl.tensor  # elements from one peer's sums to the next one's
    col: gl.tensor
    pitch: gl.tensor  # elements from a row to the next
    WIDTH: gl.constexpr
    PEERS: gl.constexpr  # how many have sent something

    @gluon.jit
    def piece(self, i: gl.constexpr, STORE_N: gl.constexpr):
        """Return STORE_N columns of the tile, from `piece_start` on, scaled before anything is added.

        The next peer's sums are on their way while those of the one before are added.
        """
        start: gl.constexpr = piece_start(i, STORE_N, self.WIDTH)
        sums = self.scaling.apply(self.accumulator[0].piece(i, STORE_N), self.row_of_a, self.col, start)
        layout: gl.constexpr = sums.type.layout
        rows = gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
        first = gl.multiple_of(self.col + start, 8)
        cols = first + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
        offsets = rows[:, None] * self.pitch + cols[None, :]
        mask = (cols < self.pitch)[None, :]  # rows never lie beyond
        addend_ptr, staged_ptr = self.pointers
        if addend_ptr is not None:
            sums += gl.load(addend_ptr + offsets, mask=mask, other=0.0).to(gl.float32)
        if self.PEERS > 0:
            ahead = gl.load(staged_ptr + offsets, mask=mask, other=0.0)
            for _ in range(1, self.PEERS):
                staged_ptr += self.between
                further = gl.load(staged_ptr + offsets, mask=mask, other=0.0)
                sums += ahead.to(gl.float32)
                ahead = further
            sums += ahead.to(gl.float32)
        return sums


@gluon.jit
def _of_one_arrival(COUNT: gl.constexpr):
    """Return so many mbarriers; one arrival completes a phase of each."""
    bars = allocate_mbarriers(COUNT)
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@aggregate
class Handovers:
    """The mbarriers by which `notify` and the partitions of `work` that store wait for each other."""

    stored: gl.shared_memory_descriptor  # see above
    # One for each part of the own rows; the last one for all permits, which STORES alone uses: it must not be
    # an allocation of its own.
    arrived: gl.shared_memory_descriptor

    @staticmethod
    @gluon.jit
    def create(SLOTS: gl.constexpr):
        return Handovers(_of_one_arrival(SLOTS), _of_one_arrival(PARTS + 1))


@aggregate
class ScatteredChunks:
    """The tiles of `chunks` chunks of A, from the `first` after the own one on; the `problem` of `roles`."""

    peers: gl.tuple  # `Peers`
    scaling: Pointwise  # by the scales of rows of A and of the weight
    partial_desc: tma.tensor_descriptor
    pointers: gl.tuple  # to this rank's addend, or None; to staged sums
    counts_ptr: gl.tensor
    handovers: Handovers
    table_ptr: gl.tensor  # of `exchange.stores`
    m: gl.tensor
    N: gl.tensor
    k: gl.tensor
    capacity: gl.tensor
    first: gl.tensor
    chunks: gl.tensor
    tiles_m: gl.tensor  # of a chunk
    tiles_n: gl.tensor
    tiles: gl.tensor  # of all chunks
    k_blocks: gl.tensor
    config: Config
    WORLD: gl.constexpr
    STORES: gl.constexpr  # to the peers' memory; else to the partial sums

    @gluon.jit
    def first_own(self):
        """Return the number of the own chunk's first tile."""
        return (self.WORLD - 1 - self.first) * self.tiles_m * self.tiles_n

    @gluon.jit
    def find(self, number):
        """Return the tile's chunk and its first row and column there; without such a tile, the last one's."""
        tiles_per_chunk = self.tiles_m * self.tiles_n
        number = min(number, self.tiles - 1) + self.first * tiles_per_chunk
        chunk, inner = rotated_chunk(number, tiles_per_chunk, self.WORLD, self.peers.rank + 1)
        pid_m, pid_n = grouped_tile(inner, self.tiles_m, self.tiles_n, self.config.GROUP_M)
        WIDTH: gl.constexpr = self.config.BLOCK_N + self.config.EXTRA_N
        row = min(pid_m * self.config.BLOCK_M, self.m - self.config.BLOCK_M)
        return chunk, row, min(pid_n * WIDTH, max(self.N - WIDTH, 0))

    @gluon.jit
    def place(self, number):
        """Return the tile's first row of A, and of the partial sums or of `out`; and column."""
        chunk, row, col = self.find(number)
        slot = (chunk - self.peers.rank + self.WORLD) % self.WORLD - 1  # -1 for the own chunk
        return chunk * self.m + row, max(slot, 0) * self.capacity + row, col

    @gluon.jit
    def end_steps(self):
        """Return how many instructions along K the last k block of a tile needs."""
        return end_steps_of(self.k, self.k_blocks, self.config)

    @gluon.jit
    def await_rows(self, number, known):
        """All of A is there."""
        return known

    @gluon.jit
    def loaded(self):
        """Nobody waits for that."""

    @gluon.jit
    def stored_before(self, visit):
        """Tell `notify` that this partition's stores before that visit are in memory.

        See [Note: counted is what is in memory].
        """
        complete_stores()
        partition_barrier()
        slot = ring_slot(visit, slots_of_visits(self.config.NUM_BUFFERS))
        mbarrier.arrive(self.handovers.stored.index(slot), count=1)

    @gluon.jit
    def store(self, number, epilogue, accumulator, row, col, STORER: gl.constexpr):
        """Start the stores of a tile; of the own chunk, once the peers' sums of its rows are here."""
        if number < self.first_own():
            part = self.with_sums(accumulator, number, row, col, 0)
            if self.STORES:
                mbarrier.wait(self.handovers.arrived.index(PARTS), 0)
                to_ptr, pitch = self.place_there(number)
                epilogue.store_to(part, to_ptr, pitch, col, self.N, STORER)
            else:
                epilogue.into(self.partial_desc).store(part, row, col, STORER)
        else:
            mbarrier.wait(self.handovers.arrived.index(self.parts_until(row) - 1), 0)
            sums = self.with_sums(accumulator, number, row, col, self.WORLD - 1)
            epilogue.store(sums, row, col, STORER)

    @gluon.jit
    def with_sums(self, accumulator, number, row, col, PEERS: gl.constexpr):
        """Return the tile's sums with this rank's addend and the sums of so many peers."""
        WIDTH: gl.constexpr = self.config.BLOCK_N + self.config.EXTRA_N
        row_of_a, _row, _col = self.place(number)
        addend_ptr, staged_ptr = self.pointers
        if addend_ptr is not None:
            addend_ptr += gl.cast(row_of_a, gl.int64) * self.N
        staged_ptr += gl.cast(row, gl.int64) * self.N
        between = gl.cast(self.capacity, gl.int64) * self.N
        # N, though the compiler does not know it: it would keep all offsets in registers from tile to tile.
        pitch = gl.multiple_of(self.N + 8 * min(number, 0), 8)
        product, pointers = ((accumulator,), self.scaling, row_of_a), (addend_ptr, staged_ptr)
        return Summed(*product, pointers, between, col, pitch, WIDTH, PEERS)

    @gluon.jit
    def place_there(self, number):
        """Return where a tile's first row of sums begins in the peer's memory, and the pitch of its rows."""
        chunk, row, _col = self.find(number)
        slot = (self.peers.rank - chunk + self.WORLD) % self.WORLD - 1
        pitch = gl.multiple_of(self.N + 8 * min(number, 0), 8)  # see `with_sums`
        rows = gl.cast(slot * self.capacity + row, gl.int64)
        return memory_of(chunk, self.table_ptr, self.pointers[1]) + rows * pitch, pitch

    @gluon.jit
    def parts_until(self, row):
        """Return how many parts of the own rows a tile needs that begins there."""
        return gl.cdiv(row + self.config.BLOCK_M, gl.cdiv(self.m, PARTS))

    @gluon.jit
    def notify(self, number, visit, known):
        """Count a tile for a peer once it is in memory; at an own one, wait for the peers' sums.

        See [Note: notify waits alone].
        """
        chunk, row, _col = self.find(number)
        if self.STORES:
            self.await_permits(number, visit)
        if number < self.first_own():
            SLOTS: gl.constexpr = slots_of_visits(self.config.NUM_BUFFERS)
            following = visit + storers_of(self.config.VARIANT, self.config.TENSOR_MEMORY)
            stored = self.handovers.stored.index(ring_slot(following, SLOTS))
            mbarrier.wait(stored, ring_phase(following, SLOTS))
            tiles_per_chunk = self.tiles_m * self.tiles_n
            if self.STORES:
                of_all = (tiles_per_chunk, self.m, self.table_ptr)
                count_stored(chunk, self.counts_ptr, *of_all, self.peers, self.WORLD)
            else:
                count_tile(chunk, self.counts_ptr, tiles_per_chunk, self.chunks, self.peers, self.WORLD)
        else:
            needed = self.parts_until(row)
            while known < needed:
                rows = min((known + 1) * gl.cdiv(self.m, PARTS), self.m)
                await_sums(rows, self.peers, self.WORLD)
                mbarrier.arrive(self.handovers.arrived.index(known), count=1)
                known += 1
        return known

    @gluon.jit
    def await_permits(self, number, visit):
        """At the first tile, let `work` store to the peers; the first program to begin gives the permits.

        It alone waits for those of the peers: by when another one begins they may have been lowered.
        """
        if visit == 0:
            come_ptr = self.counts_ptr + self.WORLD + 2
            if number == 0:
                let_peers_write(self.table_ptr, self.peers, self.WORLD)
                wait_for_all(FREE, NO_PERMIT, self.peers, self.WORLD)
                notify(come_ptr, 1)
            else:
                for _ in range(2 * self.WORLD):  # longer than that program waits for its peers
                    poll_until(come_ptr, 1, self.peers.patience_ticks, False)
            mbarrier.arrive(self.handovers.arrived.index(PARTS), count=1)

    @gluon.jit
    def notified(self):
        """Part from the peers in the launch with the own chunk."""
        if self.first + self.chunks == self.WORLD:
            part_from_peers(self.m, self.peers, self.WORLD, not self.STORES)
        if self.STORES:
            come_ptr = self.counts_ptr + self.WORLD + 2
            if count_up(come_ptr + 1, "acq_rel") == gl.num_programs(0) - 1:
                gl.store(come_ptr, 0)
                gl.store(come_ptr + 1, 0)


UNSPECIALIZED = [
    *("flags_ptr", "errors_ptr", "row_scale_ptr", "column_scale_ptr"),
    *("M", "K", "capacity", "first", "chunks", "rank", "patience_ticks", "size_class"),
]


# Sizes only count tiles, save N, a multiple of 8: its divisors tell where rows of sums begin.
@gluon.jit(do_not_specialize=UNSPECIALIZED)
def specialized_gemm_reduce_scatter(
    a_desc,  # [M, K]
    b_desc,  # weight [N, K]; without TRANS_B its transpose, [K, N]
    extra_desc,
    c_desc,  # out [M / WORLD, N]
    partial_desc,  # [(WORLD - 1) * capacity, N]: our sums for rank + 1, rank + 2, ...
    table_ptr,  # int64 [2, WORLD]: where `staged` and `flags` of each rank lie
    staged_ptr,  # [WORLD - 1, capacity, N]: the sums of rank + 1, rank + 2, ... for this rank
    flags_ptr,  # int32 [FLAGS, WORLD]
    counts_ptr,  # int32 [WORLD + 4], 0 between launches, as in `plain`
    errors_ptr,  # int64 [WORLD], in memory that the host reads without waiting
    addend_ptr,  # [M, N], contiguous, which is added to A @ B.T; or None
    row_scale_ptr,  # float32 [M], or None
    column_scale_ptr,  # float32 [N], or None
    M,
    N,
    K,
    capacity,
    first,  # of the chunks to compute, counted from that of rank + 1
    chunks,  # how many to compute: WORLD, or one in a call that is captured
    rank,
    patience_ticks,
    size_class,  # of the rows of a chunk, for the key of the tuning
    WORLD: gl.constexpr,
    TENSOR_MEMORY: gl.constexpr,  # Blackwell
    DTYPE: gl.constexpr,  # of A and B
    TRANS_B: gl.constexpr,  # the weight's rows are contiguous; else its columns
    STORES: gl.constexpr,  # to the peers' memory; else to the partial sums
    VARIANT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    EXTRA_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    STORE_N: gl.constexpr,
    STORE_BUFFERS: gl.constexpr,
    GROUP_M: gl.constexpr,
    JOINED: gl.constexpr,
):
    """Compute A @ B.T, times scales, the rows of other ranks first; add the peers' sums to the own rows.

    M / WORLD is not below BLOCK_M, and K not below 1.
    """
    ITEM_BYTES: gl.constexpr = item_bytes(DTYPE)
    config = Config(
        *(VARIANT, BLOCK_M, BLOCK_N, EXTRA_N, 2 * BLOCK_K // ITEM_BYTES, NUM_BUFFERS, STORE_N, STORE_BUFFERS),
        *(GROUP_M, TENSOR_MEMORY, False, TRANS_B, False, JOINED, ITEM_BYTES),
    )
    handovers = Handovers.create(slots_of_visits(NUM_BUFFERS))
    m = M // WORLD
    tiles_m = gl.cdiv(m, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N + EXTRA_N)
    scales, biases = (row_scale_ptr, column_scale_ptr, 1), (None, None)
    problem = ScatteredChunks(
        Peers(flags_ptr, errors_ptr, rank, patience_ticks),
        Pointwise(scales, biases, M, N, "none", False),
        partial_desc,
        (addend_ptr, staged_ptr),
        *(counts_ptr, handovers, table_ptr, m, N, K, capacity, first, chunks),
        *(tiles_m, tiles_n, chunks * tiles_m * tiles_n),
        *(gl.cdiv(K, config.BLOCK_K), config, WORLD),
        STORES,
    )
    pointwise = Pointwise((None, None, 1), biases, M, N, "none", False)
    run(problem, a_desc, b_desc, extra_desc, c_desc, pointwise, config, counts_ptr + WORLD, True)
