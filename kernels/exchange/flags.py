"""The flags by which the ranks of an `AllGatherGemm` tell each other how far they are, and its failures."""

from __future__ import annotations

import triton.language as tl

from ..signals import Failure

FLAGS = 6  # rows of a rank's int32 [FLAGS, WORLD] flags; one such tensor for fetched, one for pushed calls

# Column p is about rank p, which writes it, save ARRIVED.
READY = tl.constexpr(0)  # the epoch whose shard p has put in place
FETCHED = tl.constexpr(1)  # the epoch whose shard p has copied from this rank
ROWS = tl.constexpr(2)  # and 3: how many rows p's shards of even and of odd epochs have
ARRIVED = tl.constexpr(4)  # how many rows of p's chunks this rank's side stream has fetched, in all calls

# Where chunks are pushed ARRIVED holds the rows of this call, and p writes it.
FREE = tl.constexpr(0)  # whether p's slot for this rank's chunk may be written
ANNOUNCED = tl.constexpr(2)  # how many rows p pushes in this call; valid once the first of them is here
AFTER = tl.constexpr(5)  # what ARRIVED becomes after a call: 0, or far ahead once p has been given up

# What a failure record says about a peer.
NOT_READY = tl.constexpr(1)
NOT_COPIED = tl.constexpr(2)
NOT_FETCHED = tl.constexpr(3)
OTHER_ROWS = tl.constexpr(4)
NOT_PUSHED = tl.constexpr(5)  # this and the next where chunks are pushed
OTHER_ROWS_PUSHED = tl.constexpr(6)


def describe_failure(failure: Failure, peer: int, *, rank: int, calls: int) -> str:
    """Return in words what the kernel of `rank` recorded about a peer in one of its `calls` calls."""
    if failure.kind == NOT_PUSHED.value:
        return f"rank {peer}, or one that it waits for, did not push chunk {peer} in time"
    if failure.kind == OTHER_ROWS_PUSHED.value:
        return f"rank {peer} pushed {failure.seen} rows, not as many as this rank passed"
    call = calls - (calls - failure.epoch) % 2**28
    if failure.kind == NOT_READY.value:
        last = f"its last: call {failure.seen}"
        return f"rank {peer} did not offer chunk {peer} of call {call} in time ({last})"
    if failure.kind == NOT_COPIED.value:
        return f"chunk {peer} of call {call} was offered by rank {peer} and not copied in time"
    if failure.kind == NOT_FETCHED.value:
        return f"rank {peer} did not fetch chunk {rank} of call {call} in time"
    return f"in call {call} rank {peer} passed {failure.seen} rows, not as many as this rank"
