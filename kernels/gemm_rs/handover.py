"""Device side of `GemmReduceScatter`'s chunks: count tiles, hand over peers' chunks, wait for sums."""

from __future__ import annotations

import triton
import triton.language as tl

from ..exchange.chunks import wait_for_rows
from ..exchange.flags import DONE, NO_PERMIT
from ..exchange.peers import take_permit
from ..signals import GIVEN_UP, count_up, notify


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

    It does not wait for a peer that is given up, or has announced fewer rows, which it records.
    """
    here = max(rows, GIVEN_UP)
    for peer in range(0, WORLD):
        if peer != peers.rank:
            here = min(here, max(wait_for_rows(peer, rows, peers, WORLD, False), rows))
    return here
