"""The device side of waiting: for a peer's chunk before it is read, and for the peers before a call ends."""

from __future__ import annotations

import triton
import triton.language as tl

from ..signals import GIVEN_UP, give_up, poll_until, record_failure, wait_until
from .words import (
    AFTER,
    ARRIVED,
    FETCHED,
    FREE,
    NOT_COPIED,
    NOT_FETCHED,
    NOT_PUSHED,
    NOT_READY,
    OTHER_ROWS,
    OTHER_ROWS_PUSHED,
    READY,
    ROWS,
)


@triton.jit
def slot_of(chunk, rank, pushed, WORLD: tl.constexpr):
    """Return where in the gather buffer the chunk lies; the own one is the same in both lanes."""
    step = (chunk - rank + WORLD) % WORLD
    return tl.where((pushed != 0) & (step != 0), WORLD - 1 + step, chunk)


@triton.jit
def wait_for_chunk(
    chunk, rank, words_ptr, errors_ptr, epoch, pushed, budget, WORLD: tl.constexpr, FENCE: tl.constexpr
):
    """Return ARRIVED when the chunk may be read; a value below or far above if it is given up."""
    arrived_ptr = words_ptr + ARRIVED * WORLD + chunk
    value = poll_until(arrived_ptr, epoch, budget, FENCE)
    if value - epoch < 0:
        if pushed != 0:
            record_failure(errors_ptr + chunk, NOT_PUSHED, 0, value)
            give_up(words_ptr + AFTER * WORLD + chunk, epoch)
            give_up(words_ptr + FREE * WORLD + chunk, epoch)
        else:
            _blame(chunk, rank, words_ptr, errors_ptr, epoch, WORLD)
        give_up(arrived_ptr, epoch)
    return value


@triton.jit
def _blame(chunk, rank, words_ptr, errors_ptr, epoch, WORLD: tl.constexpr):
    """Record why the chunk has not arrived, and let the side stream, which nobody else watches, run through.

    Chunks are fetched in order, so a peer that is not ready also holds up the chunks behind its own.
    """
    known = 0
    for peer in range(0, WORLD):
        if peer != rank:
            ready = tl.atomic_add(words_ptr + READY * WORLD + peer, 0, sem="acquire", scope="sys")
            if ready - epoch < 0:
                record_failure(errors_ptr + peer, NOT_READY, epoch, ready)
                give_up(words_ptr + READY * WORLD + peer, epoch)
            known += (tl.load(errors_ptr + peer) != 0).to(tl.int32)
    if known == 0:
        record_failure(errors_ptr + chunk, NOT_COPIED, epoch, 0)


@triton.jit
def part_from(peer, rank, m, words_ptr, errors_ptr, epoch, pushed, budget, WORLD: tl.constexpr):
    """Compare the peer's number of rows with ours and return once it no longer needs our shard."""
    value = wait_for_chunk(peer, rank, words_ptr, errors_ptr, epoch, pushed, budget, WORLD, False)
    if pushed != 0:
        if (value <= 0) | (value >= GIVEN_UP):
            # Given up, now or in an earlier call. In each call the side stream waits for the peer's permit.
            # No other can be missing: a peer whose chunk is here has given its permit before.
            give_up(words_ptr + FREE * WORLD + peer, epoch)
        elif value != m:
            record_failure(errors_ptr + peer, OTHER_ROWS_PUSHED, 0, value)
    elif value == epoch:
        rows = tl.load(words_ptr + (ROWS + (epoch & 1)) * WORLD + peer)
        if rows != m:
            record_failure(errors_ptr + peer, OTHER_ROWS, epoch, rows)
        # Twice the patience: the peer may be held up by a third rank, on which its own kernel gives up first.
        wait_until(
            words_ptr + FETCHED * WORLD + peer, epoch, errors_ptr + peer, NOT_FETCHED, 2 * budget, False
        )
