"""The configs among which the kernel in plain Triton is tuned, and which of them a call can use at all."""

from __future__ import annotations

from typing import Any

import triton

from ..configs import (
    CPU_CANDIDATES,
    INTERPRETED,
    candidate,
    not_too_large,
    pipeline_bytes,
    shared_memory_bytes,
)

__all__ = ["CANDIDATES", "CPU_CANDIDATES", "GPU_CANDIDATES", "prune"]

GPU_CANDIDATES = [
    # The first is what a tuner's first run takes: on Hopper, good for large shapes.
    candidate((128, 256, 64), 8, warps=8, stages=3, tma=True),
    candidate((128, 256, 64), 8, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 256, 64), 4, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 256, 64), 16, warps=8, stages=4, tma=True, subtile=True),
    candidate((256, 128, 64), 8, warps=8, stages=3, tma=True),
    candidate((256, 128, 64), 8, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 128, 64), 8, warps=4, stages=4, tma=True),
    candidate((128, 128, 64), 8, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 128, 128), 8, warps=8, stages=3, tma=True),
    candidate((64, 256, 64), 8, warps=4, stages=4, tma=True),
    candidate((64, 128, 64), 8, warps=4, stages=4, tma=True),
    candidate((64, 128, 128), 8, warps=4, stages=3, tma=True),
    candidate((64, 64, 128), 8, warps=4, stages=3, tma=True),
    # Plain pointers: for rows that TMA cannot address and for devices without it.
    candidate((128, 256, 64), 8, warps=8, stages=3, tma=False),
    candidate((128, 128, 64), 8, warps=4, stages=3, tma=False),
    candidate((128, 128, 64), 8, warps=8, stages=2, tma=False),
    candidate((128, 128, 32), 8, warps=4, stages=3, tma=False),
    candidate((64, 128, 64), 8, warps=4, stages=3, tma=False),
    candidate((64, 64, 64), 8, warps=4, stages=2, tma=False),
]

CANDIDATES = CPU_CANDIDATES if INTERPRETED else GPU_CANDIDATES


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Return the candidates that this call's addresses, shape and device allow; never none.

    It looks at what all ranks share, save N, so ranks with equal weights keep equal candidates.
    """
    args = {**named_args, **kwargs}
    usable = [config for config in configs if args["TMA_LEGAL"] or not config.kwargs["TMA"]]
    usable = usable or configs  # without TMA_LEGAL the kernel uses pointers whatever the config says
    if not INTERPRETED:
        limit, itemsize = shared_memory_bytes(), args["a_ptr"].element_size()
        usable = [config for config in usable if pipeline_bytes(config, itemsize) <= limit] or usable
    return not_too_large(usable, BLOCK_M=args["M"] // args["WORLD"], BLOCK_N=args["N"])
