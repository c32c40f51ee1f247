"""How much of each matrix one TMA operation of the Gluon body moves, under a config.

With SWAP_AB tiles are those of the transposed product, C.T = B.T @ A.T: their rows are B's, their columns
A's, and what is stored has a tile's columns as rows. What is said of rows and columns elsewhere is of tiles.
"""

from __future__ import annotations

from typing import Any

import triton

from ..matrices import Block, set_block, set_matrix
from .any_width import box_of

ROWS, COLUMNS, NEITHER = (1, 0), (0, 1), (0, 0)  # what two CTAs halve, see `Block`
FEWEST_ROWS = 8  # of a block in shared memory: what its swizzle repeats after


def blocks_of(args: dict[str, Any]) -> dict[str, Block]:
    """Return the block of each descriptor of the Gluon body; args: a config's, and those of a launch.

    A kernel without a choice of layouts takes A by rows, [M, K], in tiles that end within A, and a weight,
    [N, K]. Without sizes no matrix is smaller than a block.
    """
    if args.get("SWAP_AB"):
        blocks = blocks_of({**swapped(args), "SWAP_AB": False})
        rows, columns, halves = blocks["c_desc"]
        by_columns = Block(columns, rows, (COLUMNS,) * len(halves))
        return blocks | {"a_desc": blocks["b_desc"], "b_desc": blocks["a_desc"], "c_desc": by_columns}
    trans_a, trans_b = args.get("TRANS_A", False), args.get("TRANS_B", True)
    block_m, block_n, block_k = args["BLOCK_M"], args["BLOCK_N"], args["BLOCK_K"]
    extra_n, ctas = args["EXTRA_N"], args.get("CTAS", 1)
    rows = block_m // args.get("TEAMS", 1)
    columns = args.get("N", block_n + extra_n)
    whole = "TRANS_A" not in args or ctas > 1 or rows < block_m
    a_rows = rows if whole else rows_to_load(block_m, args.get("M", block_m))
    if args.get("JOINED"):
        b_rows, further_n = box_of(block_n), box_of(extra_n or block_n)
    else:
        b_rows = rows_to_load(block_n, columns)
        further_n = rows_to_load(extra_n, columns - block_n) if extra_n else b_rows

    def divided(rows: int, columns: int, halved: tuple[int, int]) -> Block:
        return Block(rows, columns, (halved,) * (ctas // 2))

    return {
        "a_desc": divided(block_k, block_m, COLUMNS) if trans_a else divided(a_rows, block_k, ROWS),
        "b_desc": divided(b_rows, block_k, NEITHER) if trans_b else divided(block_k, block_n, NEITHER),
        "extra_desc": (
            divided(further_n, block_k, NEITHER) if trans_b else divided(block_k, extra_n or block_n, NEITHER)
        ),
        "c_desc": divided(rows, args["STORE_N"], ROWS),
    }


def swapped(args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the transposed product, C.T = B.T @ A.T: whose tiles those of SWAP_AB are."""
    names = {"M": "N", "N": "M", "a_alignment": "b_alignment", "b_alignment": "a_alignment"}
    return {name: args[names.get(name, name)] for name in args}


def as_tiled(kwargs: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the product into whose rows and columns a config's tiles divide a call."""
    return swapped(args) if kwargs.get("SWAP_AB") else args


def count_tiles(kwargs: dict[str, Any], args: dict[str, Any]) -> int:
    """Return how many tiles a call has under a config."""
    sizes, width = as_tiled(kwargs, args), kwargs["BLOCK_N"] + kwargs["EXTRA_N"]
    return int(triton.cdiv(sizes["M"], kwargs["BLOCK_M"]) * triton.cdiv(sizes["N"], width))


def rows_of_a_cta(kwargs: dict[str, Any]) -> int:
    """Return how many rows of a tile a CTA has."""
    return int(kwargs["BLOCK_M"] // kwargs.get("CTAS", 1))  # kernels that know no clusters have no CTAS


def rows_to_load(block: int, rows: int) -> int:
    """Return how many rows to load of a block of which `rows` are there: a power of two, few beyond."""
    return min(block, max(triton.next_power_of_2(max(rows, 1)), FEWEST_ROWS))


def set_blocks(args: dict[str, Any]) -> None:
    """Give the descriptors of a launch the blocks of the config that is about to run: its `pre_hook`."""
    for name, block in blocks_of(args).items():
        set_block(args[name], block)
    if "SWAP_AB" in args:
        set_matrix(args["extra_desc"], args["a_desc" if args["SWAP_AB"] else "b_desc"].base)
