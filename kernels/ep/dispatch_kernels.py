"""The kernels of a dispatch that move rows: send this rank's tokens, and gather those of its experts."""

from __future__ import annotations

import triton
import triton.language as tl

from ..signals import record_failure
from .slots import (
    DISPATCHED,
    OVER_CAPACITY,
    SCALED,
    SENT,
    address,
    claim,
    copy_row,
    end_exchange,
    exchange,
    is_last,
    quantize_row,
    raise_flags,
    rank_of,
    restore_row,
    tuned,
)
from .sorting_kernels import choices_before, positions_of, tokens_of_all


@tuned("AT_ONCE", "GATHERS")
@triton.jit(
    do_not_specialize=["size_class", "T", "most_tokens", "experts", "capacity", "rank", "patience_ticks"]
)
def send_tokens(
    x_ptr,  # [T, H], rows stride_x apart
    given_ids_ptr,  # int32 or int64 [T, K], contiguous
    given_weights_ptr,  # float32 [T, K], contiguous, if WEIGHTED
    tokens_ptr,  # these, and their tables of addresses, as the module says
    ids_ptr,
    weights_ptr,  # float32, as `ids`
    counts_ptr,
    flags_ptr,
    tables_ptr,  # int64 [5, WORLD]: addresses of tokens, ids, weights, counts, flags
    errors_ptr,
    state_ptr,  # int32 [2, COLUMNS]
    rows_ptr,  # these four, what `place_choices` and `gather_rows` write, if AT_ONCE
    sources_ptr,
    places_ptr,
    offsets_ptr,
    size_class,
    T,
    most_tokens,
    experts,  # of a rank
    capacity,
    rank,
    patience_ticks,
    stride_x,
    H: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    RANKS: tl.constexpr,  # a power of two, at least WORLD
    WEIGHTED: tl.constexpr,
    TO_ALL: tl.constexpr,  # this rank's own slot gets the tokens of its experts, too
    FP8: tl.constexpr,
    AT_ONCE: tl.constexpr,  # then wait for all peers, and place the rows
    GATHERS: tl.constexpr,  # and copy them there, and end the dispatch
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,  # a power of two, at least K
    KEYS: tl.constexpr,  # rows that the programs of an SM place at a time
    POSITIONS: tl.constexpr,  # that it looks at, at a time
    PER_SM: tl.constexpr,  # the grid's
):
    """Send this rank's tokens, choices and count to its peers, and raise the flag of the dispatch there."""
    tl.static_assert(not FP8 or BLOCK // SCALED > 0)
    APART: tl.constexpr = WORLD if AT_ONCE else 1  # programs that share the peers of a token
    MINE: tl.constexpr = KEYS // PER_SM
    number = exchange(state_ptr, DISPATCHED)
    slot = (number & 1) * WORLD + rank
    choices = tl.arange(0, CHOICES)
    real = choices < K
    shares, sent = tl.num_programs(0), 0
    share = claim(state_ptr, DISPATCHED) if AT_ONCE else tl.program_id(0)
    while share < shares:
        for item in range(share, T * APART, shares):
            token, first = item % T, item // T
            ids = tl.load(given_ids_ptr + token * K + choices, mask=real, other=-1)
            ids = tl.where((ids < 0) | (ids >= experts * WORLD), -1, ids).to(tl.int32)
            owners = tl.where(ids < 0, -1, ids // experts)
            row_ptr = x_ptr + tl.cast(token, tl.int64) * stride_x
            place = tl.cast(slot * most_tokens + token, tl.int64)
            for peer in range(first, first + WORLD // APART):
                their_ids_ptr = address(tables_ptr + WORLD, peer, ids_ptr)
                tl.store(their_ids_ptr + place * K + choices, ids, mask=real)
                if WEIGHTED:
                    weights = tl.load(given_weights_ptr + token * K + choices, mask=real, other=0.0)
                    their_weights_ptr = address(tables_ptr + 2 * WORLD, peer, weights_ptr)
                    tl.store(their_weights_ptr + place * K + choices, weights, mask=real)
                if (TO_ALL or peer != rank) and tl.max((owners == peer).to(tl.int32), axis=0) > 0:
                    to_ptr = address(tables_ptr, peer, tokens_ptr) + place * H
                    if FP8:
                        quantize_row(to_ptr, row_ptr, H, BLOCK)
                    else:
                        copy_row(to_ptr, row_ptr, H, BLOCK)
        sent += 1
        share = claim(state_ptr, DISPATCHED) if AT_ONCE else shares
    if is_last(state_ptr, sent, DISPATCHED, SENT):
        every = tl.arange(0, RANKS)
        their_counts = tl.load(tables_ptr + 3 * WORLD + every, mask=every < WORLD, other=0).to(
            counts_ptr.dtype
        )
        tl.store(their_counts + slot, 2 * T + (1 if FP8 else 0), mask=every < WORLD)
        raise_flags(tables_ptr + 4 * WORLD, flags_ptr, state_ptr, rank, DISPATCHED, WORLD)
    if AT_ONCE:
        tokens = tokens_of_all(
            number, counts_ptr, flags_ptr, errors_ptr, patience_ticks, rank, WORLD, RANKS, FP8, True
        )
        of_all = tl.sum(tokens, axis=0) * K
        in_slots = (number & 1) * WORLD * most_tokens * K
        of_slot_ptr = ids_ptr + tl.cast(in_slots, tl.int64)
        # After the choices of all ranks come those that would be the first of each expert, and the end.
        for begin in range(tl.program_id(0) * MINE, of_all + experts + 1, shares * MINE):
            items = begin + tl.arange(0, MINE)
            positions = positions_of(items, tokens, most_tokens, K, RANKS)
            ids = tl.load(of_slot_ptr + positions, mask=items < of_all, other=0) - rank * experts
            ids = tl.where(items < of_all, ids, items - of_all)
            places = choices_before(
                *(ids, positions, of_slot_ptr, tokens, rank, experts, most_tokens),
                *(K, WORLD, RANKS, MINE, POSITIONS),
            )
            is_end = (items >= of_all) & (ids <= experts)
            tl.store(offsets_ptr + ids, tl.minimum(places, capacity), mask=is_end)
            rows = tl.max(tl.where(is_end & (ids == experts), places, 0), axis=0)
            if rows > capacity:
                record_failure(errors_ptr + rank, OVER_CAPACITY, number, rows)
            is_row = (items < of_all) & (ids >= 0) & (ids < experts)
            own = positions - rank * most_tokens * K
            is_own = is_row & (own >= 0) & (own < most_tokens * K)
            tl.store(places_ptr + own, places, mask=is_own)
            places = tl.where(is_row & (places < capacity), places, -1)
            tl.store(sources_ptr + places, in_slots + positions, mask=places >= 0)
            for each in range(0, MINE if GATHERS else 0):
                is_this = tl.arange(0, MINE) == each
                row = tl.max(tl.where(is_this, places, -1), axis=0)
                if row >= 0:
                    position = in_slots + tl.max(tl.where(is_this, positions, -1), axis=0)
                    _gather_row(
                        *(row, position, x_ptr, tokens_ptr, rows_ptr, T, most_tokens, rank, stride_x),
                        *(H, K, WORLD, FP8, BLOCK),
                    )
        if GATHERS:
            end_exchange(state_ptr, DISPATCHED)


@tuned()
@triton.jit(do_not_specialize=["size_class", "T", "most_tokens", "experts", "rank"])
def gather_rows(
    x_ptr,  # [T, H], rows stride_x apart
    tokens_ptr,
    rows_ptr,  # [capacity, H]
    sources_ptr,
    offsets_ptr,
    state_ptr,
    size_class,
    T,
    most_tokens,
    experts,
    rank,
    stride_x,
    H: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_SM: tl.constexpr,
):
    """Copy each row to its place, and end the dispatch."""
    for row in range(tl.program_id(0), tl.load(offsets_ptr + experts), tl.num_programs(0)):
        position = tl.load(sources_ptr + row)
        _gather_row(
            *(row, position, x_ptr, tokens_ptr, rows_ptr, T, most_tokens, rank, stride_x),
            *(H, K, WORLD, FP8, BLOCK),
        )
    end_exchange(state_ptr, DISPATCHED)


@triton.jit
def _gather_row(
    row,
    position,
    x_ptr,
    tokens_ptr,
    rows_ptr,
    T,
    most_tokens,
    rank,
    stride_x,
    H: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the token of a position to its row; none of a position that is outside of the slots."""
    source, token = rank_of(position, most_tokens, K, WORLD), position // K
    if (source >= 0) & ((source != rank) | (token % most_tokens < T)):
        to_ptr = rows_ptr + tl.cast(row, tl.int64) * H
        from_ptr = tokens_ptr + tl.cast(token, tl.int64) * H
        if FP8:
            restore_row(to_ptr, from_ptr, H, BLOCK)
        else:
            if source == rank:
                from_ptr = x_ptr + tl.cast(token % most_tokens, tl.int64) * stride_x
            copy_row(to_ptr, from_ptr, H, BLOCK)
