"""The kernels of a dispatch: send this rank's tokens, sort the choices of its experts, gather their rows."""

from __future__ import annotations

import triton
import triton.language as tl

from ..signals import record_failure
from .slots import (
    DISPATCHED,
    OTHER_FORMAT,
    OVER_CAPACITY,
    SCALED,
    address,
    copy_row,
    end_exchange,
    exchange,
    is_last_program,
    quantize_row,
    raise_flags,
    rank_of,
    restore_row,
    tuned,
    wait_for_peer,
)


@tuned
@triton.jit(do_not_specialize=["size_class", "T", "most_tokens", "experts", "rank"])
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
    state_ptr,  # int32 [2, 2]
    size_class,
    T,
    most_tokens,
    experts,  # of a rank
    rank,
    stride_x,
    H: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TO_ALL: tl.constexpr,  # this rank's own slot gets the tokens of its experts, too
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,  # a power of two, at least K
    PER_SM: tl.constexpr,  # the grid's
):
    """Send this rank's tokens, choices and count to its peers, and raise the flag of the dispatch there."""
    tl.static_assert(not FP8 or BLOCK // SCALED > 0)
    number = exchange(state_ptr, DISPATCHED)
    slot = (number & 1) * WORLD + rank
    choices = tl.arange(0, CHOICES)
    real = choices < K
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        ids = tl.load(given_ids_ptr + token * K + choices, mask=real, other=-1)
        ids = tl.where((ids < 0) | (ids >= experts * WORLD), -1, ids).to(tl.int32)
        owners = tl.where(ids < 0, -1, ids // experts)
        row_ptr = x_ptr + tl.cast(token, tl.int64) * stride_x
        place = tl.cast(slot * most_tokens + token, tl.int64)
        for peer in range(0, WORLD):
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
    if is_last_program(state_ptr, DISPATCHED):
        for peer in range(0, WORLD):
            tl.store(address(tables_ptr + 3 * WORLD, peer, counts_ptr) + slot, 2 * T + (1 if FP8 else 0))
        raise_flags(tables_ptr + 4 * WORLD, flags_ptr, state_ptr, rank, DISPATCHED, WORLD)


@triton.jit
def _ids_of_segment(
    begin,
    end,
    number,
    ids_ptr,
    tokens,
    most_tokens,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return positions of a block, and the experts that were chosen there; -1 where there is no choice."""
    positions = begin + tl.arange(0, BLOCK)
    of_rank = most_tokens * K
    inside = positions < end
    is_of = (positions // of_rank)[:, None] == tl.arange(0, RANKS)[None, :]
    has = tl.sum(tl.where(is_of, tokens[None, :], 0), axis=1)
    inside &= positions % of_rank < has * K
    slot = (number & 1) * WORLD * of_rank
    return positions, tl.load(ids_ptr + tl.cast(slot, tl.int64) + positions, mask=inside, other=-1)


@triton.jit
def _tokens_of_all(
    number,
    counts_ptr,
    flags_ptr,
    errors_ptr,
    patience_ticks,
    rank,
    WORLD: tl.constexpr,
    RANKS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Wait for all peers; return their numbers of tokens, 0 of one that is given up or has another format."""
    every = tl.arange(0, RANKS)
    tokens = tl.zeros((RANKS,), dtype=tl.int32)
    for peer in range(0, WORLD):
        has_come = 1
        if peer != rank:
            has_come = wait_for_peer(peer, number, flags_ptr, errors_ptr, patience_ticks, DISPATCHED, WORLD)
        count = tl.load(counts_ptr + (number & 1) * WORLD + peer, volatile=True)
        if (has_come != 0) & (count % 2 != (1 if FP8 else 0)):
            record_failure(errors_ptr + peer, OTHER_FORMAT, number, count % 2)
            has_come = 0
        tokens = tl.where((every == peer) & (has_come != 0), count // 2, tokens)
    return tokens


@triton.jit(do_not_specialize=["most_tokens", "experts", "rank", "length", "patience_ticks"])
def count_choices(
    ids_ptr,
    counts_ptr,
    flags_ptr,
    errors_ptr,  # int64 [WORLD], in memory that the host reads without waiting
    state_ptr,
    found_ptr,  # int32 [experts, SEGMENTS]: the choices of each expert in each segment
    most_tokens,
    experts,
    rank,
    length,  # of a segment, in positions
    patience_ticks,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    RANKS: tl.constexpr,  # a power of two, at least WORLD
    FP8: tl.constexpr,  # rows travel so
    BLOCK: tl.constexpr,
):
    """Wait for all peers, then count the choices of one expert in one segment; a program for each."""
    number = exchange(state_ptr, DISPATCHED)
    tokens = _tokens_of_all(
        number, counts_ptr, flags_ptr, errors_ptr, patience_ticks, rank, WORLD, RANKS, FP8
    )
    expert, segment = tl.program_id(0), tl.program_id(1)
    end = tl.minimum((segment + 1) * length, WORLD * most_tokens * K)
    found = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(segment * length, end, BLOCK):
        _, ids = _ids_of_segment(begin, end, number, ids_ptr, tokens, most_tokens, K, WORLD, RANKS, BLOCK)
        found += (ids == rank * experts + expert).to(tl.int32)
    tl.store(found_ptr + expert * tl.num_programs(1) + segment, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["most_tokens", "experts", "rank", "length", "capacity", "patience_ticks"])
def place_choices(
    ids_ptr,
    counts_ptr,
    flags_ptr,
    errors_ptr,
    state_ptr,
    found_ptr,
    sources_ptr,  # int32 [capacity]: the position of each row
    places_ptr,  # int32 [TOKENS * K]: the row of each choice of this rank's own experts by its own tokens
    offsets_ptr,  # int32 [experts + 1]
    most_tokens,
    experts,
    rank,
    length,
    capacity,
    patience_ticks,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    RANKS: tl.constexpr,
    FP8: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two, at least `experts`
    BLOCK: tl.constexpr,
):
    """Place the choices of one expert in one segment, in the order of their positions; a program for each."""
    number = exchange(state_ptr, DISPATCHED)
    tokens = _tokens_of_all(
        number, counts_ptr, flags_ptr, errors_ptr, patience_ticks, rank, WORLD, RANKS, FP8
    )
    expert, segment = tl.program_id(0), tl.program_id(1)
    every = tl.arange(0, EXPERTS)
    segments = tl.arange(0, SEGMENTS)
    inside = (every < experts)[:, None]
    found = tl.load(found_ptr + every[:, None] * SEGMENTS + segments[None, :], mask=inside, other=0)
    of_expert = tl.sum(found, axis=1)
    ends = tl.cumsum(of_expert, axis=0)
    before = (every[:, None] < expert) | ((every[:, None] == expert) & (segments[None, :] < segment))
    place = tl.sum(tl.sum(tl.where(before, found, 0), axis=1), axis=0)
    if (expert == 0) & (segment == 0):
        tl.store(offsets_ptr + 1 + every, tl.minimum(ends, capacity), mask=every < experts)
        tl.store(offsets_ptr, 0)
        rows = tl.max(ends, axis=0)
        if rows > capacity:
            record_failure(errors_ptr + rank, OVER_CAPACITY, number, rows)
    end = tl.minimum((segment + 1) * length, WORLD * most_tokens * K)
    for begin in range(segment * length, end, BLOCK):
        positions, ids = _ids_of_segment(
            begin, end, number, ids_ptr, tokens, most_tokens, K, WORLD, RANKS, BLOCK
        )
        chosen = ids == rank * experts + expert
        places = place + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        in_slots = (number & 1) * WORLD * most_tokens * K + positions
        tl.store(sources_ptr + places, in_slots, mask=chosen & (places < capacity))
        own = positions - rank * most_tokens * K
        is_own = chosen & (own >= 0) & (own < most_tokens * K)
        tl.store(places_ptr + own, places, mask=is_own)
        place += tl.sum(chosen.to(tl.int32), axis=0)


@tuned
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
    end_exchange(state_ptr, DISPATCHED)
