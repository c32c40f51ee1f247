"""The flags by which ranks tell each other how far they are, and the failures of a gather.

A rank has int32 [FLAGS, WORLD] of them in symmetric memory; an `AllGatherGemm` has one such tensor for calls
that fetch and one for calls that push. Column p is about rank p, which writes it unless noted.
"""

from __future__ import annotations

import triton.language as tl

from ..signals import Failure

# Where rows are pushed, see `push`. Each goes up and down once in a call.
FREE = tl.constexpr(0)  # the permit: 1 while this rank may write its slot on p
TOLD = tl.constexpr(1)  # above 0 once p has announced its push: its rows, or its choices of experts
ARRIVED = tl.constexpr(2)  # above 0 once p's rows are here; of chunks and sums, how many of them are
DONE = tl.constexpr(3)  # 1 once this rank's sums for p are complete; this rank's kernel writes it
# 4 and 5: the values of TOLD and ARRIVED after a call: 0, or far ahead where p is given up. This rank's
# kernel writes both.
AFTER = tl.constexpr(4)
GIVEN = tl.constexpr(6)  # with TOLD: digest of the tokens of all ranks as p's caller gave them
FLAGS = 7

# Where chunks are fetched, see `pull`. ARRIVED, by this rank's side stream: their rows in all calls so far.
READY = tl.constexpr(0)  # the epoch whose shard p has put in place
FETCHED = tl.constexpr(1)  # the epoch whose shard p has copied from this rank
ROWS = tl.constexpr(3)  # and 4: how many rows p's shards of even and of odd epochs have

# The kinds of failure records of `AllGatherGemm`.
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
