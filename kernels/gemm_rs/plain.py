"""The body in plain Triton: a persistent GEMM that hands over chunks, and adds the peers' sums.

Programs claim tiles from a counter, those for peers first; `operation` says why that ends. A tile for a peer
goes to the partial sums and is counted. The program that counts a chunk's last tile sets DONE; after that
the side stream pushes, in pieces. At a tile of the own chunk a program waits for all peers' sums of its rows,
then adds them.

STORES: a tile for a peer is stored into that peer's memory, and counted after the next product, as its
stores travel meanwhile. The program that counts a chunk's last tile tells the peer. Such a launch is all of a
call. It has not run between GPUs (docs/not-yet-run.md).

Measured (one H200, 2026-11-24, the kernel alone, six shapes): 1.07 to 1.33 of cuBLAS's product alone.
Rejected: TMA stores for peers, as they may still be on their way when the program counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..configs import CANDIDATES, prune_overlapped, take_first, upcasts
from ..epilogues import apply_scales
from ..exchange.chunks import part_from_peers
from ..exchange.flags import NO_PERMIT
from ..exchange.operation import DeviceFacts
from ..exchange.peers import Peers, is_any_lost
from ..exchange.stores import count_stored, let_peers_write, may_store, memory_of, part_from_all
from ..gemm.configs import class_of_rows
from ..launches.settled import Tensors, TunedKernel
from ..products import factors_of, halves, multiply_tile
from ..tensors import begin_at_16_bytes, lies_by_columns, pitch_of
from ..tiles import claim_number, grouped_tile, reset_counter, rotated_chunk
from .call import Body, ScatterMemory, ScatterOperands
from .handover import await_sums, count_tile


@triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "K", "TMA_LEGAL", "BY_COLUMNS", "STORES"],
    prune_configs_by={"early_config_prune": prune_overlapped},
    do_bench=take_first,  # outside a tuned function: a launch ends when the peers have pushed, after theirs
)
@triton.jit(
    do_not_specialize=[
        *("row_scale_ptr", "column_scale_ptr"),
        *("M", "first", "chunks", "rank", "patience_ticks", "size_class"),
    ]
)
def gemm_reduce_scatter(
    table_ptr,  # int64 [2, WORLD]: where `staged` and `flags` of each rank lie
    partial_ptr,  # [WORLD - 1, capacity, N]: our sums for rank + 1, rank + 2, ...
    staged_ptr,  # [WORLD - 1, capacity, N]: the sums of rank + 1, rank + 2, ... for this rank
    flags_ptr,  # int32 [FLAGS, WORLD]
    counts_ptr,  # int32 [WORLD + 2], 0 between launches: tiles of each chunk that are stored; tiles that are
    # claimed; programs that claim no more
    errors_ptr,  # int64 [WORLD], in memory that the host reads without waiting
    a_ptr,  # [M, K], rows stride_am apart
    b_ptr,  # weight [N, K], its rows, or BY_COLUMNS its columns, contiguous and stride_b apart
    c_ptr,  # out [M / WORLD, N], rows stride_cm apart
    addend_ptr,  # [M, N], contiguous, which HAS_ADDEND adds to A @ B.T; not where there are scales
    row_scale_ptr,  # float32 [M], or None
    column_scale_ptr,  # float32 [N], or None
    M,
    N,
    K,
    capacity,
    stride_am,
    stride_b,
    stride_cm,
    first,  # of the chunks to compute, counted from that of rank + 1
    chunks,  # how many to compute: WORLD, or one in a call that is captured
    rank,
    patience_ticks,
    size_class,  # of the rows of a chunk, for the key of the tuning
    WORLD: tl.constexpr,
    TMA_LEGAL: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    STORES: tl.constexpr,  # to the peers' memory; else to `partial`
    UPCAST: tl.constexpr,  # the interpreter has no arithmetic in bfloat16 and fp8
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,  # store half a tile at a time, with half the registers for it
    TMA: tl.constexpr,
):
    """Compute A @ B.T, times scales, the rows of other ranks first; add the peers' sums to the own rows.

    A program claims its tiles one by one, in the order of their chunks: see [Note: a reduce-scatter ends].
    """
    peers = Peers(flags_ptr, errors_ptr, rank, patience_ticks)
    m = M // WORLD
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_per_chunk = tiles_m * tiles_n
    USE_TMA: tl.constexpr = TMA and TMA_LEGAL
    factors = factors_of(
        *(a_ptr, stride_am, M, b_ptr, stride_b, N, K),
        *(BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, BY_COLUMNS),
    )

    here = 0  # rows of the own chunk of which this program knows that the peers' sums are here
    lost = 0  # 1 once a peer is given up
    stored = -1  # chunk of the tile that this program has stored into a peer's memory and not yet counted
    writable = -1  # chunk whose peer has been asked for its permit
    is_permitted = False
    claims_ptr = counts_ptr + WORLD
    first_tile = first * tiles_per_chunk
    end = first_tile + chunks * tiles_per_chunk
    tile = first_tile + claim_number(claims_ptr)
    if STORES and tile == 0:
        let_peers_write(table_ptr, peers, WORLD)
    while tile < end:
        chunk, inner = rotated_chunk(tile, tiles_per_chunk, WORLD, rank + 1)
        pid_m, pid_n = grouped_tile(inner, tiles_m, tiles_n, GROUP_M)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if HAS_ADDEND:  # before the loop, where it takes no registers beside the accumulator
            acc = _load_addend(acc, addend_ptr, chunk * m, row, m, col, N)
        acc = multiply_tile(
            *(factors, chunk * m, row, m, col),
            *(acc, BLOCK_K, USE_TMA, BY_COLUMNS, UPCAST),
        )
        acc = apply_scales(
            *(acc, row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)),
            *(row_scale_ptr, column_scale_ptr, m, N, chunk * m),
        )
        if chunk == rank:
            row_end = min(row + BLOCK_M, m)
            if here < row_end:
                here = await_sums(row_end, peers, WORLD)
                lost = is_any_lost(peers, WORLD)
            _add_and_store(
                *(acc, c_ptr, stride_cm, staged_ptr, row, col, m, N, capacity, lost != 0),
                *(WORLD, EPILOGUE_SUBTILE),
            )
        elif STORES:
            if stored >= 0:
                count_stored(stored, counts_ptr, tiles_per_chunk, m, table_ptr, peers, WORLD)
            if chunk != writable:
                is_permitted = may_store(chunk, NO_PERMIT, False, peers, WORLD)
                writable = chunk
            slot = (rank - chunk + WORLD) % WORLD - 1
            sums_ptr = memory_of(chunk, table_ptr, staged_ptr) + tl.cast(slot * capacity, tl.int64) * N
            rows = tl.where(is_permitted, m, 0)
            _add_and_store(
                acc, sums_ptr, N, staged_ptr, row, col, rows, N, capacity, False, 1, EPILOGUE_SUBTILE
            )
            stored = chunk
        else:
            slot = (chunk - rank + WORLD) % WORLD - 1
            sums_ptr = partial_ptr + tl.cast(slot * capacity, tl.int64) * N
            _add_and_store(acc, sums_ptr, N, staged_ptr, row, col, m, N, capacity, False, 1, EPILOGUE_SUBTILE)
            # The stores are ordinary ones: a TMA store may still be on its way when its program goes on.
            count_tile(chunk, counts_ptr, tiles_per_chunk, chunks, peers, WORLD)
        tile = first_tile + claim_number(claims_ptr)
        if STORES and ((stored >= 0) & (tile >= (WORLD - 1) * tiles_per_chunk)):
            # The last one for a peer: peers may wait for it.
            count_stored(stored, counts_ptr, tiles_per_chunk, m, table_ptr, peers, WORLD)
            stored = -1
    is_last = reset_counter(claims_ptr, tl.num_programs(0))

    if STORES:
        if is_last:
            part_from_all(m, peers, WORLD)
    elif first + chunks == WORLD:
        part_from_peers(m, peers, WORLD, True)


@triton.jit
def _load_addend(tile, addend_ptr, origin, row, m, col, N):
    """Return the addend of a tile, in its shape and type."""
    rows = row + tl.arange(0, tile.shape[0])
    cols = col + tl.arange(0, tile.shape[1])
    mask = (rows < m)[:, None] & (cols < N)[None, :]
    addend_rows = addend_ptr + tl.cast(origin + rows, tl.int64) * N
    return tl.load(addend_rows[:, None] + cols[None, :], mask=mask, other=0.0).to(tile.dtype)


@triton.jit
def _add_and_store(
    tile,
    to_ptr,  # where row 0 of the chunk goes, rows to_stride apart
    to_stride,
    staged_ptr,
    row,
    col,
    m,
    N,
    capacity,
    is_lost,  # whether a peer is given up: then the sums are NaN
    ADDENDS: tl.constexpr,  # 1: the tile alone; WORLD: with the peers' sums
    SUBTILE: tl.constexpr,  # one half of the columns after the other
):
    """Store a tile, or its sum with the peers' sums, rounded once."""
    if SUBTILE:
        left, right = halves(tile)
        _add_and_store(left, to_ptr, to_stride, staged_ptr, row, col, m, N, capacity, is_lost, ADDENDS, False)
        col += left.shape[1]
        _add_and_store(
            right, to_ptr, to_stride, staged_ptr, row, col, m, N, capacity, is_lost, ADDENDS, False
        )
    else:
        rows = row + tl.arange(0, tile.shape[0])
        cols = col + tl.arange(0, tile.shape[1])
        mask = (rows < m)[:, None] & (cols < N)[None, :]
        for slot in range(0, ADDENDS - 1):
            from_rows = tl.cast(slot * capacity + rows, tl.int64)
            staged = tl.load(staged_ptr + from_rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
            tile += tl.where(is_lost, float("nan"), staged.to(tl.float32))
        to_ptrs = to_ptr + tl.cast(rows, tl.int64)[:, None] * to_stride + cols[None, :]
        tl.store(to_ptrs, tile.to(to_ptr.dtype.element_ty), mask=mask)


_KERNEL = TunedKernel(gemm_reduce_scatter, operation="GemmReduceScatter")


class PlainBody(Body):
    """Multiplies by the kernel in plain Triton. stores: sums for peers to their memory."""

    def __init__(
        self, operands: ScatterOperands, held: ScatterMemory, facts: DeviceFacts, *, stores: bool = False
    ) -> None:
        super().__init__(_KERNEL)
        a, weight, out, addend, *_ = operands
        strides = (a.stride(0), pitch_of(weight))
        addresses = (a.data_ptr(), weight.data_ptr())
        self._sizes = (len(a), weight.shape[0], a.shape[1])
        self._further = (held.partial.shape[1], *strides, out.stride(0))
        self._constants = {
            "TMA_LEGAL": facts.has_tma and begin_at_16_bytes(a.element_size(), addresses, strides),
            "BY_COLUMNS": lies_by_columns(weight),
            "HAS_ADDEND": addend is not None,
            "STORES": stores,
            "UPCAST": upcasts(a.dtype),
        }
        self._size_class, self._tensors = class_of_rows(out.shape[0]), tuple(held)
        self._partial = held.partial

    def _arguments(self, operands: ScatterOperands) -> tuple[tuple[int, ...], Tensors]:
        a, weight, out, addend, *scales = operands
        added = self._partial if addend is None else addend
        return (), (a, weight, out, added, *scales)
