"""The configs of the grouped GEMM on Hopper."""

from __future__ import annotations

from typing import Any

import triton

from ..gemm.configs import BARRIER_BYTES
from ..matrices import Block, set_block


def blocks_of(args: dict[str, Any]) -> dict[str, Block]:
    """Return the block of the descriptor; args: a config's, and those of a launch."""
    columns, inner = args["BLOCK_N"], args["BLOCK_K"]
    return {"b_desc": Block(inner, columns) if args["BY_COLUMNS"] else Block(columns, inner)}


def _set_block(args: dict[str, Any]) -> None:
    set_block(args["b_desc"], blocks_of(args)["b_desc"])


def grouped_candidate(
    variant: str,
    blocks: tuple[int, int, int],
    buffers: int,
    *,
    warps: int,
    store_n: int = 64,
    group_m: int = 8,
) -> triton.Config:
    """Return a config; `store_n` columns of a tile are turned and stored at a time."""
    kwargs = {
        "VARIANT": variant,
        "BLOCK_M": blocks[0],
        "BLOCK_N": blocks[1],
        "BLOCK_K": blocks[2],
        "NUM_BUFFERS": buffers,
        "STORE_N": store_n,
        "GROUP_M": group_m,
    }
    return triton.Config(kwargs, num_warps=warps, num_stages=1, pre_hook=_set_block)


GROUPED_TILES = [
    # The first is what a tuner's first run takes.
    grouped_candidate("cooperative", (128, 256, 64), 4, warps=8),
    grouped_candidate("cooperative", (128, 256, 64), 4, warps=8, group_m=4),
    grouped_candidate("cooperative", (128, 256, 64), 4, warps=8, group_m=16),
    grouped_candidate("pingpong", (128, 128, 64), 6, warps=4),
    grouped_candidate("pingpong", (128, 128, 64), 6, warps=4, group_m=16),
    grouped_candidate("cooperative", (128, 128, 64), 6, warps=8),
    grouped_candidate("pingpong", (64, 256, 64), 5, warps=4),
    grouped_candidate("pingpong", (64, 128, 64), 8, warps=4),
    grouped_candidate("cooperative", (64, 256, 64), 5, warps=4),
    grouped_candidate("cooperative", (64, 128, 64), 8, warps=4),
]


LOWEST_HEIGHT = min(config.kwargs["BLOCK_M"] for config in GROUPED_TILES)


def shared_bytes(config: triton.Config) -> int:
    """Return what a config takes in shared memory; elements have two bytes."""
    kwargs = config.kwargs
    operands = kwargs["NUM_BUFFERS"] * (kwargs["BLOCK_M"] + kwargs["BLOCK_N"]) * kwargs["BLOCK_K"] * 2
    turned_rows = 16 * config.num_warps * (2 if kwargs["VARIANT"] == "pingpong" else 1)
    return int(operands + turned_rows * kwargs["STORE_N"] * 2 + BARRIER_BYTES)
