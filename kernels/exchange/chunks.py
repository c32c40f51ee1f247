"""The device side of pushed chunks: waiting for rows before they are read, and for all ranks at the end.

A chunk arrives in pieces, from its first row on. The rank that pushes chooses how many; it counts up rows, so
no reader needs to know where a piece ends: see [Note: pieces need no agreement]. `flags` lists the writer of
each flag; `push` says why every wait ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..signals import GIVEN_UP, MOST_PATIENCE_TICKS, give_up, poll_until, record_failure, wait_until
from .flags import AFTER, ARRIVED, NOT_PUSHED, NOT_SENT, OTHER_ROWS
from .peers import free_side_stream, give_up_peer, told_by


@triton.jit
def wait_for_rows(chunk, rows, peers, WORLD: tl.constexpr, FENCE: tl.constexpr):
    """Return how many rows of the chunk are here, once they are at least `rows`.

    The caller may read so many rows without another wait, with FENCE also by TMA. For a chunk that is given
    up, now or in an earlier call, there is a failure record, and the result is far above any number of rows,
    so that the caller does not ask again.
    """
    flags_ptr, patience_ticks = peers.flags_ptr, peers.patience_ticks
    arrived_ptr = flags_ptr + ARRIVED * WORLD + chunk
    # See [Note: ranks with other rows].
    arrived = poll_until(arrived_ptr, 1, patience_ticks, FENCE)
    if (arrived < rows) & (arrived > 0):
        announced = told_by(chunk, peers, WORLD)
        if announced < rows:
            record_failure(peers.errors_ptr + chunk, OTHER_ROWS, 0, announced)
            arrived += GIVEN_UP  # for the caller alone: the announced rows do come
        else:
            arrived = poll_until(arrived_ptr, rows, patience_ticks, FENCE)
    if arrived < rows:
        record_failure(peers.errors_ptr + chunk, NOT_PUSHED, 0, arrived)
        give_up_peer(chunk, peers, WORLD)
        arrived = max(arrived, 0) + GIVEN_UP
    return arrived


@triton.jit
def wait_and_check_rows(peer, m, peers, WORLD: tl.constexpr):
    """Compare the peer's number of rows with ours and return once its chunk is here, or it is given up."""
    arrived = wait_for_rows(peer, 1, peers, WORLD, False)
    if arrived < GIVEN_UP:
        announced = told_by(peer, peers, WORLD)
        if announced != m:
            record_failure(peers.errors_ptr + peer, OTHER_ROWS, 0, announced)
        # All of it, were it more than ours: see [Note: no stale pushes].
        arrived = wait_for_rows(peer, announced, peers, WORLD, False)
    if arrived >= GIVEN_UP:
        # Given up, now or in an earlier call. In each call the side stream waits for the peer's permit.
        # No other permit can be missing: a peer whose chunk is here gave its permit before.
        free_side_stream(peer, peers.flags_ptr, WORLD)


@triton.jit
def part_from_peers(m, peers, WORLD: tl.constexpr, PUSHES: tl.constexpr):
    """Part from each peer in one program; if this rank PUSHES, wait in the last one until all has left."""
    for peer in range(tl.program_id(0), WORLD, tl.num_programs(0)):
        if peer != peers.rank:
            wait_and_check_rows(peer, m, peers, WORLD)
    if PUSHES and tl.program_id(0) == tl.num_programs(0) - 1:
        wait_for_own(peers, WORLD)


@triton.jit
def wait_for_own(peers, WORLD: tl.constexpr):
    """Return once this rank's chunk, or sums, are with all peers, or their copies are given up.

    For the last program, after what it does for its peers: where programs run one after the other, as
    interpreted ones do, the others have let the side stream through then.
    """
    if WORLD > 1:
        # Peers that do not come hold up the side stream until they are given up, one after the other.
        MOST: tl.constexpr = 2 * MOST_PATIENCE_TICKS // WORLD
        patience_ticks = WORLD * min(peers.patience_ticks, MOST)
        flag_ptr = peers.flags_ptr + peers.rank
        error_ptr = peers.errors_ptr + peers.rank
        is_there = wait_until(flag_ptr + ARRIVED * WORLD, 1, error_ptr, NOT_SENT, patience_ticks)
        if is_there == 0:
            give_up(flag_ptr + (AFTER + 1) * WORLD, 1)  # later replays do not wait
