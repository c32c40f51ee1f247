"""The device side of pushes, see `push`: waiting for peers, and giving them up. `chunks` waits for rows.

Results that need a peer that is given up are NaN. It stays given up: its flags, and their values after a
call, are set far ahead, so that neither later kernels nor replays wait for it again. In each call our side
stream waits for the peer's permit, and in each it is let through.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..signals import GIVEN_UP, give_up, poll_until, record_failure
from .flags import AFTER, ARRIVED, FREE, ROWS_SENT


class Peers(NamedTuple):
    """Flags, error records and patience of a kernel that waits for its peers."""

    flags_ptr: Any  # int32 [FLAGS, WORLD]
    errors_ptr: Any  # int64 [WORLD], in memory that the host reads without waiting
    rank: Any
    patience_ticks: Any


@triton.jit
def wait_for_flag(FLAG: tl.constexpr, KIND: tl.constexpr, peer, peers, WORLD: tl.constexpr):
    """Return the peer's flag once it is raised; a value that `is_given_up` if the peer does not come."""
    value = poll_until(peers.flags_ptr + FLAG * WORLD + peer, 1, peers.patience_ticks, False)
    if value < 1:
        record_failure(peers.errors_ptr + peer, KIND, 0, value)
        give_up_peer(peer, peers, WORLD)
    return value


@triton.jit
def told_by(peer, peers, WORLD: tl.constexpr):
    """Return ROWS_SENT of a peer that has announced something; given up, if another program does so.

    So one thread reads it for all, as `poll_until` does: see `signals.in_any_thread`.
    """
    return tl.atomic_add(peers.flags_ptr + ROWS_SENT * WORLD + peer, 0, sem="acquire", scope="sys")


@triton.jit
def wait_for_all(FLAG: tl.constexpr, KIND: tl.constexpr, peers, WORLD: tl.constexpr):
    """Return once every peer has raised its flag or is given up."""
    for peer in range(0, WORLD):
        if peer != peers.rank:
            wait_for_flag(FLAG, KIND, peer, peers, WORLD)


@triton.jit
def is_any_lost(peers, WORLD: tl.constexpr):
    """Return 1 if a peer is given up, so that its data is not of this call; else 0.

    Call it after a wait for all. It reads AFTER, which no peer writes; the own one stays 0.
    """
    lost = 0
    for peer in tl.static_range(WORLD):
        lost |= tl.load(peers.flags_ptr + AFTER * WORLD + peer, volatile=True)
    return tl.where(lost != 0, 1, 0)


@triton.jit
def is_lost(peer, peers, WORLD: tl.constexpr):
    """Return 1 if the peer was given up in this call or an earlier one, else 0: the same in all threads."""
    after = tl.atomic_add(peers.flags_ptr + AFTER * WORLD + peer, 0, sem="relaxed", scope="gpu")
    return tl.where(after != 0, 1, 0)


@triton.jit
def take_permit(KIND: tl.constexpr, peer, peers, WORLD: tl.constexpr):
    """Take, in place of the side stream, the peer's permit to write its memory; or give the peer up."""
    value = wait_for_flag(FREE, KIND, peer, peers, WORLD)
    tl.atomic_xchg(peers.flags_ptr + FREE * WORLD + peer, 0, sem="relaxed", scope="sys")
    return value


@triton.jit
def is_given_up(value):
    """Return whether a flag says that its peer has been given up, now or in an earlier call."""
    return (value < 1) | (value >= GIVEN_UP)


@triton.jit
def give_up_peer(peer, peers, WORLD: tl.constexpr):
    """Release all waits for the peer, now and later; to be called after recording the failure.

    See [Note: a push is given up].
    """
    flags_ptr = peers.flags_ptr
    give_up(flags_ptr + AFTER * WORLD + peer, 1)
    give_up(flags_ptr + (AFTER + 1) * WORLD + peer, 1)
    give_up(flags_ptr + ROWS_SENT * WORLD + peer, 1)
    give_up(flags_ptr + ARRIVED * WORLD + peer, 1)
    free_side_stream(peer, flags_ptr, WORLD)


@triton.jit
def free_side_stream(peer, flags_ptr, WORLD: tl.constexpr):
    """Let our side stream run through, which waits in each call for the permit of a peer that is given up."""
    give_up(flags_ptr + FREE * WORLD + peer, 1)


@triton.jit
def release_if_given_up(value, peer, peers, WORLD: tl.constexpr):
    """Let our side stream run through if the flag says that the peer has been given up."""
    if is_given_up(value):
        free_side_stream(peer, peers.flags_ptr, WORLD)
