"""The device side of `AllGatherGemm`: a persistent GEMM that waits for a chunk of A before it reads it."""

from __future__ import annotations

import triton
import triton.language as tl

from ..products import multiply, multiply_tma
from ..tiles import grouped_tile, rotated_chunk
from .candidates import CANDIDATES, do_bench, prune
from .chunks import part_from, slot_of, wait_for_chunk


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
            wait_for_chunk(
                chunk, rank, words_ptr, errors_ptr, epoch, pushed, budget, WORLD, FENCE and USE_TMA
            )
            here = chunk
        slot = slot_of(chunk, rank, pushed, WORLD)
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
            part_from(peer, rank, m, words_ptr, errors_ptr, epoch, pushed, budget, WORLD)
