"""The kernels of `ExpertParallel`: they store rows into the peers' memory, count them there, and wait.

Shapes: W ranks; C rows of this rank's experts; T tokens of this rank, at most TOKENS of any; K choices of a
token; E experts of a rank; H elements of a row. A *position* numbers the choices of all ranks:
(p * TOKENS + t) * K + j for choice j of token t of rank p.

What a rank holds, in symmetric memory, two of each, used in turns:

    tokens  [2, W, TOKENS, H]    rows that rank p has sent in its dispatch
    ids     [2, W, TOKENS * K]   int32: the choices of rank p's tokens; -1: dropped
    counts  [2, W]               int32: how many tokens rank p has
    choices [2, TOKENS, K, H]    rows that came back for this rank's tokens, unweighted
    dots    [2, TOKENS, K]       float32: gradients of the weights that came back
    flags   [2, W]               int32: the last dispatch, and the last combine, that rank p has completed

A dispatch is four launches on the caller's stream:

    send_tokens    each token to every rank that has one of its experts, once; ids and count to all.
                   The last program raises the flag of this dispatch on every peer
    count_choices  waits for the flags of all peers; counts the choices of each expert, by segments
    place_choices  the place of each choice: by expert, then source rank and token; `sources`, `offsets`
    gather_rows    copies each row to its place

and a combine two: `return_rows` stores each row to the rank of its token, `sum_rows` waits for all peers and
adds the rows of a token, weighted, in float32 in the order of its choices. The backward pass of a combine is
`send_tokens` of the gradients, `grade_rows` and `collect_dots`.

[Note: complete before it is counted] A program counts itself, with a release, behind its stores; the one that
counts last has acquired the counts of all, and releases the flag at the scope of the system.

[Note: two slots take turns] Rank r writes slot c % 2 of rank p in exchange c of a kind.
Before, r waited in exchange c - 1 for p's flag of c - 1, which p raised behind its exchange c - 2, in the
order of its stream: all reads of that slot had ended.

[Note: an exchange ends] Kernels that store wait for nothing. Kernels that wait come behind the own stores, so
that no peer waits for a program that finds no room. Every wait is bounded: see `signals`.

The number of an exchange is counted on the device, by its last kernel: eager calls and replays do the same.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..configs import INTERPRETED, take_first
from ..signals import GIVEN_UP, give_up, notify, poll_until, record_failure

NOT_DISPATCHED, NOT_RETURNED = tl.constexpr(1), tl.constexpr(2)
OVER_CAPACITY = tl.constexpr(3)

DISPATCHED, RETURNED = tl.constexpr(0), tl.constexpr(1)  # kinds of exchanges: rows of `flags` and of `state`
DONE, TICKET = tl.constexpr(0), tl.constexpr(1)  # columns of `state`: exchanges that ended, and programs


def _candidates(*of_each: tuple[int, int]) -> list[triton.Config]:
    """Return configs of kernels that copy rows: programs on each SM, and warps."""
    if INTERPRETED:
        return [triton.Config({"PER_SM": per_sm}, num_warps=4) for per_sm in (1, 2)]
    return [triton.Config({"PER_SM": per_sm}, num_warps=warps) for per_sm, warps in of_each]


# The fewest programs that saturate NVLink leave the most SMs to what runs beside them.
CANDIDATES = _candidates((2, 8), (1, 8), (4, 4), (8, 4), (1, 16), (4, 8))


def _tuned(kernel: Any) -> Any:
    """Return the kernel, tuned in context; its peers wait for one launch of it."""
    return triton.autotune(CANDIDATES, key=["size_class", "H", "WORLD"], do_bench=take_first)(kernel)


@triton.jit
def _address(table_ptr, peer, like_ptr):
    """Return where a peer's part lies of the memory that the table is of."""
    return tl.multiple_of(tl.load(table_ptr + peer).to(like_ptr.dtype), 16)


@triton.jit
def _exchange(state_ptr, KIND: tl.constexpr):
    """Return the number of the exchange under way."""
    return tl.load(state_ptr + KIND * 2 + DONE) + 1


@triton.jit
def _is_last(state_ptr, KIND: tl.constexpr):
    """Count this program behind its stores; return whether all others have counted.

    See [Note: complete before it is counted].
    """
    tl.debug_barrier()
    ticket = tl.atomic_add(state_ptr + KIND * 2 + TICKET, 1, sem="acq_rel", scope="gpu")
    is_last = ticket == tl.num_programs(0) - 1
    if is_last:
        tl.store(state_ptr + KIND * 2 + TICKET, 0)
    return is_last


@triton.jit
def _end_exchange(state_ptr, KIND: tl.constexpr):
    """End the exchange in the last program of its last kernel."""
    if _is_last(state_ptr, KIND):
        tl.store(state_ptr + KIND * 2 + DONE, _exchange(state_ptr, KIND))


@triton.jit
def _raise_flags(flags_table_ptr, flags_ptr, number, rank, KIND: tl.constexpr, WORLD: tl.constexpr):
    for peer in range(0, WORLD):
        if peer != rank:
            notify(_address(flags_table_ptr, peer, flags_ptr) + KIND * WORLD + rank, number)


@triton.jit
def _wait_for(peer, number, flags_ptr, errors_ptr, patience_ticks, KIND: tl.constexpr, WORLD: tl.constexpr):
    """Return 1 if a peer has completed this exchange, else 0: then it is given up for good."""
    flag_ptr = flags_ptr + KIND * WORLD + peer
    value = poll_until(flag_ptr, number, patience_ticks, False)
    if value - number < 0:
        record_failure(errors_ptr + peer, KIND + NOT_DISPATCHED, number, value)
        give_up(flag_ptr, number)
    return tl.where((value - number >= 0) & (value - number < GIVEN_UP // 2), 1, 0)


@triton.jit
def _copy_row(to_ptr, from_ptr, H, BLOCK: tl.constexpr):
    for begin in range(0, H, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        mask = columns < H
        tl.store(to_ptr + columns, tl.load(from_ptr + columns, mask=mask), mask=mask)


@_tuned
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
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,  # a power of two, at least K
    PER_SM: tl.constexpr,  # the grid's
):
    """Send this rank's tokens, choices and count to its peers, and raise the flag of the dispatch there."""
    number = _exchange(state_ptr, DISPATCHED)
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
            their_ids_ptr = _address(tables_ptr + WORLD, peer, ids_ptr)
            tl.store(their_ids_ptr + place * K + choices, ids, mask=real)
            if WEIGHTED:
                weights = tl.load(given_weights_ptr + token * K + choices, mask=real, other=0.0)
                their_weights_ptr = _address(tables_ptr + 2 * WORLD, peer, weights_ptr)
                tl.store(their_weights_ptr + place * K + choices, weights, mask=real)
            if peer != rank and tl.max((owners == peer).to(tl.int32), axis=0) > 0:
                _copy_row(_address(tables_ptr, peer, tokens_ptr) + place * H, row_ptr, H, BLOCK)
    if _is_last(state_ptr, DISPATCHED):
        for peer in range(0, WORLD):
            tl.store(_address(tables_ptr + 3 * WORLD, peer, counts_ptr) + slot, T)
        _raise_flags(tables_ptr + 4 * WORLD, flags_ptr, number, rank, DISPATCHED, WORLD)


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
    number, counts_ptr, flags_ptr, errors_ptr, patience_ticks, rank, WORLD: tl.constexpr, RANKS: tl.constexpr
):
    """Wait for the dispatches of all peers; return their numbers of tokens, 0 of one that is given up."""
    every = tl.arange(0, RANKS)
    tokens = tl.zeros((RANKS,), dtype=tl.int32)
    for peer in range(0, WORLD):
        has_come = 1
        if peer != rank:
            has_come = _wait_for(peer, number, flags_ptr, errors_ptr, patience_ticks, DISPATCHED, WORLD)
        count = tl.load(counts_ptr + (number & 1) * WORLD + peer, volatile=True)
        tokens = tl.where(every == peer, tl.where(has_come != 0, count, 0), tokens)
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
    BLOCK: tl.constexpr,
):
    """Wait for all peers, then count the choices of one expert in one segment; a program for each."""
    number = _exchange(state_ptr, DISPATCHED)
    tokens = _tokens_of_all(number, counts_ptr, flags_ptr, errors_ptr, patience_ticks, rank, WORLD, RANKS)
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
    SEGMENTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two, at least `experts`
    BLOCK: tl.constexpr,
):
    """Place the choices of one expert in one segment, in the order of their positions; a program for each."""
    number = _exchange(state_ptr, DISPATCHED)
    tokens = _tokens_of_all(number, counts_ptr, flags_ptr, errors_ptr, patience_ticks, rank, WORLD, RANKS)
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
        tl.store(sources_ptr + places, positions, mask=chosen & (places < capacity))
        own = positions - rank * most_tokens * K
        is_own = chosen & (own >= 0) & (own < most_tokens * K)
        tl.store(places_ptr + own, places, mask=is_own)
        place += tl.sum(chosen.to(tl.int32), axis=0)


@_tuned
@triton.jit(do_not_specialize=["size_class", "most_tokens", "experts", "rank"])
def gather_rows(
    x_ptr,  # [T, H], rows stride_x apart
    tokens_ptr,
    rows_ptr,  # [capacity, H]
    sources_ptr,
    offsets_ptr,
    state_ptr,
    size_class,
    most_tokens,
    experts,
    rank,
    stride_x,
    H: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_SM: tl.constexpr,
):
    """Copy each row to its place, and end the dispatch."""
    slot = (_exchange(state_ptr, DISPATCHED) & 1) * WORLD
    for row in range(tl.program_id(0), tl.load(offsets_ptr + experts), tl.num_programs(0)):
        token = tl.load(sources_ptr + row) // K
        if token // most_tokens == rank:
            from_ptr = x_ptr + tl.cast(token % most_tokens, tl.int64) * stride_x
        else:
            from_ptr = tokens_ptr + tl.cast(slot * most_tokens + token, tl.int64) * H
        _copy_row(rows_ptr + tl.cast(row, tl.int64) * H, from_ptr, H, BLOCK)
    _end_exchange(state_ptr, DISPATCHED)


@_tuned
@triton.jit(do_not_specialize=["size_class", "most_tokens", "experts", "rank"])
def return_rows(
    rows_ptr,  # [capacity, H], rows stride_rows apart
    choices_ptr,
    flags_ptr,
    tables_ptr,  # int64 [2, WORLD]: addresses of choices, flags
    sources_ptr,
    offsets_ptr,
    state_ptr,
    size_class,
    most_tokens,
    experts,
    rank,
    stride_rows,
    H: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_SM: tl.constexpr,
):
    """Store each row to the rank of its token, and raise the flag of the combine there."""
    number = _exchange(state_ptr, RETURNED)
    of_rank = most_tokens * K
    for row in range(tl.program_id(0), tl.load(offsets_ptr + experts), tl.num_programs(0)):
        position = tl.load(sources_ptr + row)
        peer = position // of_rank
        if peer != rank:
            place = tl.cast((number & 1) * of_rank + position % of_rank, tl.int64)
            to_ptr = _address(tables_ptr, peer, choices_ptr) + place * H
            _copy_row(to_ptr, rows_ptr + tl.cast(row, tl.int64) * stride_rows, H, BLOCK)
    if _is_last(state_ptr, RETURNED):
        _raise_flags(tables_ptr + WORLD, flags_ptr, number, rank, RETURNED, WORLD)


@triton.jit
def _wait_for_returns(number, flags_ptr, errors_ptr, patience_ticks, rank, WORLD: tl.constexpr):
    """Wait for the combines of all peers; return a bit for each that is given up."""
    lost = 0
    for peer in range(0, WORLD):
        if peer != rank:
            has_come = _wait_for(peer, number, flags_ptr, errors_ptr, patience_ticks, RETURNED, WORLD)
            lost |= (1 - has_come) << peer
    return lost


@_tuned
@triton.jit(
    do_not_specialize=["size_class", "T", "most_tokens", "experts", "capacity", "rank", "patience_ticks"]
)
def sum_rows(
    rows_ptr,  # [capacity, H], rows stride_rows apart
    choices_ptr,
    given_ids_ptr,  # int32 or int64 [T, K], contiguous
    given_weights_ptr,  # float32 [T, K], contiguous
    places_ptr,
    out_ptr,  # [T, H], contiguous
    flags_ptr,
    errors_ptr,
    state_ptr,
    size_class,
    T,
    most_tokens,
    experts,
    capacity,
    rank,
    patience_ticks,
    stride_rows,
    H: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_SM: tl.constexpr,
):
    """Add each token's rows, weighted, in float32 in the order of its choices; NaN where a rank is lost."""
    number = _exchange(state_ptr, RETURNED)
    lost = _wait_for_returns(number, flags_ptr, errors_ptr, patience_ticks, rank, WORLD)
    slot = tl.cast((number & 1) * most_tokens * K, tl.int64)
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        for begin in range(0, H, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            mask = columns < H
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for choice in range(0, K):
                chosen = tl.load(given_ids_ptr + token * K + choice)
                if (chosen >= 0) & (chosen < experts * WORLD):
                    owner = (chosen // experts).to(tl.int32)
                    weight = tl.load(given_weights_ptr + token * K + choice)
                    from_ptr = choices_ptr + (slot + token * K + choice) * H
                    if owner == rank:
                        place = tl.minimum(tl.load(places_ptr + token * K + choice), capacity - 1)
                        from_ptr = rows_ptr + tl.cast(place, tl.int64) * stride_rows
                    value = tl.load(from_ptr + columns, mask=mask, other=0.0).to(tl.float32)
                    total += weight * tl.where((lost >> owner) & 1 != 0, float("nan"), value)
            out_ptrs = out_ptr + tl.cast(token, tl.int64) * H + columns
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)
    _end_exchange(state_ptr, RETURNED)


@_tuned
@triton.jit(do_not_specialize=["size_class", "most_tokens", "experts", "rank", "patience_ticks"])
def grade_rows(
    grad_ptr,  # [T, H], rows stride_grad apart: gradients of the results of this rank's tokens
    tokens_ptr,  # those of peers
    rows_ptr,  # [capacity, H], rows stride_rows apart: what was combined
    weights_ptr,
    out_ptr,  # [capacity, H], contiguous: the gradients of `rows`
    dots_ptr,
    flags_ptr,
    tables_ptr,  # int64 [2, WORLD]: addresses of dots, flags
    sources_ptr,
    offsets_ptr,
    errors_ptr,
    state_ptr,
    size_class,
    most_tokens,
    experts,
    rank,
    patience_ticks,
    stride_grad,
    stride_rows,
    H: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_SM: tl.constexpr,
):
    """Write the gradients of combined rows; send those of their weights, <gradient, row>, to their ranks."""
    number = _exchange(state_ptr, DISPATCHED)
    for peer in range(0, WORLD):
        if peer != rank:
            _wait_for(peer, number, flags_ptr, errors_ptr, patience_ticks, DISPATCHED, WORLD)
    back = _exchange(state_ptr, RETURNED)
    of_rank = most_tokens * K
    slot = (number & 1) * WORLD
    for row in range(tl.program_id(0), tl.load(offsets_ptr + experts), tl.num_programs(0)):
        position = tl.load(sources_ptr + row)
        token = position // K
        peer = token // most_tokens
        if peer == rank:
            from_ptr = grad_ptr + tl.cast(token % most_tokens, tl.int64) * stride_grad
        else:
            from_ptr = tokens_ptr + tl.cast(slot * most_tokens + token, tl.int64) * H
        weight = tl.load(weights_ptr + tl.cast(slot * of_rank, tl.int64) + position, volatile=True)
        dot = tl.zeros((BLOCK,), dtype=tl.float32)
        for begin in range(0, H, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            mask = columns < H
            grad = tl.load(from_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            value_ptrs = rows_ptr + tl.cast(row, tl.int64) * stride_rows + columns
            dot += grad * tl.load(value_ptrs, mask=mask, other=0.0).to(tl.float32)
            out_ptrs = out_ptr + tl.cast(row, tl.int64) * H + columns
            tl.store(out_ptrs, (weight * grad).to(out_ptr.dtype.element_ty), mask=mask)
        to_ptr = _address(tables_ptr, peer, dots_ptr)
        tl.store(to_ptr + (back & 1) * of_rank + position % of_rank, tl.sum(dot, axis=0))
    if _is_last(state_ptr, RETURNED):
        tl.store(state_ptr + DISPATCHED * 2 + DONE, number)  # nobody reads it before the next launch
        _raise_flags(tables_ptr + WORLD, flags_ptr, back, rank, RETURNED, WORLD)


@triton.jit(do_not_specialize=["T", "most_tokens", "experts", "rank", "patience_ticks"])
def collect_dots(
    dots_ptr,
    given_ids_ptr,
    out_ptr,  # float32 [T, K], contiguous
    flags_ptr,
    errors_ptr,
    state_ptr,
    T,
    most_tokens,
    experts,
    rank,
    patience_ticks,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Wait for the gradients of all weights, and write them: 0 of dropped choices, NaN of lost ranks."""
    number = _exchange(state_ptr, RETURNED)
    lost = _wait_for_returns(number, flags_ptr, errors_ptr, patience_ticks, rank, WORLD)
    for begin in range(tl.program_id(0) * BLOCK, T * K, tl.num_programs(0) * BLOCK):
        places = begin + tl.arange(0, BLOCK)
        inside = places < T * K
        ids = tl.load(given_ids_ptr + places, mask=inside, other=-1)
        real = (ids >= 0) & (ids < experts * WORLD)
        dots = tl.load(dots_ptr + (number & 1) * most_tokens * K + places, mask=inside & real, other=0.0)
        is_lost = (lost >> tl.where(real, ids // experts, 0).to(tl.int32)) & 1 != 0
        tl.store(out_ptr + places, tl.where(real & is_lost, float("nan"), dots), mask=inside)
    _end_exchange(state_ptr, RETURNED)
