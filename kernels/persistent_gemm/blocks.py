"""How much of each matrix one TMA operation of the Gluon body moves, under a config."""

from __future__ import annotations

from typing import Any

from ..matrices import set_block
from .estimate import multiply_clocks

FEWEST_ROWS = 8  # of a piece: what the swizzle of shared memory repeats after
# Clocks of an SM for 128 bytes of a row, and for those beyond the last row: of an H200, from docs/benchmarks.
ROW_CLOCKS, BEYOND_CLOCKS = 2, 5.5
WORTH = 1.1  # so much longer than the multiplication must loads be before pieces are worth their instructions


def blocks_of(args: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the block of each descriptor of the Gluon body; args: a config's, and those of a launch.

    A kernel without a choice of layouts takes A by rows, [M, K], in tiles that end within A, and a weight,
    [N, K]. Without sizes no matrix is smaller than a block.
    """
    trans_a, trans_b = args.get("TRANS_A", False), args.get("TRANS_B", True)
    block_m, block_n, block_k = args["BLOCK_M"], args["BLOCK_N"], args["BLOCK_K"]
    extra_n = args["EXTRA_N"]
    rows = args.get("M", block_m) if "TRANS_A" in args else block_m
    columns = args.get("N", block_n + extra_n)
    a_rows, b_rows, further_n = block_m, block_n, extra_n or block_n
    if _loads_last(args, min(rows, block_m), min(columns, block_n + extra_n)):
        a_rows = piece_rows(block_m, rows)
        b_rows = piece_rows(block_n, columns)
        further_n = piece_rows(extra_n, columns - block_n) if extra_n else b_rows
    return {
        "a_desc": (block_k, block_m) if trans_a else (a_rows, block_k),
        "b_desc": (b_rows, block_k) if trans_b else (block_k, block_n),
        "extra_desc": (further_n, block_k) if trans_b else (block_k, extra_n or block_n),
        "c_desc": (block_m, args["STORE_N"]),
    }


def _loads_last(args: dict[str, Any], rows: int, columns: int) -> bool:
    """Return whether the loads of a tile that has so many rows and columns take longer than its products."""
    there = rows + columns
    beyond = args["BLOCK_M"] + args["BLOCK_N"] + args["EXTRA_N"] - there
    clocks = (there * ROW_CLOCKS + beyond * BEYOND_CLOCKS) * args["BLOCK_K"] / 64
    return bool(beyond > 0 and clocks > WORTH * multiply_clocks(args))


def piece_rows(block: int, rows: int) -> int:
    """Return how many rows one load brings, of a block of which `rows` are there.

    The fewest pieces are taken for which no more than an eighth of the block is loaded from beyond.
    """
    if rows <= 0:
        return max(block // 2, FEWEST_ROWS)  # what comes in one piece is never left out
    piece = block
    while rows < block and piece > FEWEST_ROWS and -rows % piece > block // 8:
        piece //= 2
    return piece


def set_blocks(args: dict[str, Any]) -> None:
    """Give the descriptors of a launch the blocks of the config that is about to run: its `pre_hook`."""
    for name, block in blocks_of(args).items():
        set_block(args[name], block)
