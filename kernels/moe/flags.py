"""The flags by which the ranks of an operation over experts tell each other how far they are.

A flag goes up and down once in a call, and each has one who raises and one who lowers it: nothing depends on
the number of the call, so a CUDA graph can repeat it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..signals import GIVEN_UP, give_up, poll_until, record_failure

# Rows of a rank's int32 [7, WORLD] flags. Column p is about rank p.
FREE = tl.constexpr(0)  # whether p's slots for what comes from this rank may be written; p writes it
TOLD = tl.constexpr(1)  # p's tokens * TOPK_SPAN + topk once its choices are here, else 0; p writes it
ARRIVED = tl.constexpr(2)  # 1 once p's rows are here, else 0; p writes it
DONE = tl.constexpr(3)  # 1 once this rank's sums for p are complete; this rank's kernel writes it
# And 5: what TOLD and ARRIVED become after a call: 0, or far ahead of a peer that has been given up.
AFTER = tl.constexpr(4)
GIVEN = tl.constexpr(6)  # digest of the tokens of all ranks as p's caller gave them, with TOLD; p writes it
FLAGS = 7

TOPK_SPAN = tl.constexpr(64)
MOST_CHOICES = 63  # of a token
MOST_TOKENS = 2**24 - 1  # of a rank: what is told stays below GIVEN_UP

# What a failure record says about a peer.
NOT_TOLD = tl.constexpr(1)
NOT_PUSHED = tl.constexpr(2)
OTHER_TOKENS = tl.constexpr(3)
OTHER_TOPK = tl.constexpr(4)
NO_EXPERT = tl.constexpr(5)
NOT_COMPUTED = tl.constexpr(6)
GIVEN_OTHERS = tl.constexpr(7)


@triton.jit
def wait_for_flag(
    FLAG: tl.constexpr, KIND: tl.constexpr, peer, flags_ptr, errors_ptr, patience_ticks, WORLD: tl.constexpr
):
    """Return the peer's flag once it is set; a value below 1 or far above if the peer is given up."""
    value = poll_until(flags_ptr + FLAG * WORLD + peer, 1, patience_ticks, False)
    if value < 1:
        record_failure(errors_ptr + peer, KIND, 0, value)
        # Later replays wait no second time, nor do the kernels behind this one.
        give_up(flags_ptr + AFTER * WORLD + peer, 1)
        give_up(flags_ptr + (AFTER + 1) * WORLD + peer, 1)
        give_up(flags_ptr + TOLD * WORLD + peer, 1)
        give_up(flags_ptr + ARRIVED * WORLD + peer, 1)
        free_side_stream(peer, flags_ptr, WORLD)
    return value


@triton.jit
def is_given_up(value):
    """Return whether a flag says that its peer has been given up, now or in an earlier call."""
    return (value < 1) | (value >= GIVEN_UP)


@triton.jit
def free_side_stream(peer, flags_ptr, WORLD: tl.constexpr):
    """Let our side stream run through, which waits in each call for the permit of a peer that is given up."""
    give_up(flags_ptr + FREE * WORLD + peer, 1)


@triton.jit
def release_if_given_up(value, peer, flags_ptr, WORLD: tl.constexpr):
    """Let our side stream run through if the flag says that the peer was given up in an earlier call."""
    if is_given_up(value):
        free_side_stream(peer, flags_ptr, WORLD)
