"""What the kernels of `GemmReduceScatter` do about chunks: hand over the peers', and part from the peers."""

from __future__ import annotations

import triton
import triton.language as tl

from ..exchange.flags import ARRIVED, DONE
from ..exchange.peers import free_side_stream, is_given_up, take_permit, wait_for_flag
from ..signals import count_up, notify, record_failure

# What a failure record says about a peer.
NOT_PUSHED = tl.constexpr(1)
OTHER_ROWS = tl.constexpr(2)
NO_PERMIT = tl.constexpr(3)


@triton.jit
def count_tile(chunk, counts_ptr, tiles_per_chunk, chunks, peers, WORLD: tl.constexpr):
    """Count a tile of a peer's chunk that is in memory; after the last one, hand the chunk over.

    Where a launch has not all chunks, the push stands behind it and waits for nothing: the permit for it is
    taken here.
    """
    if _is_last(chunk, counts_ptr, tiles_per_chunk):
        if chunks == WORLD:
            notify(peers.flags_ptr + DONE * WORLD + chunk, 1)
        else:
            take_permit(NO_PERMIT, chunk, peers, WORLD)


@triton.jit
def _is_last(chunk, counts_ptr, tiles_per_chunk):
    """Count a tile that is stored, and return whether it was the last one of the chunk."""
    is_last = count_up(counts_ptr + chunk, "acq_rel") == tiles_per_chunk - 1
    if is_last:
        tl.store(counts_ptr + chunk, 0)
    return is_last


@triton.jit
def part_from(peer, m, peers, WORLD: tl.constexpr):
    """Compare the peer's number of rows with ours, and let our side stream go on if the peer is given up."""
    value = wait_for_flag(ARRIVED, NOT_PUSHED, peer, peers, WORLD)
    if is_given_up(value):
        free_side_stream(peer, peers.flags_ptr, WORLD)
    elif value != m:
        record_failure(peers.errors_ptr + peer, OTHER_ROWS, 0, value)
