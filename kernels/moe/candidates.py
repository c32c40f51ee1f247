"""The configs among which the kernels over experts are tuned, and which of them a call can use at all."""

from __future__ import annotations

import triton

from ..configs import INTERPRETED, candidate

LOWEST_HEIGHT = 16  # of a tile; each following table of tiles is for twice as much

# A's rows are gathered by pointers, B's come by TMA where `tma` says so.
GPU_TILES = [
    # The first is what a tuner's first run takes: on Hopper, good for large shapes.
    candidate((128, 128, 64), 8, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 256, 64), 8, warps=8, stages=3, tma=True, subtile=True),
    candidate((128, 256, 64), 4, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 128, 64), 8, warps=8, stages=3, tma=True, subtile=True),
    candidate((128, 128, 64), 16, warps=8, stages=4, tma=True, subtile=True),
    candidate((64, 256, 64), 8, warps=8, stages=4, tma=True, subtile=True),
    candidate((64, 128, 64), 8, warps=4, stages=4, tma=True, subtile=True),
    candidate((64, 128, 128), 8, warps=4, stages=3, tma=True),
    candidate((64, 64, 128), 8, warps=4, stages=3, tma=True),
    # A few tokens for each expert: reading the weights is all there is to do.
    candidate((16, 128, 128), 1, warps=4, stages=4, tma=True),
    candidate((32, 128, 128), 1, warps=4, stages=4, tma=True),
    # Plain pointers: for rows that TMA cannot address and for devices without it.
    candidate((128, 128, 64), 8, warps=8, stages=3, tma=False, subtile=True),
    candidate((128, 128, 64), 8, warps=8, stages=2, tma=False, subtile=True),
    candidate((128, 128, 32), 8, warps=8, stages=3, tma=False, subtile=True),
    candidate((64, 128, 64), 8, warps=4, stages=3, tma=False),
    candidate((64, 64, 64), 8, warps=4, stages=2, tma=False),
    candidate((16, 64, 128), 1, warps=4, stages=3, tma=False),
]

# Small, so that a few dozen rows are several tiles.
CPU_TILES = [
    candidate((16, 16, 16), 2, warps=4, stages=1, tma=False),
    candidate((32, 16, 32), 4, warps=4, stages=1, tma=True, subtile=True),
    candidate((16, 32, 32), 1, warps=4, stages=1, tma=False, subtile=True),
    candidate((64, 32, 64), 8, warps=4, stages=1, tma=True),
]

HIGHEST_HEIGHT = max(config.kwargs["BLOCK_M"] for config in (CPU_TILES if INTERPRETED else GPU_TILES))
HEIGHTS = (HIGHEST_HEIGHT // LOWEST_HEIGHT).bit_length()


def ordered(config: triton.Config, *, by_arrival: bool) -> triton.Config:
    """Return the config with an order of tiles: as chunks arrive; or by expert, which overlaps little."""
    kwargs = {**config.kwargs, "BY_ARRIVAL": by_arrival}
    return triton.Config(kwargs, num_warps=config.num_warps, num_stages=config.num_stages)


def size_class(choices: int) -> int:
    """Return the power of two that a call's number of choices is tuned as: it changes from call to call."""
    return triton.next_power_of_2(max(choices, LOWEST_HEIGHT))
