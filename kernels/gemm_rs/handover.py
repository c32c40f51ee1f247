"""Device side of `GemmReduceScatter`'s chunks: count tiles, hand over peers' chunks, part from the peers."""

from __future__ import annotations

import triton
import triton.language as tl

from ..exchange.chunks import wait_for_own
from ..exchange.flags import ARRIVED, DONE, NO_PERMIT, NOT_PUSHED, OTHER_ROWS
from ..exchange.peers import (
    free_side_stream,
    give_up_peer,
    is_given_up,
    take_permit,
    told_by,
    wait_for_flag,
)
from ..exchange.stores import put_flags_back
from ..signals import GIVEN_UP, count_up, notify, poll_until, record_failure


@triton.jit
def count_tile(chunk, counts_ptr, tiles_per_chunk, chunks, peers, WORLD: tl.constexpr):
    """Count a tile of a peer's chunk that is in memory; after the last one, hand the chunk over.

    In steps the push follows the launch and waits for no flag, so the kernel takes its permit here.
    """
    if _is_last(chunk, counts_ptr, tiles_per_chunk):
        if chunks == WORLD:
            notify(peers.flags_ptr + DONE * WORLD + chunk, 1)
        else:
            take_permit(NO_PERMIT, chunk, peers, WORLD)


@triton.jit
def _is_last(chunk, counts_ptr, tiles_per_chunk):
    """Count a tile that is stored, and return whether it was the last one of the chunk.

    See [Note: sums leave complete].
    """
    is_last = count_up(counts_ptr + chunk, "acq_rel") == tiles_per_chunk - 1
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
def wait_and_check_all(m, peers, WORLD: tl.constexpr, PUSHES: tl.constexpr):
    """Part from each peer in one program; in the last one, if it PUSHES, wait until all have our sums."""
    for peer in range(tl.program_id(0), WORLD, tl.num_programs(0)):
        if peer != peers.rank:
            _wait_and_check_rows(peer, m, peers, WORLD)
    if PUSHES and tl.program_id(0) == tl.num_programs(0) - 1:
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


@triton.jit
def part_from_all(m, peers, WORLD: tl.constexpr):
    """Part from each peer and put its flags back; by the last program to end, if the kernel stores."""
    for peer in range(0, WORLD):
        if peer != peers.rank:
            _wait_and_check_rows(peer, m, peers, WORLD)
            put_flags_back(peer, peers, WORLD)
