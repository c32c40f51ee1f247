"""How much of each matrix one TMA operation of the Gluon body moves, under a config."""

from __future__ import annotations

from typing import Any

from ..matrices import set_block


def blocks_of(kwargs: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the block of each descriptor of the Gluon body, under a config and the layouts of a launch.

    A kernel without a choice of layouts takes A by rows, [M, K], and a weight, [N, K].
    """
    trans_a, trans_b = kwargs.get("TRANS_A", False), kwargs.get("TRANS_B", True)
    block_m, block_n, block_k = kwargs["BLOCK_M"], kwargs["BLOCK_N"], kwargs["BLOCK_K"]
    further_n = kwargs["EXTRA_N"] or block_n
    return {
        "a_desc": (block_k, block_m) if trans_a else (block_m, block_k),
        "b_desc": (block_n, block_k) if trans_b else (block_k, block_n),
        "extra_desc": (further_n, block_k) if trans_b else (block_k, further_n),
        "c_desc": (block_m, kwargs["STORE_N"]),
    }


def set_blocks(args: dict[str, Any]) -> None:
    """Give the descriptors of a launch the blocks of the config that is about to run: its `pre_hook`."""
    for name, block in blocks_of(args).items():
        set_block(args[name], block)
