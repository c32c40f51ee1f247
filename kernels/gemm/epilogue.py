"""The epilogue parts: an accumulator gets to C through shared memory and TMA, while the next tile runs.

Each piece of STORE_N columns is scaled, biased and activated in registers (`Pointwise`), then rounded, then
stored through a buffer. A gated activation leaves half of its columns, or of its rows.

Rejected: buffers that are slots of the operand ring (docs/tried.md).

No `from __future__ import annotations`: Triton 3.6 compares the fields of an aggregate with the annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..compat import aggregate, tma_store
from ..epilogues import apply_epilogue, apply_scales, sums_of_a_result
from .any_width import piece_start
from .operands import allocate_ring


@gluon.jit
def _elements(pointer, first, end, COUNT: gl.constexpr, layout: gl.constexpr):
    """Return so many elements, one for each column of a tensor with that layout; zeros from `end` on.

    In the accumulator's layout each thread would load the elements of all its columns, one by one. So one
    thread of a warp, or a few, load each element, and the others get it through shared memory.
    """
    at = first + gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.convert_layout(gl.load(pointer + at, mask=at < end, other=0.0), gl.SliceLayout(0, layout))


@aggregate
class Pointwise:
    """The pointwise epilogue of the sums of a product [M, N], see `epilogues`."""

    scales: gl.tuple  # pointers to float32 [M] and [N], or None, and how far apart the former are
    biases: gl.tuple  # pointers to [M] and [N], or None
    M: gl.tensor
    N: gl.tensor
    ACTIVATION: gl.constexpr
    GATES_ROWS: gl.constexpr  # gate and up are rows of a tile

    @gluon.jit
    def apply(self, sums, row, col, FIRST: gl.constexpr, origin=0):
        """Return the result of a piece of sums that begins FIRST columns after that row and column.

        origin: the index of row 0 among the scales of rows.
        """
        layout: gl.constexpr = sums.type.layout
        rows = row + gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
        columns = col + FIRST + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
        row_scale_ptr, column_scale_ptr, pitch = self.scales
        if column_scale_ptr is not None:
            sums *= _elements(column_scale_ptr, col + FIRST, self.N, sums.shape[1], layout)[None, :]
        sums = apply_scales(sums, rows, columns, row_scale_ptr, None, self.M, self.N, origin, pitch)
        row_bias_ptr, column_bias_ptr = self.biases
        return apply_epilogue(
            *(sums, rows, columns, row_bias_ptr, column_bias_ptr, self.M, self.N),
            *(self.ACTIVATION, self.GATES_ROWS),
        )

    @gluon.jit
    def place(self, row, col):
        """Return the row and the column of C of the result of sums that begin at these."""
        if sums_of_a_result(self.ACTIVATION) == 2:
            if self.GATES_ROWS:
                row = row // 2
            else:
                col = col // 2
        return row, col


@gluon.jit
def complete_stores():
    """Wait until this thread's TMA stores are in memory; after a barrier all threads see them.

    Gluon's `store_wait` only waits until they have been read out of shared memory.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@aggregate
class StoreBuffers:
    c_desc: tma.tensor_descriptor
    pointwise: Pointwise
    bufs: gl.shared_memory_descriptor  # [storing partitions * BUFFERS, BLOCK_M, STORE_N]
    BUFFERS: gl.constexpr
    WIDTH: gl.constexpr  # of a tile with its further columns
    STORE_N: gl.constexpr
    TRANS_C: gl.constexpr  # C's memory has a tile's columns as rows, and so have the buffers

    @staticmethod
    @gluon.jit
    def create(c_desc, pointwise, config, STORERS: gl.constexpr):
        bufs = allocate_ring(c_desc, STORERS * config.STORE_BUFFERS, c_desc.block_type.shape[0])
        width: gl.constexpr = config.BLOCK_N + config.EXTRA_N
        return StoreBuffers(
            *(c_desc, pointwise, bufs, config.STORE_BUFFERS, width, config.STORE_N, config.TRANS_C)
        )

    @gluon.jit
    def into(self, c_desc):
        """Return the same buffers for another matrix; its descriptor has the same block."""
        return StoreBuffers(
            *(c_desc, self.pointwise, self.bufs, self.BUFFERS, self.WIDTH, self.STORE_N, self.TRANS_C)
        )

    @gluon.jit
    def store(self, accumulator, row, col, STORER: gl.constexpr, origin=0):
        """Start the stores of a tile; `origin`: see `Pointwise`.

        A buffer is written again when all but the BUFFERS - 1 youngest stores have been read out of theirs;
        the first piece waits for all stores of the tile before, which have long been read. TMA reads through
        the async proxy: each thread fences its own writes, a barrier (the compiler puts it before the store)
        gathers the threads, and one of them starts the store. The same thread waits later, as the hardware
        counts stores by thread.
        """
        for i in gl.static_range((self.WIDTH + self.STORE_N - 1) // self.STORE_N):
            sums = accumulator.piece(i, self.STORE_N)
            sums = self.pointwise.apply(sums, row, col, piece_start(i, self.STORE_N, self.WIDTH), origin)
            piece = sums.to(self.c_desc.dtype)
            buf = self.bufs.index(STORER * self.BUFFERS + i % self.BUFFERS)
            tma.store_wait(pendings=self.BUFFERS - 1 if i > 0 else 0)
            first = col + piece_start(i, self.STORE_N, self.WIDTH)
            row_of_c, col_of_c = self.pointwise.place(row, first)
            if self.TRANS_C:
                buf.permute((1, 0)).store(piece)
                fence_async_shared()
                tma_store(self.c_desc, [col_of_c, row_of_c], buf)
            else:
                buf.store(piece)
                fence_async_shared()
                tma_store(self.c_desc, [row_of_c, col_of_c], buf)

    @gluon.jit
    def store_to(self, accumulator, to_ptr, pitch, col, columns, STORER: gl.constexpr):
        """Store a tile without a descriptor: its rows begin at to_ptr, `pitch` elements apart.

        The buffers gather what 16 bytes in a row are. No store by TMA may still read them.
        """
        layout: gl.constexpr = gl.BlockedLayout(
            *([1, 8], [256 // self.STORE_N, self.STORE_N // 8], [gl.num_warps(), 1], [1, 0])
        )
        for i in gl.static_range((self.WIDTH + self.STORE_N - 1) // self.STORE_N):
            buf = self.bufs.index(STORER * self.BUFFERS + i % self.BUFFERS)
            buf.store(accumulator.piece(i, self.STORE_N).to(self.c_desc.dtype))
            piece = buf.load(layout)
            rows = gl.arange(0, piece.shape[0], gl.SliceLayout(1, layout))
            first = gl.multiple_of(col + piece_start(i, self.STORE_N, self.WIDTH), 8)
            cols = first + gl.arange(0, piece.shape[1], gl.SliceLayout(0, layout))
            offsets = rows[:, None] * pitch + cols[None, :]
            gl.store(to_ptr + offsets, piece, mask=(cols < columns)[None, :])

    @gluon.jit
    def finish(self):
        """Shared memory must outlive the stores that read it: see [Note: at the end of a partition]."""
        tma.store_wait(pendings=0)
