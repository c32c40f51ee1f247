"""Products of an `ExpertParallel`: rows by expert times its matrix, as many as the device knows."""

from __future__ import annotations

import triton
import triton.language as tl

from ..configs import INTERPRETED, prune_overlapped, take_first
from ..moe import products
from ..moe.launch import CPU_TILES, GPU_TILES
from ..moe.products import Weight, describe_weight
from ..products import store_rows
from ..tiles import grouped_tile
from .slots import DISPATCHED, RETURNED, SENT, end_exchange, exchange, is_last, raise_flags, rank_of

CANDIDATES = CPU_TILES if INTERPRETED else GPU_TILES


@triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "K", "experts", "TMA_LEGAL", "BY_COLUMNS", "FROM_SLOTS", "TO_PEERS"],
    prune_configs_by={"early_config_prune": prune_overlapped},
    do_bench=take_first,  # outside a tuned function: its peers wait for one launch of it
)
@triton.jit(do_not_specialize=["size_class", "experts", "most_tokens", "rank"])
def multiply_rows(
    a_ptr,  # rows by expert [capacity, K], stride_am apart; FROM_SLOTS: `tokens`
    b_ptr,  # weight [experts, N, K], an expert's matrix stride_be apart, rows or columns stride_b
    c_ptr,  # [capacity, N], contiguous; TO_PEERS: `choices`
    sources_ptr,
    offsets_ptr,
    flags_ptr,
    tables_ptr,  # int64 [2, WORLD]: addresses of choices, flags
    state_ptr,
    size_class,
    N,
    K,
    experts,
    most_tokens,
    rank,
    stride_am,
    stride_be,
    stride_b,
    TOPK: tl.constexpr,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two, at least `experts`
    FROM_SLOTS: tl.constexpr,  # rows are read where a dispatch has put them, and it ends
    TO_PEERS: tl.constexpr,  # products go to the ranks of their tokens; then the flag of the combine rises
    TMA_LEGAL: tl.constexpr,
    BY_COLUMNS: tl.constexpr,  # the weight's columns are contiguous, not its rows
    UPCAST: tl.constexpr,  # the interpreter cannot do arithmetic in bfloat16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Multiply each row by its expert's B.T, expert by expert."""
    weight = Weight(b_ptr, experts, N, K, stride_be, stride_b)
    USE_TMA: tl.constexpr = TMA and TMA_LEGAL
    b_desc = b_ptr
    if USE_TMA:
        b_desc = describe_weight(weight, BLOCK_N, BLOCK_K, BY_COLUMNS)
    of_rank = most_tokens * TOPK
    slot = 0
    if TO_PEERS:
        slot = (exchange(state_ptr, RETURNED) & 1) * of_rank
    every = tl.arange(0, EXPERTS)
    is_expert = every < experts
    begins = tl.load(offsets_ptr + every, mask=is_expert, other=0)
    ends = tl.load(offsets_ptr + 1 + every, mask=is_expert, other=0)
    of_each = tl.cdiv(ends - begins, BLOCK_M)
    blocks_upto = tl.cumsum(of_each, axis=0)
    blocks, tiles_n = tl.sum(of_each, axis=0), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), blocks * tiles_n, tl.num_programs(0)):
        block, pid_n = grouped_tile(tile, blocks, tiles_n, GROUP_M)
        expert = tl.sum((blocks_upto <= block).to(tl.int32), axis=0)
        is_this = every == expert
        block -= tl.sum(tl.where(is_this, blocks_upto - of_each, 0), axis=0)
        begin = tl.sum(tl.where(is_this, begins, 0), axis=0) + block * BLOCK_M
        places = begin + tl.arange(0, BLOCK_M)
        real = places < tl.sum(tl.where(is_this, ends, 0), axis=0)
        # Rows beyond the end read the block's first one: in bounds, and no mask in the K loop.
        places = tl.where(real, places, begin)
        rows = places
        if FROM_SLOTS or TO_PEERS:
            positions = tl.load(sources_ptr + places)
            sources = rank_of(positions, most_tokens, TOPK, WORLD)
        if FROM_SLOTS:
            rows = tl.where(sources >= 0, positions // TOPK, 0)
        col = pid_n * BLOCK_N
        acc = products.multiply_rows(
            *(a_ptr + tl.cast(rows, tl.int64) * stride_am, weight, b_desc, expert, col),
            *(BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, BY_COLUMNS, UPCAST),
        )
        if TO_PEERS:
            real &= sources >= 0
            theirs = tl.load(tables_ptr + tl.maximum(sources, 0)).to(c_ptr.dtype)
            to_ptr = tl.multiple_of(theirs, [16]) + tl.cast(slot + positions % of_rank, tl.int64) * N
        else:
            to_ptr = c_ptr + tl.cast(places, tl.int64) * N
        store_rows(acc, to_ptr, real, col, N, EPILOGUE_SUBTILE)
    if FROM_SLOTS:
        end_exchange(state_ptr, DISPATCHED)
    if TO_PEERS and is_last(state_ptr, 1, RETURNED, SENT):
        raise_flags(tables_ptr + WORLD, flags_ptr, state_ptr, rank, RETURNED, WORLD)
