"""The device side of waiting: for rows of a peer's chunk before they are read, and for the peers at the end.

A chunk arrives in pieces, from its first row on. The rank that copies chooses how many; it counts up rows, so
no reader needs to know where a piece ends: see [Note: pieces need no agreement]. `flags` lists the writer of
each flag; `pull` and `push` say why every wait ends. One binary waits for fetched and for pushed chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..signals import GIVEN_UP, give_up, poll_until, record_failure, wait_until
from .flags import (
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
    TOLD,
)


class ChunkExchange(NamedTuple):
    """The arguments of a kernel about a call's exchange of chunks."""

    flags_ptr: Any  # int32 [FLAGS, WORLD]
    errors_ptr: Any  # int64 [WORLD], in memory that the host reads without waiting
    rank: Any
    epoch: Any
    base: Any  # ARRIVED before this call
    pushed: Any  # 1 where chunks are pushed
    patience_ticks: Any


@triton.jit
def slot_of(chunk, rank, pushed, WORLD: tl.constexpr):
    """Return where in the gather buffer the chunk lies; the own one is the same in both lanes."""
    step = (chunk - rank + WORLD) % WORLD
    return tl.where((pushed != 0) & (step != 0), WORLD - 1 + step, chunk)


@triton.jit
def wait_for_rows(chunk, rows, exchange, WORLD: tl.constexpr, FENCE: tl.constexpr):
    """Return how many rows of the chunk are here, once they are at least `rows`.

    The caller may read so many rows without another wait, with FENCE also by TMA. For a chunk that is given
    up, now or in an earlier call, there is a failure record, and the result is far above any number of rows,
    so that the caller does not ask again.
    """
    flags_ptr, errors_ptr, base = exchange.flags_ptr, exchange.errors_ptr, exchange.base
    pushed, patience_ticks = exchange.pushed, exchange.patience_ticks
    arrived_ptr = flags_ptr + ARRIVED * WORLD + chunk
    # See [Note: ranks with other rows].
    first = tl.where(pushed != 0, 1, rows)
    arrived = poll_until(arrived_ptr, base + first, patience_ticks, FENCE) - base
    if (arrived < rows) & (arrived > 0) & (pushed != 0):
        announced = tl.load(flags_ptr + TOLD * WORLD + chunk)
        if announced < rows:
            record_failure(errors_ptr + chunk, OTHER_ROWS_PUSHED, 0, announced)
            arrived += GIVEN_UP  # for the caller alone: the announced rows do come
        else:
            arrived = poll_until(arrived_ptr, base + rows, patience_ticks, FENCE) - base
    if arrived < rows:
        if pushed != 0:
            record_failure(errors_ptr + chunk, NOT_PUSHED, 0, arrived)
            give_up(flags_ptr + (AFTER + 1) * WORLD + chunk, base)
            give_up(flags_ptr + FREE * WORLD + chunk, base)
        else:
            _blame(chunk, exchange, WORLD)
        give_up(arrived_ptr, base)
        arrived = max(arrived, 0) + GIVEN_UP
    return arrived


@triton.jit
def is_lost(chunk, exchange, WORLD: tl.constexpr):
    """Return 1 if the chunk's rows are not of this call, as its rank is given up; else 0.

    Call it behind a wait for them. It does not read ARRIVED: a side stream that is let through copies other
    rows and raises ARRIVED all the same.
    """
    flag_ptr = exchange.flags_ptr + chunk
    after = tl.load(flag_ptr + (AFTER + 1) * WORLD, volatile=True) - exchange.base
    ready = tl.load(flag_ptr + READY * WORLD, volatile=True) - exchange.epoch
    value = tl.where(exchange.pushed != 0, after, ready)  # one load by a chosen address takes more registers
    return ((chunk != exchange.rank) & (value >= GIVEN_UP // 2)).to(tl.int32)


@triton.jit
def _blame(chunk, exchange, WORLD: tl.constexpr):
    """Record why the chunk has not arrived, and let the side stream run through.

    See [Note: a pull is given up]. Chunks are fetched in order, so a peer that is not ready also holds up the
    chunks behind its own.
    """
    flags_ptr, errors_ptr, epoch = exchange.flags_ptr, exchange.errors_ptr, exchange.epoch
    known = 0
    for peer in range(0, WORLD):
        if peer != exchange.rank:
            ready = tl.atomic_add(flags_ptr + READY * WORLD + peer, 0, sem="acquire", scope="sys")
            is_late = ready - epoch < 0
            if is_late:
                record_failure(errors_ptr + peer, NOT_READY, epoch, ready)
            if is_late | (peer == chunk):  # that of the chunk tells `is_lost`
                give_up(flags_ptr + READY * WORLD + peer, epoch)
            known += (tl.load(errors_ptr + peer) != 0).to(tl.int32)
    if known == 0:
        record_failure(errors_ptr + chunk, NOT_COPIED, epoch, 0)


@triton.jit
def part_from(peer, m, exchange, WORLD: tl.constexpr):
    """Compare the peer's number of rows with ours and return once it no longer needs our shard.

    All of its chunk is here then, or it has been given up.
    """
    flags_ptr, errors_ptr, epoch = exchange.flags_ptr, exchange.errors_ptr, exchange.epoch
    arrived = wait_for_rows(peer, tl.where(exchange.pushed != 0, 1, m), exchange, WORLD, False)
    if exchange.pushed != 0:
        if arrived < GIVEN_UP:
            announced = tl.load(flags_ptr + TOLD * WORLD + peer)
            if announced != m:
                record_failure(errors_ptr + peer, OTHER_ROWS_PUSHED, 0, announced)
            # All of it, were it more than ours: see [Note: no stale pushes].
            arrived = wait_for_rows(peer, announced, exchange, WORLD, False)
        if arrived >= GIVEN_UP:
            # Given up, now or in an earlier call. In each call the side stream waits for the peer's permit.
            # No other permit can be missing: a peer whose chunk is here gave its permit before.
            give_up(flags_ptr + FREE * WORLD + peer, exchange.base)
    elif arrived == m:
        rows = tl.load(flags_ptr + (ROWS + (epoch & 1)) * WORLD + peer)
        if rows != m:
            record_failure(errors_ptr + peer, OTHER_ROWS, epoch, rows)
        # Twice the patience: a third rank may hold up the peer, whose own kernel gives that one up first.
        fetched_ptr, patience_ticks = flags_ptr + FETCHED * WORLD + peer, 2 * exchange.patience_ticks
        wait_until(fetched_ptr, epoch, errors_ptr + peer, NOT_FETCHED, patience_ticks, False)
