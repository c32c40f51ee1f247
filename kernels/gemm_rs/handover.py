"""Device side of `GemmReduceScatter`'s chunks: count tiles, hand over peers' chunks, part from the peers.

A kernel that stores its sums into its peers' memory does there what the side stream does else: it gives the
permits, takes the peers', and raises their flags. They need not know: see [Note: sums leave with the tile].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..exchange.chunks import wait_for_own
from ..exchange.flags import AFTER, ARRIVED, DONE, FREE, NO_PERMIT, NOT_PUSHED, OTHER_ROWS, ROWS_SENT
from ..exchange.peers import (
    free_side_stream,
    give_up_peer,
    is_given_up,
    take_permit,
    told_by,
    wait_for_flag,
)
from ..signals import GIVEN_UP, SYSTEM, count_up, notify, poll_until, record_failure


@triton.jit
def count_tile(chunk, counts_ptr, tiles_per_chunk, chunks, peers, WORLD: tl.constexpr):
    """Count a tile of a peer's chunk that is in memory; after the last one, hand the chunk over.

    In steps the push follows the launch and waits for no flag, so the kernel takes its permit here.
    """
    if _is_last(chunk, counts_ptr, tiles_per_chunk, "gpu"):
        if chunks == WORLD:
            notify(peers.flags_ptr + DONE * WORLD + chunk, 1)
        else:
            take_permit(NO_PERMIT, chunk, peers, WORLD)


@triton.jit
def _is_last(chunk, counts_ptr, tiles_per_chunk, SCOPE: tl.constexpr):
    """Count a tile that is stored, and return whether it was the last one of the chunk.

    See [Note: sums leave complete].
    """
    is_last = count_up(counts_ptr + chunk, "acq_rel", SCOPE) == tiles_per_chunk - 1
    if is_last:
        tl.store(counts_ptr + chunk, 0)
    return is_last


@triton.jit
def await_sums(rows, peers, WORLD: tl.constexpr):
    """Return how many rows of every peer's sums are here, at least `rows`.

    It does not wait for a peer that is given up, or has announced fewer rows, which is recorded at the end.
    """
    here = max(rows, GIVEN_UP)
    for peer in range(0, WORLD):
        if peer != peers.rank:
            arrived = wait_for_flag(ARRIVED, NOT_PUSHED, peer, peers, WORLD)
            if (arrived >= 1) & (arrived < rows):
                told = told_by(peer, peers, WORLD)  # it is there before the first piece
                if told >= rows:
                    arrived = _await_rows(rows, peer, peers, WORLD)
            here = min(here, max(arrived, rows))
    return here


@triton.jit
def _await_rows(rows, peer, peers, WORLD: tl.constexpr):
    """Return how many of the rows that the peer has told of are here, at least `rows`; or give it up."""
    arrived = poll_until(peers.flags_ptr + ARRIVED * WORLD + peer, rows, peers.patience_ticks, False)
    if arrived < rows:
        record_failure(peers.errors_ptr + peer, NOT_PUSHED, 0, arrived)
        give_up_peer(peer, peers, WORLD)
    return arrived


@triton.jit
def wait_and_check_all(m, peers, WORLD: tl.constexpr):
    """Part from each peer in one program, and in the last one wait until our sums are with all of them."""
    for peer in range(tl.program_id(0), WORLD, tl.num_programs(0)):
        if peer != peers.rank:
            _wait_and_check_rows(peer, m, peers, WORLD)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        wait_for_own(peers, WORLD)


@triton.jit
def _wait_and_check_rows(peer, m, peers, WORLD: tl.constexpr):
    """Compare the peer's number of rows with ours and return once all are here, or it is given up."""
    arrived = wait_for_flag(ARRIVED, NOT_PUSHED, peer, peers, WORLD)
    if not is_given_up(arrived):
        told = told_by(peer, peers, WORLD)
        if told != m:
            record_failure(peers.errors_ptr + peer, OTHER_ROWS, 0, told)
        # All of them, were they more than ours: behind this call nobody expects a piece of this push.
        there = _await_rows(told, peer, peers, WORLD)
        arrived = tl.where(there < told, 0, arrived)
    if is_given_up(arrived):  # in each call the side stream waits for the peer's permit
        free_side_stream(peer, peers.flags_ptr, WORLD)


# ---- sums that the kernel stores into the peers' memory. table: int64 [2, WORLD], where `staged` and `flags`
# of each rank lie


@triton.jit
def let_peers_write(table_ptr, peers, WORLD: tl.constexpr):
    """Give each peer its permit, in place of the side stream; by the first program to begin."""
    for peer in range(0, WORLD):
        if peer != peers.rank:
            notify(_flag_there(FREE, peer, table_ptr, peers, WORLD), 1)


@triton.jit
def _flag_there(FLAG: tl.constexpr, peer, table_ptr, peers, WORLD: tl.constexpr):
    """Return where the peer's flag about this rank is."""
    flags_ptr = tl.load(table_ptr + WORLD + peer).to(tl.pointer_type(tl.int32))
    return flags_ptr + FLAG * WORLD + peers.rank


@triton.jit
def slot_there(chunk, table_ptr, staged_ptr, capacity, N, peers, WORLD: tl.constexpr):
    """Return where this rank's sums for that peer begin in its memory."""
    theirs_ptr = tl.load(table_ptr + chunk).to(tl.pointer_type(staged_ptr.dtype.element_ty))
    slot = (peers.rank - chunk + WORLD) % WORLD - 1
    return tl.multiple_of(theirs_ptr, 16) + tl.cast(slot * capacity, tl.int64) * N


@triton.jit
def count_stored(chunk, counts_ptr, tiles_per_chunk, m, table_ptr, peers, WORLD: tl.constexpr):
    """Count a tile that this program has stored into a peer's memory; after the last one, tell the peer.

    Not one that is given up: nothing has been stored for it.
    """
    if _is_last(chunk, counts_ptr, tiles_per_chunk, SYSTEM):
        permit = tl.atomic_xchg(peers.flags_ptr + FREE * WORLD + chunk, 0, sem="relaxed", scope=SYSTEM)
        if permit < GIVEN_UP:
            sent_ptr = _flag_there(ROWS_SENT, chunk, table_ptr, peers, WORLD)
            tl.atomic_xchg(sent_ptr, m, sem="relaxed", scope=SYSTEM)
            notify(_flag_there(ARRIVED, chunk, table_ptr, peers, WORLD), m)


@triton.jit
def part_from_all(m, peers, WORLD: tl.constexpr):
    """Part from each peer and put its flags back; by the last program to end."""
    for peer in range(0, WORLD):
        if peer != peers.rank:
            _wait_and_check_rows(peer, m, peers, WORLD)
            for place in tl.static_range(2):
                at_ptr = peers.flags_ptr + place * WORLD + peer
                following = tl.atomic_add(at_ptr + AFTER * WORLD, 0, sem="relaxed", scope="gpu")
                tl.atomic_xchg(at_ptr + ROWS_SENT * WORLD, following, sem="relaxed", scope="gpu")
