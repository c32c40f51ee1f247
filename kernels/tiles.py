"""In which order a persistent kernel visits the tiles of its output.

Each function maps the running number of a tile to its place and is written with `+ - * // %` and `min`
only, so the source that a kernel calls is, through `on_host`, an ordinary Python function as well:

    row_major_tile          0 1 2     grouped_tile       0 2 4     rotated_chunk     chunk rank first,
                            3 4 5     (GROUP_M = 2)      1 3 5     (3 chunks)        then rank + 1, ...
                            6 7 8                        6 7 8
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl  # the interpreter wants to see it in every module with a kernel


@triton.jit
def row_major_tile(tile, tiles_n):
    """Return (pid_m, pid_n) of the tile, one row of tiles after the other."""
    return tile // tiles_n, tile % tiles_n


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return (pid_m, pid_n) of the tile: down GROUP_M rows of tiles before the next column.

    Programs that run side by side then share rows of A and of B in the L2 cache. The last group is lower
    when GROUP_M does not divide `tiles_m`.
    """
    group = tile // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    group_rows = min(tiles_m - first_m, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return first_m + within % group_rows, within // group_rows


@triton.jit
def rotated_chunk(tile, tiles_per_chunk, chunks, first):
    """Return (chunk, tile within the chunk): all tiles of chunk `first`, then of `first + 1`, ..., wrapping.

    Chunks are visited in the order in which they arrive, and as a chunk has its own tiles, no group of
    `grouped_tile` and no tile spans two of them.
    """
    return (first + tile // tiles_per_chunk) % chunks, tile % tiles_per_chunk


def on_host(schedule: Any) -> Callable[..., Any]:
    """Return the Python function behind one of this module's schedules, for integers."""
    function: Callable[..., Any] = schedule.fn
    return function
