"""How the columns of C are divided among tiles of two widths: BLOCK_N, and EXTRA_N more.

A tensor's sides are powers of two, so the further columns are tensors of their own, and a tile may be without
them. N is seldom a multiple of a tile's width; what is left over can be a column of tiles of its own, which
costs as much as a full one, or a few columns more for some tiles. N = 4104 with BLOCK_N = 256, EXTRA_N = 32:

    one width         | 256 | 256 | ... | 256 | 8..|   17 columns of tiles; the last one is moved back
    all wide          | 288 | 288 | ... | 288 |        15
    as few as needed  | 288 | 256 | ... | 256 |        16 (SPREAD), 1 of them wide

The wide ones come first. Like `tiles`, written with `+ - * //`, `min` and `max` only, to be read by `on_host`
as well.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..tiles import on_host


@triton.jit
def columns_of_tiles(n, BLOCK_N: tl.constexpr, EXTRA_N: tl.constexpr, SPREAD: tl.constexpr):
    """Return how many tiles there are side by side: with SPREAD as many as there are whole BLOCK_N's in N.

    Unless they could not hold what is left over, EXTRA_N each; then, and otherwise, as few as possible.
    """
    width = BLOCK_N + EXTRA_N
    fewest = (n + width - 1) // width
    return max(fewest, n // BLOCK_N) if SPREAD else fewest


@triton.jit
def wide_tiles(n, tiles_n, BLOCK_N: tl.constexpr, EXTRA_N: tl.constexpr, SPREAD: tl.constexpr):
    """Return how many of them are wide; without SPREAD all that can be."""
    left_over = max(n - tiles_n * BLOCK_N, 0)
    return (left_over + EXTRA_N - 1) // EXTRA_N if SPREAD else tiles_n


@triton.jit
def width_of_last(tiles_n, wide, BLOCK_N: tl.constexpr, EXTRA_N: tl.constexpr):
    """Return how wide the last tile is, which is wide if all are."""
    return BLOCK_N + min(max(wide - tiles_n + 1, 0), 1) * EXTRA_N


@triton.jit
def column_of(pid_n, wide, BLOCK_N: tl.constexpr, EXTRA_N: tl.constexpr):
    """Return where the tile's columns begin."""
    return pid_n * BLOCK_N + min(pid_n, wide) * EXTRA_N


def tiles_side_by_side(kwargs: dict[str, Any], n: int) -> tuple[int, int]:
    """Return how many tiles a config has side by side, and how many of them are wide."""
    how = kwargs["BLOCK_N"], kwargs["EXTRA_N"], kwargs["SPREAD"]
    tiles_n = on_host(columns_of_tiles)(n, *how)
    return tiles_n, on_host(wide_tiles)(n, tiles_n, *how)
