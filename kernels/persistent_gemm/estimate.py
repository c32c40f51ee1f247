"""About how long a config takes on Hopper: enough to leave out of the trials what cannot win.

A k block of a tile costs what takes longest, in clocks of an SM:

    multiply    an instruction of 64 rows and w columns takes w / 2 for each 16 of K, by data sheets. Products
                of random numbers were seen to take 1.2 times that, cuBLAS' as well
    share       shared memory passes 128 bytes a clock: what is loaded is written there, and each instruction
                reads its rows of A and its columns of B. A tile of two accumulators reads its rows twice, so
                128 + 64 columns are bound by that
    load        60 bytes a clock come from L2, fewer where rows begin between its lines or sectors

Tiles are done in waves. What is not hidden of a tile's store and of its first loads comes on top, and nothing
is faster than memory, which is as fast as there are bytes in flight.

The constants are an H200's at 1.98 GHz, which is what it runs at for products that take little power: of data
sheets, or such that the medians in docs/benchmarks come out. With 2.5 us for the launch, half of the configs
that `auto` chose below 0.2 ms for the ragged shapes are within a tenth, nearly all within a fifth. Large
products take longer, as the clock falls.
"""

from __future__ import annotations

from typing import Any

import triton

from ..tails import tail_share
from ..tiles import on_host
from .blocks import as_tiled, count_tiles, rows_of_a_cta
from .mma import WIDEST_FROM_REGISTERS

L2_BYTES_PER_CLOCK = 60  # into one SM; 55 to 58 were seen with rings of five slots
BETWEEN_LINES, BETWEEN_SECTORS = 1.4, 2.4  # times that for rows of 128 bytes that begin there
SEEN_OVER_NOMINAL = 1.2  # of instructions, by what K = 4096 takes longer than K = 1024
SHARED_BYTES_PER_CLOCK = 128
FROM_REGISTERS = 0.95  # times that where the rows of two accumulators pass through registers
MEMORY_BYTES_PER_CLOCK = 2020  # of the GPU: about 4 TB/s
MEMORY_LATENCY = 3500  # clocks, under load
START = 2500  # of a kernel with several partitions, over one without
SECOND_CTA = 2500  # of a program of two, and for them to meet at the end
FILL = 1500  # from the first load of a tile to its first multiplication
STORE_BYTES_PER_CLOCK, STORE_LATENCY = 32, 1000
# A part of stream-K is written by all SMs at once, and the parts of a tile are read by one.
PART_WRITE_BYTES_PER_CLOCK, PART_READ_BYTES_PER_CLOCK = 20, 40

STORES_EXPOSED = {"pingpong": 0}
FILLS_EXPOSED = {"pipelined": 1, "persistent": 1}
STARTS = {"cooperative": 1, "pingpong": 1}


def estimated_clocks(kwargs: dict[str, Any], args: dict[str, Any]) -> float:
    """Return about how many clocks a call takes with a config; kwargs are the config's, args the kernel's."""
    variant, tiles, args = kwargs["VARIANT"], count_tiles(kwargs, args), as_tiled(kwargs, args)
    programs = max(args["programs"] // kwargs["CTAS"], 1)
    width = kwargs["BLOCK_N"] + kwargs["EXTRA_N"]
    k_blocks = triton.cdiv(args["K"], kwargs["BLOCK_K"])
    k_block = max(multiply_clocks(kwargs), load_clocks(kwargs, args))
    store = rows_of_a_cta(kwargs) * width * out_bytes(args) / STORE_BYTES_PER_CLOCK + STORE_LATENCY
    exposed = STORES_EXPOSED.get(variant, 1) * store + FILLS_EXPOSED.get(variant, 0) * FILL
    if kwargs["STREAM_K"]:
        waves, tail = divmod(tiles, programs)
        share = on_host(tail_share)(tail, k_blocks, programs, kwargs["STREAM_K"])
        busy, cut = programs, share * k_block
        ends = FILL + store + part_clocks(kwargs, triton.cdiv(k_blocks, share))
    else:
        waves, busy, cut = triton.cdiv(tiles, programs), min(tiles, programs), 0.0
        ends = FILL + store
    work = waves * (k_blocks * k_block + exposed) + cut
    start = STARTS.get(variant, 0) * START + (kwargs["CTAS"] - 1) * SECOND_CTA
    return start + max(work, memory_clocks(kwargs, args, busy)) + ends


def out_bytes(args: dict[str, Any]) -> int:
    """Return the size of an element of C."""
    return 4 if args["OUT"] == "fp32" else 2


def multiply_clocks(kwargs: dict[str, Any]) -> float:
    """Return what the tensor cores of an SM, or its shared memory, take for one k block."""
    widths = [width for width in (kwargs["BLOCK_N"], kwargs["EXTRA_N"]) if width > 0]
    if kwargs["JOINED"]:
        widths = [sum(widths)]
    rows = rows_of_a_cta(kwargs)
    instructions = rows // 64 * kwargs["BLOCK_K"] // 16  # of each width
    read = instructions * sum(64 + width for width in widths) * 16 * 2
    written = (rows + sum(widths)) * kwargs["BLOCK_K"] * 2
    shared = (read + written) / SHARED_BYTES_PER_CLOCK
    if len(widths) > 1 and widths[1] <= WIDEST_FROM_REGISTERS.value and rows >= 128:
        shared *= 1 if kwargs["VARIANT"] == "pingpong" else FROM_REGISTERS
    return max(SEEN_OVER_NOMINAL * instructions * sum(widths) / 2, shared)


def load_clocks(kwargs: dict[str, Any], args: dict[str, Any]) -> float:
    """Return what an SM takes to load one k block, whose rows beyond the edges cost nothing."""
    width = kwargs["BLOCK_N"] + kwargs["EXTRA_N"]
    a_rows = min(rows_of_a_cta(kwargs), args["M"]) * slowed(args["a_alignment"])
    b_rows = min(width, args["N"]) / kwargs["CTAS"] * slowed(args["b_alignment"])
    rows = a_rows + b_rows
    return rows * kwargs["BLOCK_K"] * 2 / L2_BYTES_PER_CLOCK


def slowed(alignment: int) -> float:
    """Return by how much loads take longer from a matrix whose rows begin at multiples of so many bytes."""
    if alignment % 128 == 0:
        return 1.0
    return BETWEEN_LINES if alignment % 32 == 0 else BETWEEN_SECTORS


def part_clocks(kwargs: dict[str, Any], parts: int) -> float:
    """Return what stream-K takes to write a part of a tile and to read all of them."""
    part_bytes = 4 * kwargs["BLOCK_M"] * (kwargs["BLOCK_N"] + kwargs["EXTRA_N"])
    latency = 2 * STORE_LATENCY
    return latency + part_bytes / PART_WRITE_BYTES_PER_CLOCK + parts * part_bytes / PART_READ_BYTES_PER_CLOCK


def memory_clocks(kwargs: dict[str, Any], args: dict[str, Any], busy: int) -> float:
    """Return what memory takes for A, B and C, asked by `busy` SMs, each for as much as fits its buffers."""
    m, n, k = args["M"], args["N"], args["K"]
    rows = min(kwargs["BLOCK_M"], m) + min(kwargs["BLOCK_N"] + kwargs["EXTRA_N"], n)
    in_flight = busy * kwargs["NUM_BUFFERS"] * rows * kwargs["BLOCK_K"] * 2
    speed = min(MEMORY_BYTES_PER_CLOCK, in_flight / MEMORY_LATENCY)
    return (2 * (m + n) * k + out_bytes(args) * m * n) / speed
