"""The configs of the persistent GEMM: the candidates, their TMA blocks, their shared memory and registers.

BLOCK_K counts units of 2 bytes, so a config means the same for all types: 64 units are a line of 128 bytes,
or 128 elements in fp8. A product in fp8 takes as long as one of half as many elements of 2 bytes
(`in_words`): it moves as many bytes, and an instruction multiplies as many bytes at a time.

With SWAP_AB tiles are those of the transposed product, C.T = B.T @ A.T: their rows are B's, their columns
A's, and a tile's columns are stored as rows. Elsewhere "rows" and "columns" are those of tiles.

Numbers of rows change from call to call, with batches and sequences, and tuning tries dozens of configs. So
numbers of rows are tuned in classes, named after their largest number; a class takes the config that its
first call has tuned, which is valid for all of them.

    1 .. 128        multiples of 16        16, 32, 48, 64, 80, 96, 112, 128
    more            four a doubling        160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, ...

A class ends where waves of tiles mostly do, at halves and quarters of powers of two, and no number of rows
above 128 is tuned as more than a quarter more.
"""

from __future__ import annotations

import functools
from typing import Any

import triton

from ..compat import HAS_INLINE_PTX
from ..configs import INTERPRETED
from ..epilogues import sums_of_a_result
from ..matrices import Block, set_block, set_matrix
from .operands import item_bytes

BOXES = (128, 64, 32, 16, 8)
FEWEST_ROWS = 8  # of a block in shared memory: its swizzle repeats after so many
SHARED_BYTES = 227 * 1024  # that a program can have on Hopper
BARRIER_BYTES = 1024  # more than all mbarriers and a ring of tile numbers take
MOST_ACCUMULATOR_REGISTERS = 192  # of a thread's 255; pointers and the epilogue need the rest
VARIANTS = ("auto", "pipelined", "persistent", "persistent_pipelined", "warp_specialized")
# Of the last one, so that each can be measured alone.
PARTS = ("cooperative", "pingpong")
# Of tiles of any width. A call tries, for each number of tiles, the narrowest.
WIDTHS = (80, 96, 104, 112, 120, 128, 144, 152, 160, 176, 192, 200, 208, 216, 224, 240)
WIDEST_OF_PINGPONG = 192  # registers of a thread
STEP = 16  # the least that tiles differ in
FINE_UNTIL = 128
CLASSES_A_DOUBLING = 4


def in_boxes(width: int) -> tuple[int, int]:
    """Return BLOCK_N and EXTRA_N that divide the columns into the fewest boxes: each costs TMA time."""
    ways = [(width - width % box, width % box) for box in BOXES if box <= width]
    return min(ways, key=lambda way: sum(columns // box_of(columns) for columns in way if columns))


def box_of(columns: int) -> int:
    """Return how many of BLOCK_N or of EXTRA_N columns TMA brings at a time: the power of two in them."""
    return columns & -columns


def blocks_of(args: dict[str, Any]) -> dict[str, Block]:
    """Return the block of each descriptor of the Gluon body; args: a config's, and those of a launch.

    Where args have no TRANS_A, A lies by rows, [M, K], and no tile reaches beyond it; where they have no
    TRANS_B, B is a weight, [N, K]; where they have no sizes, no matrix is smaller than a block.
    """
    sums = sums_of_a_result(args.get("ACTIVATION"))
    if args.get("SWAP_AB"):
        blocks = blocks_of({**swapped(args), "SWAP_AB": False, "ACTIVATION": None})
        rows, columns = blocks["c_desc"]
        exchanged = {"a_desc": blocks["b_desc"], "b_desc": blocks["a_desc"]}
        return blocks | exchanged | {"c_desc": Block(columns, rows // sums)}
    trans_a, trans_b = args.get("TRANS_A", False), args.get("TRANS_B", True)
    block_m, block_n = args["BLOCK_M"], args["BLOCK_N"]
    block_k = 2 * args["BLOCK_K"] // item_bytes(args.get("DTYPE"))
    extra_n = args["EXTRA_N"]
    columns = args.get("N", block_n + extra_n)
    a_rows = rows_to_load(block_m, args.get("M", block_m)) if "TRANS_A" in args else block_m
    if args["JOINED"]:
        b_rows, further_n = box_of(block_n), box_of(extra_n or block_n)
    else:
        b_rows = rows_to_load(block_n, columns)
        further_n = rows_to_load(extra_n, columns - block_n) if extra_n else b_rows
    blocks = {
        "a_desc": Block(block_k, block_m) if trans_a else Block(a_rows, block_k),
        "b_desc": Block(b_rows, block_k) if trans_b else Block(block_k, block_n),
        "extra_desc": Block(further_n, block_k) if trans_b else Block(block_k, extra_n or block_n),
        "c_desc": Block(block_m, args["STORE_N"] // sums),
    }
    # Sums on their way to peers are stored as those for C are.
    return blocks | ({"partial_desc": blocks["c_desc"]} if "partial_desc" in args else {})


def in_words(args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the product in 2-byte elements that moves as many bytes, and takes as long."""
    return {**args, "K": triton.cdiv(args["K"] * item_bytes(args.get("DTYPE")), 2)}


def swapped(args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the transposed product, C.T = B.T @ A.T, which SWAP_AB divides into tiles."""
    names = {"M": "N", "N": "M", "a_alignment": "b_alignment", "b_alignment": "a_alignment"}
    return {name: args[names.get(name, name)] for name in args}


def as_tiled(kwargs: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the product that a config divides into tiles: the call's, or swapped."""
    return swapped(args) if kwargs.get("SWAP_AB") else args


def count_tiles(kwargs: dict[str, Any], args: dict[str, Any]) -> int:
    """Return how many tiles a call has under a config."""
    sizes, width = as_tiled(kwargs, args), kwargs["BLOCK_N"] + kwargs["EXTRA_N"]
    return int(triton.cdiv(sizes["M"], kwargs["BLOCK_M"]) * triton.cdiv(sizes["N"], width))


def rows_to_load(block: int, rows: int) -> int:
    """Return how many rows to load of a block of which `rows` are there: a power of two, few beyond."""
    return min(block, max(triton.next_power_of_2(max(rows, 1)), FEWEST_ROWS))


def set_blocks(args: dict[str, Any]) -> None:
    """Give the descriptors of a launch the blocks of the config that is about to run: its `pre_hook`."""
    for name, block in blocks_of(args).items():
        set_block(args[name], block)
    if "SWAP_AB" in args:
        set_matrix(args["extra_desc"], args["a_desc" if args["SWAP_AB"] else "b_desc"].base)


def shared_bytes(kwargs: dict[str, Any], out_bytes: int, *, tensor_memory: bool) -> int:
    """Return how much shared memory a config of the Gluon body takes, with elements of C of that size."""
    rows, width = kwargs["BLOCK_M"], kwargs["BLOCK_N"] + kwargs["EXTRA_N"]
    ring = kwargs["NUM_BUFFERS"] * (rows + width) * kwargs["BLOCK_K"] * 2
    storers = 2 if kwargs["VARIANT"] == "pingpong" and not tensor_memory else 1  # of all rows
    return int(
        ring + storers * kwargs["STORE_BUFFERS"] * rows * kwargs["STORE_N"] * out_bytes + BARRIER_BYTES
    )


def deepest_ring(block_m: int, width: int, *, store_bytes: int) -> int:
    """Return how many k blocks of 64 fit the ring: the more, the longer a wait for L2 that stays hidden."""
    return (SHARED_BYTES - BARRIER_BYTES - store_bytes) // ((block_m + width) * 64 * 2)


def accumulator_registers(config: triton.Config) -> int:
    """Return how many registers of each thread the accumulator takes on Hopper."""
    width = config.kwargs["BLOCK_N"] + config.kwargs["EXTRA_N"]
    return int(config.kwargs["BLOCK_M"] * width // (32 * config.num_warps))


NAMES = (*VARIANTS, *PARTS)  # the kernel's argument `wanted` is an index


def gluon_candidate(
    variant: str,
    blocks: tuple[int, int, int],
    buffers: int,
    *,
    warps: int,
    store: tuple[int, int],
    extra_n: int = 0,
    group_m: int = 8,
    joined: bool = False,
    swap_ab: bool | None = None,
) -> triton.Config:
    """Return a config; `store` is how many columns a store has, and how many buffers there are for them.

    swap_ab: of `gemm`; None for kernels that swap no operands.
    """
    kwargs: dict[str, Any] = {
        "VARIANT": variant,
        "BLOCK_M": blocks[0],
        "BLOCK_N": blocks[1],
        "EXTRA_N": extra_n,
        "BLOCK_K": blocks[2],
        "NUM_BUFFERS": buffers,
        "STORE_N": store[0],
        "STORE_BUFFERS": store[1],
        "GROUP_M": group_m,
        "JOINED": joined,
    }
    if swap_ab is not None:
        kwargs["SWAP_AB"] = swap_ab
    return triton.Config(kwargs, num_warps=warps, num_stages=1, pre_hook=set_blocks)


def any_width(variant: str, block_m: int, width: int) -> dict[str, Any]:
    """Return arguments of `gluon_candidate`: tiles so wide, a multiple of 8, and a ring as deep as fits."""
    block_n, extra_n = in_boxes(width)
    storers = 2 if variant == "pingpong" else 1  # of all rows
    return {
        "variant": variant,
        "blocks": (block_m, block_n, 64),
        "buffers": deepest_ring(block_m, width, store_bytes=storers * block_m * 64 * 2),
        "warps": 4 if variant == "pingpong" or block_m == 64 else 8,
        "store": (64, 1),
        "extra_n": extra_n,
        "joined": True,
    }


_candidate = functools.partial(gluon_candidate, swap_ab=False)
GLUON_CANDIDATES = [
    # A tuner's first run takes the first on Blackwell, on Hopper the one with the best estimate.
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1)),
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1), group_m=16),
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 2)),
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 1)),  # with results in float32
    _candidate("cooperative", (128, 256, 64), 3, warps=8, store=(128, 2)),
    _candidate("cooperative", (256, 128, 64), 4, warps=8, store=(64, 1)),
    # The fewest rows loaded for each product, which counts where rows begin between cache lines.
    _candidate("cooperative", (256, 128, 64), 3, warps=8, store=(64, 1), extra_n=64),
    _candidate("cooperative", (256, 128, 64), 4, warps=8, store=(32, 1), extra_n=32),
    _candidate("cooperative", (128, 128, 64), 5, warps=8, store=(32, 5), extra_n=32),
    _candidate("cooperative", (128, 128, 64), 5, warps=8, store=(16, 9), extra_n=16),
    _candidate("cooperative", (128, 128, 64), 6, warps=8, store=(64, 1)),
    _candidate("cooperative", (128, 256, 64), 4, warps=4, store=(64, 1)),  # Blackwell
    # Small tiles, for as many SMs as possible, with deep rings: few rows, few columns.
    _candidate("cooperative", (128, 64, 64), 8, warps=8, store=(64, 1)),
    _candidate("cooperative", (64, 128, 64), 8, warps=4, store=(64, 2)),
    _candidate("cooperative", (64, 128, 64), 6, warps=4, store=(64, 3), extra_n=64),
    _candidate("cooperative", (64, 64, 128), 6, warps=4, store=(64, 1)),
    _candidate("pingpong", (128, 128, 64), 5, warps=4, store=(64, 2)),
    _candidate("pingpong", (128, 128, 64), 5, warps=4, store=(64, 1), group_m=16),
    _candidate("pingpong", (128, 128, 128), 3, warps=4, store=(64, 1)),
    _candidate("pingpong", (128, 128, 64), 4, warps=4, store=(64, 1), extra_n=64),
    _candidate("pingpong", (64, 256, 64), 5, warps=4, store=(64, 1)),
    _candidate("pingpong", (64, 128, 64), 6, warps=4, store=(64, 1)),
    _candidate("persistent_pipelined", (128, 256, 64), 4, warps=8, store=(128, 1)),
    _candidate("persistent_pipelined", (128, 256, 64), 4, warps=8, store=(64, 1)),
    _candidate("persistent_pipelined", (128, 128, 64), 5, warps=4, store=(64, 1)),
    _candidate("persistent_pipelined", (64, 128, 64), 6, warps=4, store=(64, 1)),
    # Asked for by their names alone, see `pruning.NEVER_BEST`.
    _candidate("persistent", (128, 256, 64), 4, warps=8, store=(64, 1)),
    _candidate("persistent", (128, 128, 64), 5, warps=4, store=(64, 1)),
    _candidate("pipelined", (128, 256, 64), 4, warps=8, store=(64, 1)),
    _candidate("pipelined", (128, 128, 64), 5, warps=8, store=(32, 5), extra_n=32),
    _candidate("pipelined", (128, 128, 64), 3, warps=4, store=(64, 1)),  # two programs on an SM
    _candidate("pipelined", (64, 128, 64), 4, warps=4, store=(64, 1)),
    _candidate("pipelined", (64, 64, 128), 4, warps=4, store=(64, 1)),
]

if HAS_INLINE_PTX:
    GLUON_CANDIDATES += [
        # Widths that a tensor cannot have: as many tiles as there are SMs, or a little less than a multiple.
        # Swapped, a tile's rows are columns of C: where its columns divide C's rows better.
        gluon_candidate(**any_width(variant, block_m, width), swap_ab=swap_ab)
        for variant, block_m, swap_ab in (
            *(("cooperative", 64, False), ("cooperative", 128, False), ("pingpong", 128, False)),
            *(("cooperative", 64, True), ("pingpong", 128, True)),
        )
        for width in WIDTHS
        if variant != "pingpong" or width <= WIDEST_OF_PINGPONG
    ]


def _plain_config(blocks: tuple[int, int, int], group_m: int, *, warps: int, stages: int) -> triton.Config:
    kwargs = {"BLOCK_M": blocks[0], "BLOCK_N": blocks[1], "BLOCK_K": blocks[2], "GROUP_M": group_m}
    return triton.Config(kwargs, num_warps=warps, num_stages=stages)


PLAIN_GPU_CANDIDATES = [
    _plain_config((128, 256, 64), 8, warps=8, stages=3),
    _plain_config((256, 128, 64), 8, warps=8, stages=2),
    _plain_config((128, 128, 64), 8, warps=8, stages=2),
    _plain_config((128, 128, 64), 8, warps=4, stages=3),
    _plain_config((128, 128, 32), 8, warps=4, stages=3),
    _plain_config((64, 128, 64), 8, warps=4, stages=3),
    _plain_config((64, 128, 64), 8, warps=8, stages=2),
    _plain_config((64, 64, 64), 8, warps=4, stages=2),
    _plain_config((32, 64, 64), 8, warps=4, stages=2),
]

# Small, so that a few dozen rows are several tiles, and large, so that few tiles are many rows.
PLAIN_CPU_CANDIDATES = [
    _plain_config((32, 32, 32), 2, warps=4, stages=1),
    _plain_config((16, 64, 32), 3, warps=4, stages=1),
    _plain_config((128, 128, 128), 2, warps=4, stages=1),
]

PLAIN_CANDIDATES = PLAIN_CPU_CANDIDATES if INTERPRETED else PLAIN_GPU_CANDIDATES


@functools.lru_cache(maxsize=4096)
def class_of_rows(rows: int) -> int:
    """Return the largest number of rows that is tuned as this one is."""
    step = STEP
    if rows > FINE_UNTIL:
        step = (1 << (rows - 1).bit_length() - 1) // CLASSES_A_DOUBLING
    return -(-rows // step) * step


def class_of_chunk(rows: int, configs: list[triton.Config]) -> int:
    """Return the class of a chunk's rows, cut so that a tile is higher than all of a class or than none."""
    too_high = {config.kwargs["BLOCK_M"] for config in configs} - set(range(rows + 1))
    return min([class_of_rows(rows), *(height - 1 for height in too_high)])
