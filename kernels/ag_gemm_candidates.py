"""The configs among which `AllGatherGemm` is tuned, and which of them a call can use at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)


def candidate(
    blocks: tuple[int, int, int], group_m: int, *, warps: int, stages: int, tma: bool, subtile: bool = False
) -> triton.Config:
    """Return the config of a GEMM with these tiles; `subtile`: its epilogue stores half a tile at a time."""
    block_m, block_n, block_k = blocks
    kwargs = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": group_m,
        "EPILOGUE_SUBTILE": subtile,  # store half a tile at a time: half the shared memory for it
        "TMA": tma,
    }
    return triton.Config(kwargs, num_warps=warps, num_stages=stages)


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

# Small, so that a few dozen rows are several tiles.
CPU_CANDIDATES = [
    candidate((16, 16, 16), 2, warps=4, stages=1, tma=False),
    candidate((32, 16, 32), 4, warps=4, stages=1, tma=True, subtile=True),
    candidate((32, 32, 32), 1, warps=4, stages=1, tma=False),
    candidate((64, 32, 64), 8, warps=4, stages=1, tma=True),
]

CANDIDATES = CPU_CANDIDATES if INTERPRETED else GPU_CANDIDATES


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Return the candidates that this call's addresses, shape and device allow; never none.

    It looks at what all ranks share, save N, so ranks with equal weights keep equal candidates.
    """
    args = {**named_args, **kwargs}
    rows = args["M"] // args["WORLD"]
    usable = [config for config in configs if args["TMA_LEGAL"] or not config.kwargs["TMA"]]
    usable = usable or configs  # without TMA_LEGAL the kernel uses pointers whatever the config says
    if not INTERPRETED:
        limit = _shared_memory_bytes()
        itemsize = args["a_ptr"].element_size()
        usable = _some([c for c in usable if _pipeline_bytes(c, itemsize) <= limit], usable)
    smallest_m = min(config.kwargs["BLOCK_M"] for config in usable)
    smallest_n = min(config.kwargs["BLOCK_N"] for config in usable)
    # A tile more than twice as large as the matrix only adds work.
    most_m = max(smallest_m, triton.next_power_of_2(rows))
    most_n = max(smallest_n, triton.next_power_of_2(args["N"]))
    fitting = [c for c in usable if c.kwargs["BLOCK_M"] <= most_m and c.kwargs["BLOCK_N"] <= most_n]
    return _some(fitting, usable)


def _some(configs: list[triton.Config], otherwise: list[triton.Config]) -> list[triton.Config]:
    return configs or otherwise


def _shared_memory_bytes() -> int:
    device = torch.cuda.current_device()
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


def _pipeline_bytes(config: triton.Config, itemsize: int) -> int:
    """Return what the tiles in flight take; the epilogue's share differs between Triton's versions."""
    kwargs = config.kwargs
    stages = config.num_stages - 1 if torch.version.hip else config.num_stages
    return stages * (kwargs["BLOCK_M"] + kwargs["BLOCK_N"]) * kwargs["BLOCK_K"] * itemsize


def _time_once(kernel_call: Callable[[], Any], quantiles: tuple[float, ...]) -> list[float]:
    """Return milliseconds of one call by the wall clock, for each quantile."""
    started = time.perf_counter()
    kernel_call()
    return [1e3 * (time.perf_counter() - started)] * len(quantiles)


# Triton's own benchmark needs a GPU, also where the kernel is interpreted.
do_bench = _time_once if INTERPRETED else None
