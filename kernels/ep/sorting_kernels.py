"""Where rows of this rank's experts lie: its choices are counted and placed, once all have come."""

from __future__ import annotations

import triton
import triton.language as tl

from ..signals import record_failure
from .slots import DISPATCHED, OTHER_FORMAT, OVER_CAPACITY, exchange, wait_for_peer


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
def tokens_of_all(
    number,
    counts_ptr,
    flags_ptr,
    errors_ptr,
    patience_ticks,
    rank,
    WORLD: tl.constexpr,
    RANKS: tl.constexpr,
    FP8: tl.constexpr,
    OWN: tl.constexpr,  # wait for the programs of this rank that send, too
):
    """Wait for all peers; return their numbers of tokens, 0 of one that is given up or has another format."""
    every = tl.arange(0, RANKS)
    tokens = tl.zeros((RANKS,), dtype=tl.int32)
    for peer in range(0, WORLD):
        has_come = 1
        if OWN or peer != rank:
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
    tokens = tokens_of_all(
        number, counts_ptr, flags_ptr, errors_ptr, patience_ticks, rank, WORLD, RANKS, FP8, False
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
    tokens = tokens_of_all(
        number, counts_ptr, flags_ptr, errors_ptr, patience_ticks, rank, WORLD, RANKS, FP8, False
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


# ---- in one launch, by who sends


@triton.jit
def positions_of(items, tokens, most_tokens, K: tl.constexpr, RANKS: tl.constexpr):
    """Return the positions in a slot of items, which number the choices of all ranks; after the last -1."""
    ends = tl.cumsum(tokens, axis=0) * K
    ranks = tl.sum((ends[None, :] <= items[:, None]).to(tl.int32), axis=1)
    is_of = ranks[:, None] == tl.arange(0, RANKS)[None, :]
    begins = tl.sum(tl.where(is_of, (ends - tokens * K)[None, :], 0), axis=1)
    return tl.where(ranks < RANKS, ranks * most_tokens * K + items - begins, -1)


@triton.jit
def choices_before(
    ids,  # as numbers of this rank's experts
    positions,
    of_slot_ptr,
    tokens,
    rank,
    experts,
    most_tokens,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    RANKS: tl.constexpr,
    KEYS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Return how many choices of this rank's experts come before each, by expert and position."""
    before = tl.zeros((KEYS, POSITIONS), dtype=tl.int32)  # summed once: each sum would wait for all warps
    for peer in range(0, WORLD):
        first = peer * most_tokens * K
        end = first + K * tl.sum(tl.where(tl.arange(0, RANKS) == peer, tokens, 0), axis=0)
        for begin in range(first, end, POSITIONS):
            others = begin + tl.arange(0, POSITIONS)
            chosen = tl.load(of_slot_ptr + others, mask=others < end, other=-1) - rank * experts
            chosen = tl.where(chosen < 0, experts, chosen)  # of no expert here: before none
            is_earlier = (others[None, :] < positions[:, None]).to(tl.int32)
            is_before = chosen[None, :] < ids[:, None] + is_earlier
            before += is_before.to(tl.int32)
    return tl.sum(before, axis=1)
