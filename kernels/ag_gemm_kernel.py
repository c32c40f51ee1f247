"""The device side of `AllGatherGemm`: a persistent GEMM that waits for a chunk of A before it reads it."""

from __future__ import annotations

import triton
import triton.language as tl

from .ag_gemm_candidates import CANDIDATES, do_bench, prune
from .products import multiply, multiply_tma
from .signals import GIVEN_UP, give_up, poll_until, record_failure, wait_until
from .tiles import grouped_tile, rotated_chunk

# Rows of a rank's int32 [6, WORLD] words. Column p is about rank p, which writes it, save ARRIVED.
READY = tl.constexpr(0)  # the epoch whose shard p has put in place
FETCHED = tl.constexpr(1)  # the epoch whose shard p has copied from this rank
ROWS = tl.constexpr(2)  # and 3: how many rows p's shards of even and of odd epochs have
ARRIVED = tl.constexpr(4)  # the epoch whose chunk p is here; written by this rank's side stream

# In the lane of captured calls (see `ag_gemm_lane`), where ARRIVED holds p's number of rows and p writes it.
FREE = tl.constexpr(0)  # whether p's slot for this rank's chunk may be written
AFTER = tl.constexpr(5)  # what ARRIVED becomes after a call: 0, or far ahead once p has been given up

# What a failure record says about a peer.
NOT_READY = tl.constexpr(1)
NOT_COPIED = tl.constexpr(2)
NOT_FETCHED = tl.constexpr(3)
OTHER_ROWS = tl.constexpr(4)
NOT_PUSHED = tl.constexpr(5)  # this and the next in the lane of captured calls
OTHER_ROWS_PUSHED = tl.constexpr(6)


@triton.autotune(
    configs=CANDIDATES,
    key=["M", "N", "K", "TMA_LEGAL"],
    prune_configs_by={"early_config_prune": prune},
    do_bench=do_bench,
)
@triton.jit(do_not_specialize=["M", "slots", "rank", "epoch", "pushed", "budget"])
def all_gather_gemm(
    a_ptr,  # gather buffer [slots, capacity, K]; the first M / WORLD rows of each chunk count
    b_ptr,  # weight [N, K], rows stride_bn apart
    c_ptr,  # out [M, N], rows stride_cm apart
    words_ptr,  # int32 [6, WORLD]: READY, FETCHED, ROWS, ARRIVED; or FREE, ARRIVED, AFTER
    errors_ptr,  # int64 [WORLD], in memory that the host reads without waiting
    M,
    N,
    K,
    slots,
    capacity,
    stride_bn,
    stride_cm,
    rank,
    epoch,
    pushed,  # 1 in the lane of captured calls, whose epoch is 1; no constexpr: what is loaded serves both
    budget,
    WORLD: tl.constexpr,
    TMA_LEGAL: tl.constexpr,
    FENCE: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter cannot do arithmetic in bfloat16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Write C = A @ B.T, tile by tile, chunk `rank` first and then in the order in which chunks arrive."""
    m = M // WORLD
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_per_chunk = tiles_m * tiles_n
    USE_TMA: tl.constexpr = TMA and TMA_LEGAL
    if USE_TMA:
        STORE_N: tl.constexpr = BLOCK_N // 2 if EPILOGUE_SUBTILE else BLOCK_N
        a_desc = tl.make_tensor_descriptor(a_ptr, [slots * capacity, K], [K, 1], [BLOCK_M, BLOCK_K])
        b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [stride_bn, 1], [BLOCK_N, BLOCK_K])
        # Three dimensions, so that the hardware cuts a chunk's last tile off at row m instead of writing
        # into the next chunk.
        chunk_stride = tl.cast(m, tl.int64) * stride_cm
        c_desc = tl.make_tensor_descriptor(
            c_ptr, [WORLD, m, N], [chunk_stride, stride_cm, 1], [1, BLOCK_M, STORE_N]
        )

    here = rank  # the chunk that this program knows to be complete; its own needs no wait
    for tile in tl.range(tl.program_id(0), WORLD * tiles_per_chunk, tl.num_programs(0)):
        chunk, inner = rotated_chunk(tile, tiles_per_chunk, WORLD, rank)
        pid_m, pid_n = grouped_tile(inner, tiles_m, tiles_n, GROUP_M)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        if chunk != here:
            _wait_for_chunk(
                chunk, rank, words_ptr, errors_ptr, epoch, pushed, budget, WORLD, FENCE and USE_TMA
            )
            here = chunk
        slot = _slot_of(chunk, rank, pushed, WORLD)
        if USE_TMA:
            acc = multiply_tma(
                a_desc, b_desc, slot * capacity + row, col, K, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST
            )
            if EPILOGUE_SUBTILE:
                halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, STORE_N)), (0, 2, 1))
                left, right = tl.split(halves)
                c_desc.store([chunk, row, col], left.to(c_ptr.dtype.element_ty)[None, :, :])
                c_desc.store([chunk, row, col + STORE_N], right.to(c_ptr.dtype.element_ty)[None, :, :])
            else:
                c_desc.store([chunk, row, col], acc.to(c_ptr.dtype.element_ty)[None, :, :])
        else:
            rows = row + tl.arange(0, BLOCK_M)
            cols = col + tl.arange(0, BLOCK_N)
            # Rows and columns beyond the edge read the first one: in bounds, and no mask in the K loop.
            a_rows = tl.cast(slot * capacity + tl.where(rows < m, rows, 0), tl.int64)
            b_rows = tl.cast(tl.where(cols < N, cols, 0), tl.int64)
            acc = multiply(
                a_ptr + a_rows * K, b_ptr + b_rows * stride_bn, K, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST
            )
            c_rows = tl.cast(chunk * m + rows, tl.int64)
            mask = (rows < m)[:, None] & (cols < N)[None, :]
            c_ptrs = c_ptr + c_rows[:, None] * stride_cm + cols[None, :]
            tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask)

    for peer in tl.range(tl.program_id(0), WORLD, tl.num_programs(0)):
        if peer != rank:
            _part_from(peer, rank, m, words_ptr, errors_ptr, epoch, pushed, budget, WORLD)


@triton.jit
def _slot_of(chunk, rank, pushed, WORLD: tl.constexpr):
    """Return where in the gather buffer the chunk lies; the own one is the same in both lanes."""
    step = (chunk - rank + WORLD) % WORLD
    return tl.where((pushed != 0) & (step != 0), WORLD - 1 + step, chunk)


@triton.jit
def _wait_for_chunk(
    chunk, rank, words_ptr, errors_ptr, epoch, pushed, budget, WORLD: tl.constexpr, FENCE: tl.constexpr
):
    """Return ARRIVED when the chunk may be read; a value below or far above if it is given up."""
    arrived_ptr = words_ptr + ARRIVED * WORLD + chunk
    value = poll_until(arrived_ptr, epoch, budget, FENCE)
    if value - epoch < 0:
        if pushed != 0:
            record_failure(errors_ptr + chunk, NOT_PUSHED, 0, value)
            give_up(words_ptr + AFTER * WORLD + chunk, epoch)
            give_up(words_ptr + FREE * WORLD + chunk, epoch)
        else:
            _blame(chunk, rank, words_ptr, errors_ptr, epoch, WORLD)
        give_up(arrived_ptr, epoch)
    return value


@triton.jit
def _blame(chunk, rank, words_ptr, errors_ptr, epoch, WORLD: tl.constexpr):
    """Record why the chunk has not arrived, and let the side stream, which nobody else watches, run through.

    Chunks are fetched in order, so a peer that is not ready also holds up the chunks behind its own.
    """
    known = 0
    for peer in range(0, WORLD):
        if peer != rank:
            ready = tl.atomic_add(words_ptr + READY * WORLD + peer, 0, sem="acquire", scope="sys")
            if ready - epoch < 0:
                record_failure(errors_ptr + peer, NOT_READY, epoch, ready)
                give_up(words_ptr + READY * WORLD + peer, epoch)
            known += (tl.load(errors_ptr + peer) != 0).to(tl.int32)
    if known == 0:
        record_failure(errors_ptr + chunk, NOT_COPIED, epoch, 0)


@triton.jit
def _part_from(peer, rank, m, words_ptr, errors_ptr, epoch, pushed, budget, WORLD: tl.constexpr):
    """Compare the peer's number of rows with ours and return once it no longer needs our shard."""
    value = _wait_for_chunk(peer, rank, words_ptr, errors_ptr, epoch, pushed, budget, WORLD, False)
    if pushed != 0:
        if (value <= 0) | (value >= GIVEN_UP):
            # Given up, now or in an earlier call. In each call the side stream waits for the peer's permit.
            # No other can be missing: a peer whose chunk is here has given its permit before.
            give_up(words_ptr + FREE * WORLD + peer, epoch)
        elif value != m:
            record_failure(errors_ptr + peer, OTHER_ROWS_PUSHED, 0, value)
    elif value == epoch:
        rows = tl.load(words_ptr + (ROWS + (epoch & 1)) * WORLD + peer)
        if rows != m:
            record_failure(errors_ptr + peer, OTHER_ROWS, epoch, rows)
        # Twice the patience: the peer may be held up by a third rank, on which its own kernel gives up first.
        wait_until(
            words_ptr + FETCHED * WORLD + peer, epoch, errors_ptr + peer, NOT_FETCHED, 2 * budget, False
        )
