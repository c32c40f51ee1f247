"""Sorting the choices of all tokens by expert, on the device, and tables of the tiles that follow from it.

Choices are sorted by expert, then by the chunk (source rank) of their token, chunks in the order in which the
operation visits them: its *stages*. So a block of rows of one expert needs few neighbouring stages. Where all
chunks are here before a kernel starts, there is one stage. A choice of expert -1 is dropped: it is sorted
after all experts, as if there were one more. So is an invalid one, which is also recorded. Choices of one
expert and chunk come in any order; no row of a product depends on its place in a tile.

Two launches, without the host in between:

    count_choices   waits until the choices of all ranks are here; counts them by stage and expert, which
                    numbers those of a group. Its last program turns the counts into where each group starts
    place_choices   puts each choice into its place; some of its programs write a table each

A table lists, for blocks of 16, 32, ... rows, (expert, begin, end, stage): rows begin to end of the sorted
choices, and their last stage, or, BY_FIRST, their first. There is one for each height that a reader may have,
and for each order: 0, by that stage and then by expert; 1, by expert, so that a weight is read once.

A sorting that both operations of a layer share, SHARED, has the stages of `AllGatherMoE`, the own chunk
first. Choices of one expert and chunk keep their order, so that sums over rows have the same bits in each
call: a chunk is in PARTS, each of which one program counts from front to back. Tables of an order 2 are for
`MoEReduceScatter`: by the first stage, then by expert, the own chunk as the last stage. A block with rows of
the own chunk and of others counts as one of theirs.

[Note: programs find other choices] A peer that is given up may come back: then ROWS_SENT changes while
programs read it, in that call or, of a graph, in a later one. They count other choices, whose places would
not fit together, and might lie outside of the memory. So nothing is sorted then: each table is empty. Nor is
a choice read twice, which a peer may overwrite that has given this rank up: its expert is written down.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..configs import INTERPRETED
from ..exchange.flags import GIVEN, ROWS_SENT
from ..exchange.peers import Peers, free_side_stream, is_given_up, wait_for_flag
from ..signals import count_up, record_failure
from .announcer import GIVEN_OTHERS, NO_EXPERT, NOT_TOLD, OTHER_TOKENS, OTHER_TOPK, TOPK_SPAN

DIGEST_FACTOR = tl.constexpr(65599)
DIGEST_PRIME = tl.constexpr(2147483629)
EXCHANGED = tl.constexpr(2**31 - 8)  # in place of a digest: the hosts have told each other their tokens
SHARED_DIGEST = tl.constexpr(1)  # added to the digest by a call whose sorting is shared
LOWEST_HEIGHT_BITS = tl.constexpr(4)  # of the first table: blocks of 16 rows
ENTRY = tl.constexpr(4)  # flags of a table's entry
FAR = tl.constexpr(2**31 - 1)
IN_ORDER = tl.constexpr(16 if INTERPRETED else 64)  # choices counted at a time; 128 would spill registers
LOST = tl.constexpr(1 << 16)  # added to the ticket for each rank that a program finds given up


def digest_of(tokens: tuple[int, ...]) -> int:
    """Return a digest of the tokens of all ranks, which the device compares."""
    digest = 0
    for count in tokens:
        digest = (digest * DIGEST_FACTOR.value + count) % DIGEST_PRIME.value
    return digest


@triton.jit(
    do_not_specialize=[
        *("pairs", "experts", "topk", "stride", "tokens"),
        *("told", "rank", "first", "patience_ticks"),
    ]
)
def count_choices(
    ids_ptr,  # int64: the choices of rank p begin at p * stride
    flags_ptr,  # int32 [7, WORLD]
    errors_ptr,  # int64 [WORLD], in memory that the host reads without waiting
    counts_ptr,  # int32 [STAGES, PARTS, experts + 1], zeros: choices by part and expert, afterwards in part 0
    # those of a stage; after them a ticket, below 0 if nothing is sorted, and a bit for each rank that some
    # program finds given up
    starts_ptr,  # the same shape: where they start when sorted
    offsets_ptr,  # int32 [WORLD + 1]: choices of all ranks before p
    chosen_ptr,  # int32 [pairs]: the expert of each choice, `experts` for one that is dropped
    within_ptr,  # int32 [pairs]: the place of each choice among those of its part and expert
    pairs,  # choices of all ranks, as the host was told
    experts,
    topk,
    stride,
    tokens,  # of this rank
    told,  # digest of the tokens of all ranks, as the host was told
    rank,
    first,  # the chunk of stage 0
    patience_ticks,
    WORLD: tl.constexpr,
    STAGES: tl.constexpr,  # WORLD, or 1 where all chunks are here
    PARTS: tl.constexpr,  # of a chunk; 1 unless SHARED
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Count the choices of all ranks as they come in."""
    program = tl.program_id(0)
    peers = Peers(flags_ptr, errors_ptr, rank, patience_ticks)
    groups = experts + 1
    digest = tl.full((), 0, tl.int64)
    offset = 0
    odd = 0  # ranks whose number of tokens is not known
    lost = 0  # of them, how many are given up
    ticket_ptr = counts_ptr + STAGES * PARTS * groups
    for peer in range(0, WORLD):
        count = tokens
        if peer != rank:
            value = wait_for_flag(ROWS_SENT, NOT_TOLD, peer, peers, WORLD)
            count = value // TOPK_SPAN
            if is_given_up(value):
                count = 0
                odd += 1
                lost += 1
                tl.atomic_or(ticket_ptr + 1, 1 << (peer % 32), sem="relaxed", scope="gpu")
                if program == 0:
                    free_side_stream(peer, flags_ptr, WORLD)
            elif value % TOPK_SPAN != topk:
                record_failure(errors_ptr + peer, OTHER_TOPK, 0, value % TOPK_SPAN)
                count = 0
                odd += 1
        digest = (digest * DIGEST_FACTOR + count) % DIGEST_PRIME
        number = min(count * topk, pairs - offset)  # no more than the host has made room for
        if program == 0:
            tl.store(offsets_ptr + peer, offset)
        stage = (peer - first + 2 * WORLD) % STAGES
        from_ptr = ids_ptr + tl.cast(peer * stride, tl.int64)
        to_ptr = chosen_ptr + offset
        if SHARED:
            for part in tl.range((program + peer * PARTS) % tl.num_programs(0), PARTS, tl.num_programs(0)):
                of_part_ptr = counts_ptr + (stage * PARTS + part) * groups
                length = _length_of_part(number, PARTS)
                for begin in range(part * length, min(part * length + length, number), IN_ORDER):
                    local = begin + tl.arange(0, IN_ORDER)
                    chosen = _write_down(local, number, from_ptr, to_ptr, errors_ptr + peer, experts)
                    _number_in_order(chosen, local < number, of_part_ptr, within_ptr + offset + local)
        else:
            for block in tl.range(program, tl.cdiv(number, BLOCK), tl.num_programs(0)):
                local = block * BLOCK + tl.arange(0, BLOCK)
                chosen = _write_down(local, number, from_ptr, to_ptr, errors_ptr + peer, experts)
                group_ptr = counts_ptr + stage * groups + chosen
                place = tl.atomic_add(group_ptr, 1, mask=local < number, sem="relaxed", scope="gpu")
                tl.store(within_ptr + offset + local, place, mask=local < number)
        offset += number
    if SHARED:  # the hosts of all ranks count likewise
        digest += SHARED_DIGEST
    if program == 0:
        tl.store(offsets_ptr + WORLD, offset)
        if odd == 0:
            digest = tl.where(told >= EXCHANGED, tl.cast(told, tl.int64), digest)
            _compare_tokens(tokens, digest, told, rank, flags_ptr, errors_ptr, WORLD)
    if lost > 0:
        tl.atomic_add(ticket_ptr, lost * LOST, sem="relaxed", scope="gpu")
    ticket = count_up(ticket_ptr, "acq_rel")
    if ticket % LOST == tl.num_programs(0) - 1:
        if ticket >= LOST:
            _forget_choices_that_differ(ticket // LOST, counts_ptr, STAGES * PARTS * groups, WORLD, BLOCK)
        _start_groups(counts_ptr, starts_ptr, groups, STAGES, PARTS, BLOCK)


@triton.jit
def _length_of_part(number, PARTS: tl.constexpr):
    """Return how many of a chunk's choices each of its parts has, but for the last ones."""
    return tl.cdiv(tl.cdiv(number, PARTS), IN_ORDER) * IN_ORDER


@triton.jit
def _write_down(local, number, ids_ptr, chosen_ptr, error_ptr, experts):
    """Store and return the experts of some choices of a rank; record one that is no expert."""
    inside = local < number
    ids = tl.load(ids_ptr + local, mask=inside, other=-1)
    invalid = (ids < -1) | (ids >= experts)
    if tl.max(invalid.to(tl.int32), axis=0) > 0:
        largest = tl.max(tl.where(invalid, ids, -FAR), axis=0)
        record_failure(error_ptr, NO_EXPERT, 0, tl.maximum(tl.minimum(largest, FAR), -FAR))
    chosen = tl.where(invalid | (ids < 0), experts, ids).to(tl.int32)
    tl.store(chosen_ptr + local, chosen, mask=inside)
    return chosen


@triton.jit
def _number_in_order(chosen, inside, counts_ptr, within_ptrs):
    """Number choices, one behind the other among those of their expert, and count them."""
    number = tl.arange(0, IN_ORDER)
    same = (chosen[:, None] == chosen[None, :]) & inside[None, :]
    # Those in front are counted in the lower half, those after in the upper one.
    others = tl.where(number[None, :] < number[:, None], 1, (number[None, :] > number[:, None]) * LOST)
    others = tl.sum(tl.where(same, others, 0), axis=1)
    place = others % LOST + tl.load(counts_ptr + chosen, mask=inside, other=0)
    tl.store(within_ptrs, place, mask=inside)
    tl.debug_barrier()  # threads have read what others store
    tl.store(counts_ptr + chosen, place + 1, mask=inside & (others < LOST))
    tl.debug_barrier()  # threads read what others have stored


@triton.jit
def _forget_choices_that_differ(lost, counts_ptr, groups, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Count no choice, unless all programs found the same ranks given up; lost: so many, added up.

    Of more than 32 ranks some share a bit: where one of those is given up, no choice is counted either.
    See [Note: programs find other choices].
    """
    ranks = tl.atomic_or(counts_ptr + groups + 1, 0, sem="relaxed", scope="gpu")
    of_each = 0
    for peer in range(0, WORLD):
        of_each += (ranks >> (peer % 32)) & 1
    if lost != of_each * tl.num_programs(0):
        for begin in range(0, groups, BLOCK):
            group = begin + tl.arange(0, BLOCK)
            tl.store(counts_ptr + group, 0, mask=group < groups)
        tl.store(counts_ptr + groups, -1)
        tl.debug_barrier()  # threads read what others have stored


@triton.jit
def _compare_tokens(tokens, digest, told, rank, flags_ptr, errors_ptr, WORLD: tl.constexpr):
    """Record the tokens of each rank if this rank's host has other numbers, or the peers whose hosts have.

    We use the data of such a peer, which computes something else: so this rank must fail as well.
    """
    for peer in range(0, WORLD):
        count = tokens
        given = digest
        if peer != rank:
            count = tl.load(flags_ptr + ROWS_SENT * WORLD + peer) // TOPK_SPAN
            given = tl.load(flags_ptr + GIVEN * WORLD + peer).to(tl.int64)
        if digest != told:
            record_failure(errors_ptr + peer, OTHER_TOKENS, 0, count)
        elif digest != given:
            record_failure(errors_ptr + peer, GIVEN_OTHERS, 0, 0)


@triton.jit
def _start_groups(
    counts_ptr, starts_ptr, groups, STAGES: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write where the choices of each expert, and of each part of each stage within it, start."""
    carry = 0
    part = tl.arange(0, PARTS)[:, None] * groups
    for begin in range(0, groups, BLOCK // PARTS):
        expert = begin + tl.arange(0, BLOCK // PARTS)
        inside = expert < groups
        total = tl.zeros((BLOCK // PARTS,), dtype=tl.int32)
        for stage in range(0, STAGES):
            at = stage * PARTS * groups + part + expert[None, :]
            total += tl.sum(tl.load(counts_ptr + at, mask=inside[None, :], other=0), axis=0)
        start = carry + tl.cumsum(total, axis=0) - total
        for stage in range(0, STAGES):
            at = stage * PARTS * groups + part + expert[None, :]
            found = tl.load(counts_ptr + at, mask=inside[None, :], other=0)
            tl.store(starts_ptr + at, start[None, :] + tl.cumsum(found, axis=0) - found, mask=inside[None, :])
            of_stage = tl.sum(found, axis=0)
            tl.debug_barrier()  # threads have read what others store
            tl.store(counts_ptr + stage * PARTS * groups + expert, of_stage, mask=inside)
            start += of_stage
        carry += tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["experts", "stride", "first", "capacity"])
def place_choices(
    weights_ptr,  # float32: those of rank p's choices begin at p * stride; this and the next if SHARED
    sorted_weights_ptr,  # float32 [pairs]: the sorted choices' weights; 0 of those that are dropped
    counts_ptr,
    starts_ptr,
    offsets_ptr,
    chosen_ptr,
    within_ptr,
    rows_ptr,  # int32 [pairs]: the sorted choices, as numbers among those of all ranks
    sources_ptr,  # int32 [pairs]: the same, as numbers in a layout where those of rank p begin at p * stride
    groups_ptr,  # int32 [tables, 2, STAGES * EXPERTS]: scratch of the tables
    ends_ptr,  # int32 [tables, STAGES]: blocks of each table up to a stage's end; in order 1: all of them
    tables_ptr,  # int32 [tables, capacity, 4]
    experts,
    stride,
    first,
    capacity,
    ORDERS: tl.constexpr,
    HEIGHTS: tl.constexpr,
    BY_FIRST: tl.constexpr,
    WORLD: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two, more than `experts`
    SEARCH_BITS: tl.constexpr,  # 2 to this power is at least STAGES * EXPERTS
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,  # sort the weights, too
):
    """Sort the choices; the first ORDERS * HEIGHTS programs write the tables."""
    program = tl.program_id(0)
    tables = ORDERS * HEIGHTS
    groups = experts + 1
    if program < tables:
        _write_table(
            *(counts_ptr, starts_ptr, groups_ptr + program * 2 * STAGES * EXPERTS),
            *(ends_ptr + program * STAGES, tables_ptr + program * capacity * ENTRY),
            *(program // HEIGHTS, program % HEIGHTS + LOWEST_HEIGHT_BITS, groups, PARTS * groups),
            *(BY_FIRST, STAGES, EXPERTS, SEARCH_BITS, BLOCK, SHARED),
        )
    elif tl.load(counts_ptr + STAGES * PARTS * groups) >= 0:
        for peer in range(0, WORLD):
            offset = tl.load(offsets_ptr + peer)
            number = tl.load(offsets_ptr + peer + 1) - offset
            stage = (peer - first + 2 * WORLD) % STAGES
            for block in tl.range(program - tables, tl.cdiv(number, BLOCK), tl.num_programs(0) - tables):
                local = block * BLOCK + tl.arange(0, BLOCK)
                inside = local < number
                chosen = tl.load(chosen_ptr + offset + local, mask=inside, other=0)
                part = stage * PARTS
                if SHARED:
                    part += local // _length_of_part(number, PARTS)
                start = tl.load(starts_ptr + part * groups + chosen, mask=inside, other=0)
                place = start + tl.load(within_ptr + offset + local, mask=inside, other=0)
                tl.store(rows_ptr + place, offset + local, mask=inside)
                tl.store(sources_ptr + place, peer * stride + local, mask=inside)
                if SHARED:
                    given_ptrs = weights_ptr + tl.cast(peer * stride, tl.int64) + local
                    weights = tl.load(given_ptrs, mask=inside & (chosen < experts), other=0.0)
                    tl.store(sorted_weights_ptr + place, weights, mask=inside)


@triton.jit
def _write_table(
    counts_ptr,
    starts_ptr,
    groups_ptr,
    ends_ptr,
    table_ptr,
    order,
    height_bits,
    groups,
    pitch,  # between the counts, and the starts, of stages
    BY_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    EXPERTS: tl.constexpr,
    SEARCH_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,  # there is an order 2
):
    """Count the blocks that belong to each stage and expert, then find each block's."""
    expert = tl.arange(0, EXPERTS)
    inside = expert < groups
    rows = tl.zeros((EXPERTS,), dtype=tl.int32)
    for stage in range(0, STAGES):
        rows += tl.load(counts_ptr + stage * pitch + expert, mask=inside, other=0)
    height = 1 << height_bits
    blocks = (rows + height - 1) >> height_bits  # of each expert
    all_blocks = tl.sum(blocks, axis=0)
    before_expert = tl.cumsum(blocks, axis=0) - blocks
    seen = tl.zeros((EXPERTS,), dtype=tl.int32)  # rows of the expert in the stages so far
    given = tl.zeros((EXPERTS,), dtype=tl.int32)  # blocks of the expert that belong to them
    carry = 0
    by_stage = order == 0
    if SHARED:
        by_stage = order != 1
        turned = order == 2
        own = tl.load(counts_ptr + expert, mask=inside, other=0)
        own_blocks = tl.where(own == rows, blocks, own >> height_bits)  # without rows of others
        seen = tl.where(turned, own, 0)
        given = tl.where(turned, own_blocks, 0)
    for stage in range(0, STAGES):
        if SHARED:
            is_own = turned & (stage == STAGES - 1)
            visited = tl.where(turned, (stage + 1) % STAGES, stage)
            of_stage = tl.load(counts_ptr + visited * pitch + expert, mask=inside, other=0)
            seen += tl.where(is_own, 0, of_stage)
        else:
            seen += tl.load(counts_ptr + stage * pitch + expert, mask=inside, other=0)
        if BY_FIRST:
            through = (seen + height - 1) >> height_bits  # all that have a row of these stages
        else:  # all that have no row of later ones
            through = tl.where(seen == rows, blocks, seen >> height_bits)
        if SHARED:
            given = tl.where(is_own, 0, given)
            of_peers = tl.where(seen > own, (seen + height - 1) >> height_bits, own_blocks)
            through = tl.where(turned, tl.where(is_own, own_blocks, of_peers), through)
        new = through - given
        upto = tl.where(by_stage, carry + tl.cumsum(new, axis=0), before_expert + through)
        carry += tl.sum(new, axis=0)
        group = tl.where(by_stage, stage * EXPERTS + expert, expert * STAGES + stage)
        tl.store(groups_ptr + group, upto)
        tl.store(groups_ptr + STAGES * EXPERTS + group, given - (upto - new))
        tl.store(ends_ptr + stage, tl.where(by_stage, carry, all_blocks))
        given = through
    tl.debug_barrier()  # threads read what others have stored
    for begin in range(0, all_blocks, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        real = number < all_blocks
        group = tl.zeros((BLOCK,), dtype=tl.int32)  # how many groups end at or before this block
        for bit in tl.static_range(SEARCH_BITS):
            probe = group + (1 << (SEARCH_BITS - 1 - bit)) - 1
            upto = tl.load(groups_ptr + probe, mask=probe < STAGES * EXPERTS, other=FAR)
            group += tl.where(upto <= number, 1 << (SEARCH_BITS - 1 - bit), 0)
        chosen = tl.where(by_stage, group % EXPERTS, group // STAGES)
        at_stage = tl.where(by_stage, group // EXPERTS, group % STAGES)
        block = number + tl.load(groups_ptr + STAGES * EXPERTS + group, mask=real, other=0)
        start = tl.load(starts_ptr + chosen, mask=real, other=0)
        last = (STAGES - 1) * pitch + chosen
        end = tl.load(starts_ptr + last, mask=real, other=0) + tl.load(counts_ptr + last, mask=real, other=0)
        row = start + (block << height_bits)
        entry_ptr = table_ptr + number * ENTRY
        tl.store(entry_ptr, chosen, mask=real)
        tl.store(entry_ptr + 1, row, mask=real)
        tl.store(entry_ptr + 2, tl.minimum(row + height, end), mask=real)
        tl.store(entry_ptr + 3, at_stage, mask=real)
