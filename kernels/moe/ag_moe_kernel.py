"""The kernel of `AllGatherMoE`: a persistent grouped GEMM that waits for chunks before it reads them.

The tables of `routing` say which rows a tile has and the last chunk that it needs. A program waits once for
the ARRIVED of each chunk, which the side stream of the chunk's rank raises. At the end one program waits for
each peer: see [Note: a gather for experts ends].

Rejected: a warp-specialised kernel in Gluon, slower in 10 of 12 cells by 1 to 9 % (one H200, 2026-11-24).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..configs import INTERPRETED, prune_overlapped, take_first
from ..exchange.flags import ARRIVED, NOT_PUSHED
from ..exchange.peers import Peers, release_if_given_up, wait_for_flag
from ..products import store_rows
from ..tiles import grouped_tile
from .launch import CPU_TILES, GPU_TILES, with_fields
from .products import Weight, describe_weight, multiply_rows, table_of
from .routing import ENTRY

# BY_ARRIVAL: tiles as chunks arrive. Else expert by expert, for short gathers: nearly all tiles wait for the
# whole gather, and each weight is read once.
GPU_CANDIDATES = [
    *(with_fields(config, BY_ARRIVAL=True) for config in GPU_TILES),
    *(with_fields(config, BY_ARRIVAL=False) for config in (*GPU_TILES[:3], *GPU_TILES[7:10])),
]
CPU_CANDIDATES = [
    with_fields(config, BY_ARRIVAL=by_arrival)
    for config, by_arrival in zip(CPU_TILES, (True, True, False, False), strict=True)
]

CANDIDATES = CPU_CANDIDATES if INTERPRETED else GPU_CANDIDATES


@triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "K", "experts", "WORLD", "TMA_LEGAL", "BY_COLUMNS"],
    prune_configs_by={"early_config_prune": prune_overlapped},
    do_bench=take_first,  # outside a tuned function: its peers push to one launch of it
)
@triton.jit(do_not_specialize=["size_class", "experts", "topk", "capacity", "rank", "patience_ticks"])
def all_gather_moe(
    a_ptr,  # gather buffer: tokens of K elements, those of chunk p after p * (tokens of a chunk)
    b_ptr,  # weight [experts, N, K], an expert's matrix stride_be apart, rows or columns stride_b
    c_ptr,  # out [choices, N], rows stride_cm apart
    rows_ptr,  # of the plan: the row of `out` of each sorted choice
    sources_ptr,  # of the plan: topk times the token in the gather buffer, plus the choice
    ends_ptr,  # of the plan, as is the next
    tables_ptr,
    flags_ptr,  # int32 [7, WORLD]
    errors_ptr,  # int64 [WORLD], in memory that the host reads without waiting
    size_class,  # the power of two that the number of choices is tuned as
    N,
    K,
    experts,
    topk,
    capacity,  # blocks of a table
    stride_be,
    stride_b,
    stride_cm,
    rank,
    patience_ticks,
    WORLD: tl.constexpr,
    HEIGHTS: tl.constexpr,
    TMA_LEGAL: tl.constexpr,
    BY_COLUMNS: tl.constexpr,  # the weight's columns are contiguous, not its rows
    UPCAST: tl.constexpr,  # the interpreter cannot do arithmetic in bfloat16
    SORTED: tl.constexpr,  # the rows of `out` are the sorted choices
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,  # store half a tile at a time, with half the registers for it
    TMA: tl.constexpr,
    BY_ARRIVAL: tl.constexpr,  # tiles in the order in which chunks arrive; else expert by expert
):
    """Write each choice's token times its expert's B.T; zeros for a choice that is dropped."""
    peers = Peers(flags_ptr, errors_ptr, rank, patience_ticks)
    weight = Weight(b_ptr, experts, N, K, stride_be, stride_b)
    USE_TMA: tl.constexpr = TMA and TMA_LEGAL
    b_desc = b_ptr
    if USE_TMA:
        b_desc = describe_weight(weight, BLOCK_N, BLOCK_K, BY_COLUMNS)
    table = table_of(BLOCK_M) + (0 if BY_ARRIVAL else HEIGHTS)
    table_ptr = tables_ptr + table * capacity * ENTRY
    blocks = tl.load(ends_ptr + table * WORLD + WORLD - 1)
    tiles_n = tl.cdiv(N, BLOCK_N)

    here = 0  # the last stage that is known to be complete; 0 is this rank's own chunk
    for tile in tl.range(tl.program_id(0), blocks * tiles_n, tl.num_programs(0)):
        block, pid_n = grouped_tile(tile, blocks, tiles_n, GROUP_M)
        col = pid_n * BLOCK_N
        expert = tl.load(table_ptr + block * ENTRY)
        begin = tl.load(table_ptr + block * ENTRY + 1)
        end = tl.load(table_ptr + block * ENTRY + 2)
        stage = tl.load(table_ptr + block * ENTRY + 3)
        while here < stage:
            here += 1
            wait_for_flag(ARRIVED, NOT_PUSHED, (rank + here) % WORLD, peers, WORLD)
        places = begin + tl.arange(0, BLOCK_M)
        real = places < end
        # Rows beyond the end read the block's first one: in bounds, and no mask in the K loop.
        places = tl.where(real, places, begin)
        source = tl.load(sources_ptr + places) // topk
        a_rows_ptr = a_ptr + tl.cast(source, tl.int64) * K
        acc = multiply_rows(
            *(a_rows_ptr, weight, b_desc, expert, col),
            *(BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, BY_COLUMNS, UPCAST),
        )
        rows = places
        if not SORTED:
            rows = tl.load(rows_ptr + places)
        to_ptr = c_ptr + tl.cast(rows, tl.int64) * stride_cm
        store_rows(acc, to_ptr, real, col, N, EPILOGUE_SUBTILE)

    for peer in tl.range(tl.program_id(0), WORLD, tl.num_programs(0)):
        if peer != rank:  # its push is a part of this call, even if no tile needed it
            value = wait_for_flag(ARRIVED, NOT_PUSHED, peer, peers, WORLD)
            if SORTED:  # a call may have no other kernel
                release_if_given_up(value, peer, peers, WORLD)
