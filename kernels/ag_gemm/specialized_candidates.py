"""The configs among which the warp-specialised kernel is tuned, and which of them a call can use."""

from __future__ import annotations

from typing import Any

import triton

from ..configs import not_too_large, shared_memory_bytes
from ..persistent_gemm.candidates import gluon_candidate
from ..persistent_gemm.pruning import fits

CANDIDATES = [
    # The first is what a tuner's first run takes.
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1)),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1), group_m=16),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1), group_m=4),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 2)),
    gluon_candidate("cooperative", (256, 128, 64), 4, warps=8, store=(64, 1)),
    gluon_candidate("cooperative", (128, 128, 64), 5, warps=8, store=(64, 1), extra_n=64),
    gluon_candidate("cooperative", (128, 128, 64), 6, warps=8, store=(64, 1)),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=4, store=(64, 1)),  # Blackwell
    gluon_candidate("pingpong", (128, 128, 64), 5, warps=4, store=(64, 2)),
    gluon_candidate("pingpong", (128, 128, 64), 5, warps=4, store=(64, 1), group_m=16),
    gluon_candidate("pingpong", (128, 128, 64), 4, warps=4, store=(64, 1), extra_n=64),
    gluon_candidate("pingpong", (64, 256, 64), 5, warps=4, store=(64, 1)),
    gluon_candidate("pingpong", (64, 128, 64), 6, warps=4, store=(64, 1)),
    gluon_candidate("cooperative", (64, 128, 128), 4, warps=4, store=(64, 1)),  # few rows
]


def fewest_rows(*, tensor_memory: bool) -> int:
    """Return how many rows a chunk has at least: a tile must not be higher than a chunk."""
    heights = [config.kwargs["BLOCK_M"] for config in CANDIDATES]
    return 128 if tensor_memory else min(heights)


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Return the candidates that this call's shape and device allow.

    It looks at what all ranks share, save N, so ranks with equal weights keep equal candidates.
    """
    args = {**named_args, **kwargs}
    rows, limit = args["M"] // args["WORLD"], shared_memory_bytes()
    usable = [
        config
        for config in configs
        if config.kwargs["BLOCK_M"] <= rows and fits(config, 2, limit, tensor_memory=args["TENSOR_MEMORY"])
    ]
    return not_too_large(usable, BLOCK_N=args["N"], BLOCK_K=args["K"])
