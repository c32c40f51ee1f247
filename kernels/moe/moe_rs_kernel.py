"""The device side of `MoEReduceScatter`: a persistent grouped GEMM that combines and hands over chunks.

Programs claim items from a list: tiles of products, stage by stage, and in between blocks of tokens to be
combined. Tiles are counted at their stage. A program that combines waits for the counts; the last one of a
peer's stage sets DONE, and the side stream pushes after it.

STORES: sums for a peer are stored into that peer's memory. A program counts its blocks of a stage together,
as each count waits for the stores before it. The one that counts the last block raises the peer's ARRIVED.
Such a launch has the whole list: see [Note: sums leave by stores]. It has not run between GPUs
(docs/not-yet-run.md).

Measured (one H200, 2026-11-24, four shapes): sorted rows come 3 to 11 % faster by TMA than by pointers. Two
H200, 2026-11-26, 8192 x 4096 x 14336: one round of tiles ahead of the combining takes 1.559 ms; rejected: all
tiles ahead, 1.694 ms, and blocks of 16 tokens, 1.629 ms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..configs import INTERPRETED, prune_overlapped, take_first
from ..exchange.flags import ARRIVED, DONE, NOT_PUSHED
from ..exchange.peers import Peers, is_any_lost, release_if_given_up, wait_for_all, wait_for_flag
from ..exchange.stores import count_stored, let_peers_write, may_store, memory_of, tell_of_rows
from ..products import store_rows
from ..signals import count_up, notify, poll_until, record_failure
from ..tiles import claim_number, grouped_tile
from .announcer import NOT_COMPUTED
from .launch import CPU_TILES, GPU_TILES, with_fields
from .products import (
    Weight,
    describe_neighbours,
    describe_weight,
    multiply_neighbours,
    multiply_rows,
    table_of,
)
from .routing import ENTRY

FEW_ROWS = 16  # tokens of a combined block beside tiles of few rows; else 64 take a quarter of the claims

GPU_CANDIDATES = [
    with_fields(config, COMBINE_M=64 if config.kwargs["BLOCK_M"] >= 64 else FEW_ROWS) for config in GPU_TILES
]
CPU_CANDIDATES = [
    with_fields(config, COMBINE_M=rows) for config, rows in zip(CPU_TILES, (16, 16, 32, 8), strict=True)
]
CANDIDATES = CPU_CANDIDATES if INTERPRETED else GPU_CANDIDATES


class Products(NamedTuple):
    """Operands and result of the grouped GEMM; see the kernel's parameters."""

    a_ptr: Any
    a_desc: Any  # as `describe_neighbours` returns it, if A_BY_TMA
    stride_am: Any
    rows_ptr: Any
    sources_ptr: Any
    weights_ptr: Any
    products_ptr: Any


class Sums(NamedTuple):
    """Operands and results of combining a token's products."""

    c_ptr: Any
    stride_cm: Any
    products_ptr: Any
    partial_ptr: Any
    staged_ptr: Any
    table_ptr: Any
    offsets_ptr: Any
    N: Any
    topk: Any
    tokens_per_rank: Any


class Items(NamedTuple):
    """The list from which programs claim items."""

    claims_ptr: Any
    counters_ptr: Any
    ends_ptr: Any  # of the table that the kernel reads
    tiles_n: Any
    is_whole: Any  # whether a launch has the whole list


@triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "K", "experts", "WORLD", "TMA_LEGAL", "BY_COLUMNS", "A_TMA_LEGAL", "STORES"],
    prune_configs_by={"early_config_prune": prune_overlapped},
    do_bench=take_first,  # outside a tuned function: a launch counts tiles, and its peers' part is after it
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
    table_ptr,  # int64 [2, WORLD]: where `staged` and `flags` of each rank lie
    a_ptr,  # y [choices, K], rows stride_am apart
    b_ptr,  # weight [experts, N, K], an expert's matrix stride_be apart, rows or columns stride_b
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
    stride_b,
    stride_cm,
    first_part,
    parts,  # WORLD, or one in a call that is captured
    rank,
    patience_ticks,
    WORLD: tl.constexpr,
    TMA_LEGAL: tl.constexpr,
    BY_COLUMNS: tl.constexpr,  # the weight's columns are contiguous, not its rows
    UPCAST: tl.constexpr,  # the interpreter cannot do arithmetic in bfloat16
    SORTED: tl.constexpr,  # the rows of `a`, and `weights`, are those of the sorted choices
    A_TMA_LEGAL: tl.constexpr,  # they are, and TMA can address them
    STORES: tl.constexpr,  # to the peers' memory; else to `partial`
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,  # store half a tile at a time, with half the registers for it
    TMA: tl.constexpr,
    COMBINE_M: tl.constexpr,  # tokens of a block that is combined
):
    """Multiply the rows of stage 0, 1, ...; combine the tokens of each stage once its products are stored.

    Stage s is the chunk of rank + 1 + s, the own one the last. The work is one list, whose items the programs
    claim one by one. It has a part for each stage: the stage's tiles that the part before does not have; the
    first tiles of the next stage, one for each program; the stage's blocks to combine. In a captured call
    each launch has one part. See [Note: a scatter of experts ends].
    """
    weight = Weight(b_ptr, experts, N, K, stride_be, stride_b)
    USE_TMA: tl.constexpr = TMA and TMA_LEGAL
    b_desc = b_ptr
    if USE_TMA:
        b_desc = describe_weight(weight, BLOCK_N, BLOCK_K, BY_COLUMNS)
    A_BY_TMA: tl.constexpr = USE_TMA and A_TMA_LEGAL
    a_desc = a_ptr
    if A_BY_TMA:
        rows = tl.maximum(tl.load(offsets_ptr + WORLD), 1)  # there is no descriptor of no rows
        a_desc = describe_neighbours(a_ptr, rows, stride_am, weight, BLOCK_M, BLOCK_K)
    table = table_of(BLOCK_M)
    entries_ptr = tables_ptr + table * capacity * ENTRY
    tiles_n = tl.cdiv(N, BLOCK_N)

    claims_ptr = counters_ptr + 2 * WORLD + first_part
    ends_ptr += table * WORLD
    items = Items(claims_ptr, counters_ptr, ends_ptr, tiles_n, parts > 1)
    products = Products(a_ptr, a_desc, stride_am, rows_ptr, sources_ptr, weights_ptr, products_ptr)
    sums = Sums(
        *(c_ptr, stride_cm, products_ptr, partial_ptr, staged_ptr, table_ptr),
        *(offsets_ptr, N, topk, tokens_per_rank),
    )
    peers = Peers(flags_ptr, errors_ptr, rank, patience_ticks)
    item = claim_number(claims_ptr)
    ANNOUNCED: tl.constexpr = not SORTED  # choices came, after permits
    if (item == 0) & items.is_whole:  # one program, which runs: the first that came
        if STORES and not ANNOUNCED:
            let_peers_write(table_ptr, peers, WORLD)
        for peer in range(0, WORLD):
            if (peer != rank) & (tl.load(offsets_ptr + peer) == tl.load(offsets_ptr + peer + 1)):
                # There is nothing to compute for it.
                if STORES:
                    may_store(peer, NOT_PUSHED, ANNOUNCED, peers, WORLD)
                    tell_of_rows(peer, 1, table_ptr, peers, WORLD, ANNOUNCED)
                else:
                    notify(flags_ptr + DONE * WORLD + peer, 1)

    most_ahead = tl.num_programs(0)
    first_block = 0  # of the stage
    shift = 0  # from an item's number to that of its tile, among those of all stages
    if first_part > 0:
        first_block = tl.load(ends_ptr + first_part - 1)
        shift = _end_of_part(first_part - 1, most_ahead, items, WORLD)
    for part in tl.range(first_part, first_part + parts):
        last_block = tl.load(ends_ptr + part)
        last_tile = _end_of_part(part, most_ahead, items, WORLD)
        while item + shift < last_tile:
            tile = item + shift
            is_ahead = tl.where(tile >= last_block * tiles_n, 1, 0)
            begin = tl.where(is_ahead == 1, last_block, first_block)
            blocks = tl.load(ends_ptr + part + is_ahead) - begin
            block, pid_n = grouped_tile(tile - begin * tiles_n, blocks, tiles_n, GROUP_M)
            entry_ptr, col = entries_ptr + (begin + block) * ENTRY, pid_n * BLOCK_N
            _multiply_block(
                *(entry_ptr, col, products, weight, b_desc),
                *(BLOCK_M, BLOCK_N, BLOCK_K, EPILOGUE_SUBTILE, USE_TMA, A_BY_TMA, BY_COLUMNS, UPCAST, SORTED),
            )
            count_up(counters_ptr + part + is_ahead, "release")
            item = claim_number(claims_ptr)
        first_block = last_block
        listed = last_tile - shift  # items in front of those that combine the stage
        item, listed = _combine_stage(
            *(part, item, listed, items, sums, peers),
            *(WORLD, COMBINE_M, BLOCK_N, STORES, ANNOUNCED),
        )
        shift = last_tile - listed

    if first_part + parts == WORLD:
        for peer in tl.range(tl.program_id(0), WORLD, tl.num_programs(0)):
            if peer != rank:  # its push is a part of this call, even if this rank has no tokens
                value = wait_for_flag(ARRIVED, NOT_PUSHED, peer, peers, WORLD)
                if SORTED:  # a call has no other kernel
                    release_if_given_up(value, peer, peers, WORLD)


@triton.jit
def _end_of_part(part, most_ahead, items, WORLD: tl.constexpr):
    """Return how many tiles, of all stages together, there are up to the end of a part of the list."""
    of_stage = tl.load(items.ends_ptr + part) * items.tiles_n
    of_next = tl.load(items.ends_ptr + tl.minimum(part + 1, WORLD - 1)) * items.tiles_n - of_stage
    return of_stage + tl.minimum(of_next, most_ahead)


@triton.jit
def _multiply_block(
    entry_ptr,
    col,
    products,
    weight,
    b_desc,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUBTILE: tl.constexpr,
    USE_TMA: tl.constexpr,
    A_BY_TMA: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
    SORTED: tl.constexpr,
):
    """Store the products of a block's choices, weighted, from column `col` on."""
    expert = tl.load(entry_ptr)
    begin = tl.load(entry_ptr + 1)
    places = begin + tl.arange(0, BLOCK_M)
    real = places < tl.load(entry_ptr + 2)
    # Rows beyond the end read the block's first one: in bounds, and no mask in the K loop.
    places = tl.where(real, places, begin)
    rows = tl.cast(tl.load(products.rows_ptr + places), tl.int64)
    if A_BY_TMA:
        acc = multiply_neighbours(
            *(products.a_desc, begin, weight, b_desc, expert, col),
            *(BLOCK_M, BLOCK_N, BLOCK_K, BY_COLUMNS, UPCAST),
        )
    else:
        a_rows = rows
        if SORTED:
            a_rows = tl.cast(places, tl.int64)
        a_rows_ptr = products.a_ptr + a_rows * products.stride_am
        acc = multiply_rows(
            *(a_rows_ptr, weight, b_desc, expert, col),
            *(BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, BY_COLUMNS, UPCAST),
        )
    of_weights = places
    if not SORTED:
        of_weights = tl.load(products.sources_ptr + places)
    weights = tl.load(products.weights_ptr + of_weights)
    # The weight of a dropped choice may be NaN.
    acc *= tl.where(expert < weight.experts, weights, 0.0)[:, None]
    store_rows(acc, products.products_ptr + rows * weight.N, real, col, weight.N, SUBTILE)


@triton.jit
def _combine_stage(
    stage,
    item,  # the program's claim
    listed,  # items in front of this stage's blocks
    items,
    sums,
    peers,
    WORLD: tl.constexpr,
    COMBINE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STORES: tl.constexpr,
    ANNOUNCED: tl.constexpr,
):
    """Add up the products of each token of a stage, in blocks; return the next claim and the items so far."""
    rank, counts_ptr = peers.rank, items.counters_ptr + WORLD
    chunk = (rank + 1 + stage) % WORLD
    offset = tl.load(sums.offsets_ptr + chunk)
    tokens = (tl.load(sums.offsets_ptr + chunk + 1) - offset) // sums.topk
    blocks = tl.cdiv(tokens, COMBINE_M) * items.tiles_n
    end = listed + blocks
    lost = 0
    to_ptr = sums.partial_ptr + tl.cast(stage * sums.tokens_per_rank, tl.int64) * sums.N
    stored = 0  # blocks in the peer's memory that are not counted
    if STORES:
        slot = tl.cast((WORLD - 2 - stage) * sums.tokens_per_rank, tl.int64)
        to_ptr = memory_of(chunk, sums.table_ptr, sums.staged_ptr) + slot * sums.N
    if item < end:
        lost = _wait_for_products(stage, items, peers.errors_ptr + rank, peers.patience_ticks)
        # Without a tile nothing was sorted: see [Note: programs find other choices].
        lost += tl.where(tl.load(items.ends_ptr + WORLD - 1) == 0, 1, 0)
        if chunk == rank:
            wait_for_all(ARRIVED, NOT_PUSHED, peers, WORLD)
            lost += is_any_lost(peers, WORLD)
        elif STORES:
            tokens = tl.where(may_store(chunk, NOT_PUSHED, ANNOUNCED, peers, WORLD), tokens, 0)
    while item < end:
        block = item - listed
        rows = block // items.tiles_n * COMBINE_M + tl.arange(0, COMBINE_M)
        cols = block % items.tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        _combine_block(rows, cols, tokens, offset, to_ptr, chunk == rank, lost, sums, WORLD)
        if STORES:
            stored += 1
        elif chunk != rank:
            before = count_up(counts_ptr + chunk, "acq_rel")
            if (before == blocks - 1) & items.is_whole:
                notify(peers.flags_ptr + DONE * WORLD + chunk, 1)
        item = claim_number(items.claims_ptr)
    if STORES and (stored > 0) & (chunk != rank):
        count_stored(chunk, counts_ptr, blocks, 1, sums.table_ptr, peers, WORLD, stored, ANNOUNCED)
    return item, end


@triton.jit
def _combine_block(rows, cols, tokens, offset, to_ptr, is_own, lost, sums, WORLD: tl.constexpr):
    """Store the sums of some tokens at `to_ptr`; those of own tokens in `out`, with the peers' sums added.

    See [Note: how a sum is made]. lost: above 0 if a part of them is missing; then they are NaN.
    """
    N = sums.N
    mask = (rows < tokens)[:, None] & (cols < N)[None, :]
    choices = tl.cast(offset + rows * sums.topk, tl.int64)
    acc = tl.zeros((rows.shape[0], cols.shape[0]), dtype=tl.float32)
    for choice in range(0, sums.topk):
        from_ptr = sums.products_ptr + (choices + choice)[:, None] * N + cols[None, :]
        acc += tl.load(from_ptr, mask=mask, other=0.0).to(tl.float32)
    acc = tl.where(lost != 0, float("nan"), acc)
    if is_own:
        for slot in range(0, WORLD - 1):
            staged = tl.cast(slot * sums.tokens_per_rank + rows, tl.int64)
            from_ptr = sums.staged_ptr + staged[:, None] * N + cols[None, :]
            acc += tl.load(from_ptr, mask=mask, other=0.0).to(tl.float32)
        out_ptr = sums.c_ptr + tl.cast(rows, tl.int64)[:, None] * sums.stride_cm + cols[None, :]
        tl.store(out_ptr, acc.to(sums.c_ptr.dtype.element_ty), mask=mask)
    else:
        sums_ptr = to_ptr + tl.cast(rows, tl.int64)[:, None] * N + cols[None, :]
        tl.store(sums_ptr, acc.to(sums.c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _wait_for_products(stage, items, error_ptr, patience_ticks):
    """Wait for all tiles with rows of this stage; return how many parts have tiles that came too late.

    They belong to the stage's part and to earlier ones: see [Note: stages are combined complete].
    """
    missing = 0
    before = 0
    for part in range(0, stage + 1):
        end = tl.load(items.ends_ptr + part)
        tiles = (end - before) * items.tiles_n
        stored = poll_until(items.counters_ptr + part, tiles, patience_ticks, False, "gpu")
        if stored < tiles:
            record_failure(error_ptr, NOT_COMPUTED, 0, stored)
            missing += 1
        before = end
    return missing
