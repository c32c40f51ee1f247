"""The words by which the ranks of an `AllGatherGemm` tell each other how far they are, and failure codes."""

from __future__ import annotations

import triton.language as tl

# Rows of a rank's int32 [6, WORLD] words. Column p is about rank p, which writes it, save ARRIVED.
READY = tl.constexpr(0)  # the epoch whose shard p has put in place
FETCHED = tl.constexpr(1)  # the epoch whose shard p has copied from this rank
ROWS = tl.constexpr(2)  # and 3: how many rows p's shards of even and of odd epochs have
ARRIVED = tl.constexpr(4)  # the epoch whose chunk p is here; written by this rank's side stream

# In the lane of captured calls (see `lane`), where ARRIVED holds p's number of rows and p writes it.
FREE = tl.constexpr(0)  # whether p's slot for this rank's chunk may be written
AFTER = tl.constexpr(5)  # what ARRIVED becomes after a call: 0, or far ahead once p has been given up

# What a failure record says about a peer.
NOT_READY = tl.constexpr(1)
NOT_COPIED = tl.constexpr(2)
NOT_FETCHED = tl.constexpr(3)
OTHER_ROWS = tl.constexpr(4)
NOT_PUSHED = tl.constexpr(5)  # this and the next in the lane of captured calls
OTHER_ROWS_PUSHED = tl.constexpr(6)
