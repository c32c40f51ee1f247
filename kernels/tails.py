"""How K blocks of the last, incomplete wave of tiles are shared out evenly among all programs.

P programs that each take a whole tile at a time leave P - R of them idle in the last wave, where only R < P
tiles are left. Instead the k blocks of these R tiles, the tail, are one line, of which each program takes a
stretch of `share` blocks (the last ones fewer or none):

    tiles       |0              |1              |2              |    3 of 16 k blocks each
    programs    |0        |1        |2        |3        |4      |    5, share = 10
    segments    |0        |0    |1  |0        |0|1      |0      |

As `share` is at most the k blocks of a tile, a stretch meets two tiles at most: segments 0 and 1. The sum of
a segment is one of the tile's parts, unless it is all of the tile. After the decomposition of "Stream-K"
(Osama, Merrill, Cecka, Garland, Owens, 2023), without its waits: see `persistent_gemm/stream_k.py`.

Like `tiles`, written with `+ - * //`, `min` and `max` only, to be read by `on_host` as well.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter wants to see it in every module with a kernel


@triton.jit
def tail_share(tail, k_blocks, programs, shortest):
    """Return how many k blocks of `tail` < `programs` tiles each program takes: 1 to k_blocks.

    As many programs for each tile, if that takes no more than an eighth longer than dealing all out evenly:
    then a stretch ends where its tile ends, and there are fewer parts. No fewer than `shortest`, if a tile
    has so many: filling the pipeline for less costs more than it saves.
    """
    even = (tail * k_blocks + programs - 1) // programs
    to_a_tile = programs // max(tail, 1)
    aligned = (k_blocks + to_a_tile - 1) // to_a_tile
    too_long = min(max(8 * aligned - 9 * even, 0), 1)
    share = too_long * even + (1 - too_long) * aligned
    return max(max(share, min(shortest, k_blocks)), 1)


@triton.jit
def tail_segment(program, segment, tail, k_blocks, share):
    """Return (tile of the tail, first k block, number of k blocks) of a program's segment 0, 1, ...

    The number is 0 if the program has no such segment, and positive otherwise.
    """
    start = program * share
    end = min(start + share, tail * k_blocks)
    tile = start // k_blocks + segment
    first = max(start - tile * k_blocks, 0)
    return tile, first, max(min(end - tile * k_blocks, k_blocks) - first, 0)


@triton.jit
def tail_segments(program, tail, k_blocks, share):
    """Return how many segments the program has: 0, 1 or 2."""
    start = program * share
    left = min(max(tail * k_blocks - start, 0), share)
    return (start % k_blocks + left + k_blocks - 1) // k_blocks * min(left, 1)


@triton.jit
def tail_parts(tile, k_blocks, share):
    """Return (first program, number of programs) of those who multiply k blocks of the tile."""
    first = tile * k_blocks // share
    return first, (tile * k_blocks + k_blocks - 1) // share - first + 1


@triton.jit
def part_slot(program, tile, k_blocks, share, programs):
    """Return where the program's part of the tile is kept, one of 2 * programs slots."""
    return program + (tile - program * share // k_blocks) * programs
