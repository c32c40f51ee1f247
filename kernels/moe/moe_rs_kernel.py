"""The device side of `MoEReduceScatter`: a persistent grouped GEMM that combines and hands over chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from ..configs import INTERPRETED, prune_overlapped, take_first
from ..signals import notify, poll_until, record_failure
from ..tiles import claim_number, grouped_tile
from .flags import ARRIVED, DONE, NOT_COMPUTED, NOT_PUSHED, wait_for_flag
from .launch import CPU_TILES, GPU_TILES
from .products import Weight, multiply_rows, store_rows, table_of
from .routing import ENTRY

GPU_CANDIDATES = GPU_TILES
CANDIDATES = CPU_TILES if INTERPRETED else GPU_CANDIDATES


COMBINE_M = tl.constexpr(16)  # tokens of a block that is combined


@triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "K", "experts", "WORLD", "TMA_LEGAL"],
    prune_configs_by={"early_config_prune": prune_overlapped},
    do_bench=take_first,  # outside a tuned function: a launch counts tiles, and its peers' part is behind it
)
@triton.jit(
    do_not_specialize=[
        "size_class",
        "experts",
        "topk",
        "tokens_per_rank",
        "capacity",
        "first_part",
        "parts",
        "rank",
        "patience_ticks",
    ]
)
def moe_reduce_scatter(
    a_ptr,  # y [choices, K], rows stride_am apart
    b_ptr,  # weight [experts, N, K], an expert's matrix stride_be apart, rows stride_bn
    c_ptr,  # out [tokens of this rank, N], rows stride_cm apart
    products_ptr,  # [choices, N]: each choice's product, weighted
    partial_ptr,  # [WORLD - 1, tokens_per_rank, N]: our sums for rank + 1, rank + 2, ...
    staged_ptr,  # [WORLD - 1, tokens_per_rank, N]: the sums of rank + 1, rank + 2, ... for this rank
    weights_ptr,  # float32: of each choice, in the layout of the plan's sources
    rows_ptr,  # of the plan: the row of `a` of each sorted choice
    sources_ptr,  # of the plan, as are the next four
    offsets_ptr,
    ends_ptr,
    tables_ptr,
    counters_ptr,  # int32 [3, WORLD], zeros: tiles of each stage that are stored, blocks that are combined;
    # items that are claimed, by the first part of a launch
    flags_ptr,  # int32 [7, WORLD]
    errors_ptr,  # int64 [WORLD], in memory that the host reads without waiting
    size_class,  # the power of two that the number of choices is tuned as
    N,
    K,
    experts,
    topk,
    tokens_per_rank,
    capacity,  # blocks of a table
    stride_am,
    stride_be,
    stride_bn,
    stride_cm,
    first_part,
    parts,  # WORLD + 1, or one in a call that is captured
    rank,
    patience_ticks,
    WORLD: tl.constexpr,
    TMA_LEGAL: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter cannot do arithmetic in bfloat16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,  # store half a tile at a time, with half the registers for it
    TMA: tl.constexpr,
):
    """Multiply the rows of stage 0, 1, ...; combine the tokens of each stage once its products are stored.

    Stage s is the chunk of rank + 1 + s, the own one the last. The work is one list, whose items the programs
    claim one by one: tiles of stage 0, tiles of stage 1, blocks to combine of stage 0, tiles of stage 2,
    blocks to combine of stage 1, ... In a call that is captured each launch has a list for one stage: its
    tiles, then its blocks to combine. So what an item waits for has been claimed by a program that runs.
    """
    weight = Weight(b_ptr, experts, N, K, stride_be, stride_bn)
    USE_TMA: tl.constexpr = TMA and TMA_LEGAL
    b_desc = b_ptr
    if USE_TMA:
        b_desc = tl.make_tensor_descriptor(b_ptr, [experts * N, K], [stride_bn, 1], [BLOCK_N, BLOCK_K])
    table = table_of(BLOCK_M)
    table_ptr = tables_ptr + table * capacity * ENTRY
    tiles_n = tl.cdiv(N, BLOCK_N)

    behind = tl.where(parts > 1, 1, 0)  # how many parts a stage is combined behind its tiles
    claims_ptr = counters_ptr + 2 * WORLD + first_part
    item = claim_number(claims_ptr)
    if (item == 0) & (parts > 1):  # one program, which runs: the first that came
        for peer in range(0, WORLD):
            if (peer != rank) & (tl.load(offsets_ptr + peer) == tl.load(offsets_ptr + peer + 1)):
                notify(flags_ptr + DONE * WORLD + peer, 1)  # there is nothing to compute for it

    listed = 0  # items in front of the next part of the list
    first_block = 0  # of the stage
    if first_part > 0:
        first_block = tl.load(ends_ptr + table * WORLD + first_part - 1)
    for part in tl.range(first_part, first_part + parts):
        last_block = tl.load(ends_ptr + table * WORLD + tl.minimum(part, WORLD - 1))
        blocks = last_block - first_block
        end = listed + blocks * tiles_n
        while item < end:
            block, pid_n = grouped_tile(item - listed, blocks, tiles_n, GROUP_M)
            entry_ptr = table_ptr + (first_block + block) * ENTRY
            col = pid_n * BLOCK_N
            expert = tl.load(entry_ptr)
            begin = tl.load(entry_ptr + 1)
            places = begin + tl.arange(0, BLOCK_M)
            real = places < tl.load(entry_ptr + 2)
            # Rows beyond the end read the block's first one: in bounds, and no mask in the K loop.
            places = tl.where(real, places, begin)
            rows = tl.cast(tl.load(rows_ptr + places), tl.int64)
            a_rows_ptr = a_ptr + rows * stride_am
            acc = multiply_rows(
                a_rows_ptr, weight, b_desc, expert, col, BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, UPCAST
            )
            weights = tl.load(weights_ptr + tl.load(sources_ptr + places))
            # The weight of a dropped choice may be NaN.
            acc *= tl.where(expert < experts, weights, 0.0)[:, None]
            store_rows(acc, products_ptr + rows * N, real, col, N, EPILOGUE_SUBTILE)
            tl.debug_barrier()  # one thread counts, for the stores of all
            tl.atomic_add(counters_ptr + part, 1, sem="release", scope="gpu")
            item = claim_number(claims_ptr)
        listed = end
        first_block = last_block
        if part >= behind:
            item, listed = combine_stage(
                part - behind,
                item,
                listed,
                tiles_n,
                claims_ptr,
                c_ptr,
                products_ptr,
                partial_ptr,
                staged_ptr,
                offsets_ptr,
                ends_ptr + table * WORLD,
                counters_ptr,
                flags_ptr,
                errors_ptr,
                N,
                topk,
                tokens_per_rank,
                stride_cm,
                parts,
                rank,
                patience_ticks,
                WORLD,
                BLOCK_N,
            )

    if first_part + parts >= WORLD:
        for peer in tl.range(tl.program_id(0), WORLD, tl.num_programs(0)):
            if peer != rank:  # its push is a part of this call, whether this rank has tokens or not
                wait_for_flag(ARRIVED, NOT_PUSHED, peer, flags_ptr, errors_ptr, patience_ticks, WORLD)


@triton.jit
def combine_stage(
    stage,
    item,  # the program's claim
    listed,  # items in front of this stage's blocks
    tiles_n,
    claims_ptr,
    c_ptr,
    products_ptr,
    partial_ptr,
    staged_ptr,
    offsets_ptr,
    ends_ptr,
    counters_ptr,
    flags_ptr,
    errors_ptr,
    N,
    topk,
    tokens_per_rank,
    stride_cm,
    parts,
    rank,
    patience_ticks,
    WORLD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add up the products of each token of a stage, in blocks; return the next claim and the items so far."""
    chunk = (rank + 1 + stage) % WORLD
    offset = tl.load(offsets_ptr + chunk)
    tokens = (tl.load(offsets_ptr + chunk + 1) - offset) // topk
    items = tl.cdiv(tokens, COMBINE_M) * tiles_n
    end = listed + items
    if item < end:
        _wait_for_products(stage, tiles_n, ends_ptr, counters_ptr, errors_ptr + rank, patience_ticks)
        if chunk == rank:
            for peer in range(0, WORLD):
                if peer != rank:
                    wait_for_flag(ARRIVED, NOT_PUSHED, peer, flags_ptr, errors_ptr, patience_ticks, WORLD)
    while item < end:
        block = item - listed
        rows = block // tiles_n * COMBINE_M + tl.arange(0, COMBINE_M)
        cols = block % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < tokens)[:, None] & (cols < N)[None, :]
        choices = tl.cast(offset + rows * topk, tl.int64)
        acc = tl.zeros((COMBINE_M, BLOCK_N), dtype=tl.float32)
        for choice in range(0, topk):
            from_ptr = products_ptr + (choices + choice)[:, None] * N + cols[None, :]
            acc += tl.load(from_ptr, mask=mask, other=0.0).to(tl.float32)
        if chunk == rank:
            for slot in range(0, WORLD - 1):
                staged = tl.cast(slot * tokens_per_rank + rows, tl.int64)
                from_ptr = staged_ptr + staged[:, None] * N + cols[None, :]
                acc += tl.load(from_ptr, mask=mask, other=0.0).to(tl.float32)
            to_ptr = c_ptr + tl.cast(rows, tl.int64)[:, None] * stride_cm + cols[None, :]
            tl.store(to_ptr, acc.to(c_ptr.dtype.element_ty), mask=mask)
        else:
            slot_rows = tl.cast(stage * tokens_per_rank + rows, tl.int64)
            to_ptr = partial_ptr + slot_rows[:, None] * N + cols[None, :]
            tl.store(to_ptr, acc.to(c_ptr.dtype.element_ty), mask=mask)
            tl.debug_barrier()  # one thread counts, for the stores of all
            before = tl.atomic_add(counters_ptr + WORLD + chunk, 1, sem="acq_rel", scope="gpu")
            if (before == items - 1) & (parts > 1):
                notify(flags_ptr + DONE * WORLD + chunk, 1)
        item = claim_number(claims_ptr)
    return item, end


@triton.jit
def _wait_for_products(stage, tiles_n, ends_ptr, counters_ptr, error_ptr, patience_ticks):
    """Return once all tiles with rows of this stage are stored: those of its part and of earlier ones."""
    before = 0
    for part in range(0, stage + 1):
        end = tl.load(ends_ptr + part)
        stored = poll_until(counters_ptr + part, (end - before) * tiles_n, patience_ticks, False, "gpu")
        if stored < (end - before) * tiles_n:
            record_failure(error_ptr, NOT_COMPUTED, 0, stored)
        before = end
