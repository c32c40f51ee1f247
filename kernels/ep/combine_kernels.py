"""The kernels of a combine, which bring rows back and add them, and of its backward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from .slots import (
    COLUMNS,
    DISPATCHED,
    DONE,
    RETURNED,
    SENT,
    address,
    claim,
    copy_row,
    end_exchange,
    exchange,
    is_last,
    raise_flags,
    rank_of,
    tuned,
    wait_for_all,
)


@tuned("RETURNS", "SUMS")
@triton.jit(
    do_not_specialize=["size_class", "T", "most_tokens", "experts", "capacity", "rank", "patience_ticks"]
)
def combine_rows(
    rows_ptr,  # [capacity, H], rows stride_rows apart
    choices_ptr,
    flags_ptr,
    tables_ptr,  # int64 [2, WORLD]: addresses of choices, flags
    sources_ptr,
    offsets_ptr,
    errors_ptr,
    state_ptr,
    given_ids_ptr,  # int32 or int64 [T, K], contiguous
    given_weights_ptr,  # of any floating-point type, [T, K], contiguous
    places_ptr,
    out_ptr,  # [T, H], rows stride_out apart
    size_class,
    T,
    most_tokens,
    experts,
    capacity,
    rank,
    patience_ticks,
    stride_rows,
    stride_out,
    H: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    RETURNS: tl.constexpr,  # store each row to the rank of its token, and raise the flag of the combine there
    SUMS: tl.constexpr,  # then wait for all peers, add each token's rows, and end the combine
    ALL_RETURNED: tl.constexpr,  # also the rows of this rank's own experts are among `choices`
    BLOCK: tl.constexpr,
    PART: tl.constexpr,  # columns of a token that a program adds at a time
    SIDE_BY_SIDE: tl.constexpr,  # choices whose rows are on their way at once
    PER_SM: tl.constexpr,
):
    """Bring rows back; add them, weighted, in float32 in the order of choices, NaN where a rank is lost."""
    number = exchange(state_ptr, RETURNED)
    of_rank = most_tokens * K
    if RETURNS:
        shares, sent = tl.num_programs(0), 0
        share = claim(state_ptr, RETURNED) if SUMS else tl.program_id(0)
        while share < shares:
            for row in range(share, tl.load(offsets_ptr + experts), shares):
                position = tl.load(sources_ptr + row)
                peer = rank_of(position, most_tokens, K, WORLD)
                if (peer >= 0) & (peer != rank):
                    place = tl.cast((number & 1) * of_rank + position % of_rank, tl.int64)
                    to_ptr = address(tables_ptr, peer, choices_ptr) + place * H
                    copy_row(to_ptr, rows_ptr + tl.cast(row, tl.int64) * stride_rows, H, BLOCK)
            sent += 1
            share = claim(state_ptr, RETURNED) if SUMS else shares
        if is_last(state_ptr, sent, RETURNED, SENT):
            raise_flags(tables_ptr + WORLD, flags_ptr, state_ptr, rank, RETURNED, WORLD)
    if SUMS:
        lost = wait_for_all(number, flags_ptr, errors_ptr, patience_ticks, rank, RETURNED, WORLD)
        slot = tl.cast((number & 1) * of_rank, tl.int64)
        parts = tl.cdiv(H, PART)
        for item in range(tl.program_id(0), T * parts, tl.num_programs(0)):
            token = item // parts
            columns = item % parts * PART + tl.arange(0, PART)
            mask = columns < H
            total = tl.zeros((PART,), dtype=tl.float32)
            for choice in tl.range(0, K, loop_unroll_factor=SIDE_BY_SIDE):
                place = token * K + choice
                chosen = tl.load(given_ids_ptr + place)
                real = (chosen >= 0) & (chosen < experts * WORLD)
                owner = tl.where(real, chosen, -experts).to(tl.int32) // experts  # -1: of a dropped choice
                weight = tl.load(given_weights_ptr + place, mask=real, other=0.0).to(tl.float32)
                from_ptr = choices_ptr + (slot + place) * H
                if not ALL_RETURNED:
                    row = tl.load(places_ptr + place, mask=owner == rank, other=0)
                    row = tl.cast(tl.minimum(row, capacity - 1), tl.int64)
                    from_ptr = tl.where(owner == rank, rows_ptr + row * stride_rows, from_ptr)
                there = columns < tl.where(real, H, 0)
                value = tl.load(from_ptr + columns, mask=there, other=0.0).to(tl.float32)
                is_lost = real & ((lost >> tl.maximum(owner, 0)) & 1 != 0)
                total += weight * tl.where(is_lost, float("nan"), value)
            out_ptrs = out_ptr + tl.cast(token, tl.int64) * stride_out + columns
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)
        end_exchange(state_ptr, RETURNED)


@tuned()
@triton.jit(do_not_specialize=["size_class", "T", "most_tokens", "experts", "rank", "patience_ticks"])
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
    T,
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
    number = exchange(state_ptr, DISPATCHED)
    lost = wait_for_all(number, flags_ptr, errors_ptr, patience_ticks, rank, DISPATCHED, WORLD)
    back = exchange(state_ptr, RETURNED)
    of_rank = most_tokens * K
    slot = (number & 1) * WORLD
    for row in range(tl.program_id(0), tl.load(offsets_ptr + experts), tl.num_programs(0)):
        position = tl.load(sources_ptr + row)
        peer, choice = rank_of(position, most_tokens, K, WORLD), position % of_rank
        if (peer >= 0) & ((peer != rank) | (choice < T * K)):
            if peer == rank:
                from_ptr = grad_ptr + tl.cast(choice // K, tl.int64) * stride_grad
            else:
                token = (slot + peer) * most_tokens + choice // K
                from_ptr = tokens_ptr + tl.cast(token, tl.int64) * H
            weight = tl.load(weights_ptr + (slot + peer) * of_rank + choice, volatile=True)
            weight = tl.where((lost >> peer) & 1 != 0, float("nan"), weight)
            dot = tl.zeros((BLOCK,), dtype=tl.float32)
            for begin in range(0, H, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                mask = columns < H
                grad = tl.load(from_ptr + columns, mask=mask, other=0.0).to(tl.float32)
                value_ptrs = rows_ptr + tl.cast(row, tl.int64) * stride_rows + columns
                dot += grad * tl.load(value_ptrs, mask=mask, other=0.0).to(tl.float32)
                out_ptrs = out_ptr + tl.cast(row, tl.int64) * H + columns
                tl.store(out_ptrs, (weight * grad).to(out_ptr.dtype.element_ty), mask=mask)
            to_ptr = address(tables_ptr, peer, dots_ptr)
            tl.store(to_ptr + (back & 1) * of_rank + choice, tl.sum(dot, axis=0))
    if is_last(state_ptr, 1, RETURNED, SENT):
        tl.store(state_ptr + DISPATCHED * COLUMNS + DONE, number)  # nobody reads it before the next launch
        raise_flags(tables_ptr + WORLD, flags_ptr, state_ptr, rank, RETURNED, WORLD)


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
    number = exchange(state_ptr, RETURNED)
    lost = wait_for_all(number, flags_ptr, errors_ptr, patience_ticks, rank, RETURNED, WORLD)
    for begin in range(tl.program_id(0) * BLOCK, T * K, tl.num_programs(0) * BLOCK):
        places = begin + tl.arange(0, BLOCK)
        inside = places < T * K
        ids = tl.load(given_ids_ptr + places, mask=inside, other=-1)
        real = (ids >= 0) & (ids < experts * WORLD)
        dots = tl.load(dots_ptr + (number & 1) * most_tokens * K + places, mask=inside & real, other=0.0)
        is_lost = (lost >> tl.where(real, ids // experts, 0).to(tl.int32)) & 1 != 0
        tl.store(out_ptr + places, tl.where(real & is_lost, float("nan"), dots), mask=inside)
    end_exchange(state_ptr, RETURNED)
