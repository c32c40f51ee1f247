"""Where a chunk is cut when it is copied in several pieces, so that its first tiles need not wait for all."""

from __future__ import annotations

import functools

from ..configs import INTERPRETED

BLOCK_ROWS = 16 if INTERPRETED else 128  # pieces end at multiples of it: of what most tiles have


def piece_counts(rows: int) -> tuple[int, ...]:
    """Return in how many pieces a chunk of so many rows may be copied; each is to be a block at least."""
    return (1, *(pieces for pieces in (2, 4) if pieces <= rows // BLOCK_ROWS))


@functools.lru_cache
def piece_ends(rows: int, pieces: int) -> tuple[int, ...]:
    """Return the row behind each piece, in order; the pieces are of equal size, to a block."""
    blocks = rows // BLOCK_ROWS
    ends = {piece * blocks // pieces * BLOCK_ROWS for piece in range(1, pieces)} - {0}
    return (*sorted(ends), rows)
