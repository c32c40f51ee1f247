"""In which order the programs of a persistent kernel visit the tiles of its output.

Two questions, answered apart. Which numbers does a program visit? Mostly program, program + programs, ..., so
that neighbours in time are neighbours in number; else

    chiplet_number    these, renumbered so that the programs of a chiplet (XCD) share runs of numbers
    claim_number      the next one that nobody has: an atomic counter

And where does a number lie?

    grouped_tile       0 2 4     rotated_chunk     chunk rank first,
    (GROUP_M = 2)      1 3 5     (3 chunks)        then rank + 1, ...
                       6 7 8

All but the counter use only `+ - * // %`, `min` and `max`: kernels of plain Triton and of Gluon call them,
and `on_host` turns the same source into a Python function. A number that is not below the number of tiles
means that the program has no more.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl  # the interpreter wants to see it in every module with a kernel


@triton.jit
def chiplet_number(visit, program, programs, tiles, CHIPLETS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the number of the program's tile at this visit, CHUNK consecutive ones to a chiplet at a time.

    The hardware deals programs out to chiplets in turn, each with an L2 cache of its own: program p runs on
    chiplet p % CHIPLETS (as long as CHIPLETS divides `programs`; if not, the order is still complete). So
    number n of the strided order, on chiplet n % CHIPLETS, takes the place n // CHIPLETS of the tiles that
    belong to this chiplet. Where CHIPLETS * CHUNK does not divide `tiles`, the rest keeps its order.
    """
    number = program + visit * programs  # in the strided order
    block = CHIPLETS * CHUNK
    whole = tiles // block * block
    place = number // CHIPLETS
    moved = place // CHUNK * block + number % CHIPLETS * CHUNK + place % CHUNK
    inside = min(max(whole - number, 0), 1)  # 1 in the whole blocks, 0 after them
    return inside * moved + (1 - inside) * number


@triton.jit
def claim_number(counter_ptr):
    """Claim the next number, from 0 on. A program stops at its first number beyond the tiles."""
    return tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")


@triton.jit
def reset_counter(counter_ptr, programs):
    """Put the counter back to 0 for the next launch, once every program has called this, each at its end.

    The next word counts programs at their end; the last one resets both, so no launch needs a memset. Return
    whether this is the last one.
    """
    is_last = tl.atomic_add(counter_ptr + 1, 1, sem="acq_rel", scope="gpu") == programs - 1
    if is_last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(counter_ptr + 1, 0, sem="relaxed", scope="gpu")
    return is_last


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


@functools.cache
def on_host(schedule: Any) -> Callable[..., Any]:
    """Return the Python function of a `@triton.jit` function of arithmetic alone, for integers."""
    function = schedule.fn
    called = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    names = {name: on_host(value) for name, value in called.items() if hasattr(value, "fn")}
    return types.FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)
