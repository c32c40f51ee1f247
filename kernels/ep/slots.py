"""What the kernels of `ExpertParallel` share: slots in the memory of peers, the flags over them, and waits.

Shapes: W ranks; C rows of this rank's experts; T tokens of this rank, at most TOKENS of any; K choices of a
token; E experts of a rank; H elements of a row. A *position* numbers the choices of all ranks in both slots:
((s * W + p) * TOKENS + t) * K + j for choice j of token t of rank p in slot s.

What a rank holds, in symmetric memory, two of each, used in turns:

    tokens  [2, W, TOKENS, H]    rows that rank p has sent in its dispatch
    ids     [2, W, TOKENS * K]   int32: the choices of rank p's tokens; -1: dropped
    counts  [2, W]               int32: how many tokens rank p has, twice; and 1 if they are in fp8
    choices [2, TOKENS, K, H]    rows that came back for this rank's tokens, unweighted
    dots    [2, TOKENS, K]       float32: gradients of the weights that came back
    flags   [2, W]               int32: the last dispatch, and the last combine, that rank p has completed

A dispatch is four launches on the caller's stream:

    send_tokens    each token to every rank that has one of its experts, once; ids and count to all.
                   The program that counts last raises the flag of this dispatch on every rank
    count_choices  waits for the flags of all peers; counts the choices of each expert, by segments
    place_choices  the place of each choice: by expert, then source rank and token; `sources`, `offsets`
    gather_rows    copies each row to its place; or `multiply_rows` multiplies the rows where they lie

and a combine two: `combine_rows` stores each row to the rank of its token, or `multiply_rows` each product;
`combine_rows` waits for all peers and adds the rows of a token, weighted, in float32 in the order of its
choices. The backward pass of a combine is `send_tokens` of the gradients, `grade_rows` and `collect_dots`.

Of few tokens `send_tokens` is the whole dispatch, and one `combine_rows` the whole combine. Peers cannot
tell: slots and flags are the same, so each rank chooses by itself.

[Note: complete before it is counted] A program counts what it has sent, with a release, after its stores;
the one that counts last has acquired the counts of all, and releases the flag at the scope of the system.

[Note: two slots take turns] Rank r writes slot c % 2 of rank p in exchange c of a kind.
Before, r waited in exchange c - 1 for p's flag of c - 1, which p raised after its exchange c - 2, in the
order of its stream: all reads of that slot had ended.

[Note: an exchange ends] Kernels that store wait for nothing. Kernels that wait come after the own stores, so
that no peer waits for a program that finds no room. Every wait is bounded: see `signals`.

[Note: in one launch] What a launch sends is divided into as many shares as it has programs, which claim them
one by one. A program waits once none is left: all have been claimed by programs that have begun, and those
send without waiting. So the flag rises, with room for one program on each rank. After the wait no program
needs another of its launch: of a dispatch each finds the places of its own rows, by counting all choices
that come before them, as ids lie in this rank's slot, too, after its own flag. Nobody claims any more when
the last program ends; it puts the counters back.

[Note: an exchange is lost once] All programs must find the same peers lost: one that counts the choices of
a peer, and another that places none of them, would leave rows without a source. So the flag decides. A peer
raises it from c - 1 to c by a compare-and-swap; a program that gives the peer up swaps what it has seen for
c - 1 + GIVEN_UP. One of the two succeeds, and stands. A rank that leaves adds GIVEN_UP to its flags: what it
has completed stays completed, for programs that have not looked yet. After a failure a slot may be written
while it is read, so no position outside of the slots is followed: see `rank_of`.

The number of an exchange is counted on the device, by its last kernel: eager calls and replays do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from ..compat import compiled_for
from ..configs import INTERPRETED, take_first
from ..signals import GIVEN_UP, SYSTEM, poll_until, record_failure

NOT_DISPATCHED, NOT_RETURNED = tl.constexpr(1), tl.constexpr(2)
OVER_CAPACITY, OTHER_FORMAT = tl.constexpr(3), tl.constexpr(4)

DISPATCHED, RETURNED = tl.constexpr(0), tl.constexpr(1)  # kinds of exchanges: rows of `flags` and of `state`
SCALED = tl.constexpr(128)  # elements of a row in fp8 that share a scale
LARGEST_FP8 = tl.constexpr(448.0)
# Columns of `state`: exchanges that have ended; of the launch under way, programs at its end, shares that
# have been sent, and shares that programs have claimed.
DONE, ENDED, SENT, CLAIMED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
COLUMNS = tl.constexpr(4)


def _candidates(*of_each: tuple[int, int]) -> list[triton.Config]:
    """Return configs of kernels that copy rows: programs on each SM, and warps."""
    if INTERPRETED:
        return [triton.Config({"PER_SM": per_sm}, num_warps=4) for per_sm in (1, 2)]
    return [triton.Config({"PER_SM": per_sm}, num_warps=warps) for per_sm, warps in of_each]


# The fewest programs that saturate NVLink leave the most SMs to what runs beside them.
CANDIDATES = _candidates((4, 4), (2, 8), (1, 8), (8, 4), (1, 16), (4, 8))


def tuned(*forms: str) -> Callable[[Any], Any]:
    """Return a decorator of kernels that are tuned in context, for each of their forms.

    Their peers wait for one launch of them.
    """
    return triton.autotune(CANDIDATES, key=["size_class", "H", "WORLD", *forms], do_bench=take_first)


@triton.jit
def address(table_ptr, peer, like_ptr):
    """Return where a peer's part lies of the memory that the table is of."""
    return tl.multiple_of(tl.load(table_ptr + peer).to(like_ptr.dtype), 16)


@triton.jit
def exchange(state_ptr, KIND: tl.constexpr):
    """Return the number of the exchange under way."""
    return tl.load(state_ptr + KIND * COLUMNS + DONE) + 1


@triton.jit
def claim(state_ptr, KIND: tl.constexpr):
    """Return the next share of what a launch sends, see [Note: in one launch]."""
    return tl.atomic_add(state_ptr + KIND * COLUMNS + CLAIMED, 1, sem="relaxed", scope="gpu")


@triton.jit
def is_last(state_ptr, shares, KIND: tl.constexpr, COLUMN: tl.constexpr):
    """Count so many shares after this program's stores; return whether it has counted the last one.

    See [Note: complete before it is counted].
    """
    tl.debug_barrier()
    counted = tl.atomic_add(state_ptr + KIND * COLUMNS + COLUMN, shares, sem="acq_rel", scope="gpu")
    is_last = (shares > 0) & (counted + shares == tl.num_programs(0))
    if is_last:
        tl.store(state_ptr + KIND * COLUMNS + COLUMN, 0)
    return is_last


@triton.jit
def end_exchange(state_ptr, KIND: tl.constexpr):
    """End the exchange in the last program of its last kernel."""
    if is_last(state_ptr, 1, KIND, ENDED):
        tl.store(state_ptr + KIND * COLUMNS + CLAIMED, 0)
        tl.store(state_ptr + KIND * COLUMNS + DONE, exchange(state_ptr, KIND))


@triton.jit
def raise_flags(flags_table_ptr, flags_ptr, state_ptr, rank, KIND: tl.constexpr, WORLD: tl.constexpr):
    """Raise this rank's flag, after all stores of this program, on all ranks that have not given it up.

    A lane for each rank: one after the other would each wait for the link.
    """
    number = exchange(state_ptr, KIND)
    every = tl.arange(0, triton.next_power_of_2(WORLD)) % WORLD  # a second try changes nothing
    flag_ptrs = tl.load(flags_table_ptr + every).to(flags_ptr.dtype) + KIND * WORLD + rank
    raised = every * 0 + number
    tl.debug_barrier()
    tl.atomic_cas(flag_ptrs, raised - 1, raised, sem="release", scope=SYSTEM)


@triton.jit
def wait_for_peer(
    peer, number, flags_ptr, errors_ptr, patience_ticks, KIND: tl.constexpr, WORLD: tl.constexpr
):
    """Return 1 if a peer has completed this exchange, else 0: then it is given up for good.

    All programs return the same, see [Note: an exchange is lost once].
    """
    flag_ptr = flags_ptr + KIND * WORLD + peer
    value = poll_until(flag_ptr, number, patience_ticks, False)
    if value - number < 0:
        seen = tl.atomic_cas(flag_ptr, value, number - 1 + GIVEN_UP, sem="acq_rel", scope=SYSTEM)
        if seen == value:
            record_failure(errors_ptr + peer, KIND + NOT_DISPATCHED, number, value)
        else:
            value = seen
    ahead = value - number
    ahead -= tl.where(ahead >= GIVEN_UP // 2, GIVEN_UP, 0)
    return tl.where(ahead >= 0, 1, 0)


@triton.jit
def wait_for_all(
    number, flags_ptr, errors_ptr, patience_ticks, rank, KIND: tl.constexpr, WORLD: tl.constexpr
):
    """Wait for all peers; return a bit for each that is given up."""
    lost = 0
    for peer in range(0, WORLD):
        if peer != rank:
            has_come = wait_for_peer(peer, number, flags_ptr, errors_ptr, patience_ticks, KIND, WORLD)
            lost |= (1 - has_come) << peer
    return lost


@triton.jit
def rank_of(position, most_tokens, K: tl.constexpr, WORLD: tl.constexpr):
    """Return the rank whose choice is at a position; -1 if it is outside of the slots."""
    is_inside = (position >= 0) & (position < 2 * WORLD * most_tokens * K)
    return tl.where(is_inside, position // (most_tokens * K) % WORLD, -1)


@triton.jit
def copy_row(to_ptr, from_ptr, H, BLOCK: tl.constexpr):
    for begin in range(0, H, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        mask = columns < H
        tl.store(to_ptr + columns, tl.load(from_ptr + columns, mask=mask), mask=mask)


@triton.jit
def _in_fp8(row_ptr, H):
    """Return where the elements of a row in fp8 begin, and its scales, in the room of a row."""
    elements_ptr = row_ptr.to(tl.pointer_type(tl.float8e4nv))
    return elements_ptr, (elements_ptr + H).to(tl.pointer_type(tl.float32))


@triton.jit
def quantize_row(to_ptr, from_ptr, H, BLOCK: tl.constexpr):
    """Copy a row as fp8, with a scale for each SCALED elements; H is a multiple of it."""
    GROUPS: tl.constexpr = BLOCK // SCALED
    elements_ptr, scales_ptr = _in_fp8(to_ptr, H)
    for begin in range(0, H, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        values = tl.load(from_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
        grouped = tl.reshape(values, (GROUPS, SCALED))
        scales = tl.maximum(tl.max(tl.abs(grouped), axis=1), 1e-30) / LARGEST_FP8
        scaled = tl.reshape(grouped / scales[:, None], (BLOCK,))
        if compiled_for() == "cpu":  # its conversion loses a carry into the exponent: round to 3 bits before
            bits = scaled.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
            scaled = bits.to(tl.float32, bitcast=True)
        tl.store(elements_ptr + columns, scaled.to(tl.float8e4nv), mask=columns < H)
        groups = begin // SCALED + tl.arange(0, GROUPS)
        tl.store(scales_ptr + groups, scales, mask=groups * SCALED < H)


@triton.jit
def restore_row(to_ptr, from_ptr, H, BLOCK: tl.constexpr):
    """Copy a row that `quantize_row` has written, in the type of the result."""
    elements_ptr, scales_ptr = _in_fp8(from_ptr, H)
    for begin in range(0, H, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        mask = columns < H
        scales = tl.load(scales_ptr + columns // SCALED, mask=mask, other=0.0)
        values = tl.load(elements_ptr + columns, mask=mask, other=0.0).to(tl.float32) * scales
        tl.store(to_ptr + columns, values.to(to_ptr.dtype.element_ty), mask=mask)
