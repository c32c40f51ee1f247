"""How much of each matrix one TMA operation of the Gluon body moves, under a config."""

from __future__ import annotations

from typing import Any

import triton

from ..matrices import set_block

FEWEST_ROWS = 8  # of a block in shared memory: what its swizzle repeats after


def blocks_of(args: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the block of each descriptor of the Gluon body; args: a config's, and those of a launch.

    A kernel without a choice of layouts takes A by rows, [M, K], in tiles that end within A, and a weight,
    [N, K]. Without sizes no matrix is smaller than a block.
    """
    trans_a, trans_b = args.get("TRANS_A", False), args.get("TRANS_B", True)
    block_m, block_n, block_k = args["BLOCK_M"], args["BLOCK_N"], args["BLOCK_K"]
    extra_n = args["EXTRA_N"]
    columns = args.get("N", block_n + extra_n)
    a_rows = rows_to_load(block_m, args.get("M", block_m)) if "TRANS_A" in args else block_m
    b_rows = rows_to_load(block_n, columns)
    further_n = rows_to_load(extra_n, columns - block_n) if extra_n else b_rows
    return {
        "a_desc": (block_k, block_m) if trans_a else (a_rows, block_k),
        "b_desc": (b_rows, block_k) if trans_b else (block_k, block_n),
        "extra_desc": (further_n, block_k) if trans_b else (block_k, extra_n or block_n),
        "c_desc": (block_m, args["STORE_N"]),
    }


def rows_to_load(block: int, rows: int) -> int:
    """Return how many rows to load of a block of which `rows` are there: a power of two, few beyond."""
    return min(block, max(triton.next_power_of_2(max(rows, 1)), FEWEST_ROWS))


def set_blocks(args: dict[str, Any]) -> None:
    """Give the descriptors of a launch the blocks of the config that is about to run: its `pre_hook`."""
    for name, block in blocks_of(args).items():
        set_block(args[name], block)
