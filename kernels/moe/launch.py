"""The configs of the kernels over experts, and their grid."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..configs import INTERPRETED, candidate
from ..launches.settled import Grid
from ..tensors import begin_at_16_bytes, check_tensor, lies_by_columns, pitch_of

LOWEST_HEIGHT = 16  # of a tile; each following table of tiles is for twice as much

# A's rows are gathered by pointers, B's come by TMA where `tma` says so.
GPU_TILES = [
    # A tuner's first run takes the first: on Hopper, good for large shapes.
    candidate((128, 128, 64), 8, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 256, 64), 8, warps=8, stages=3, tma=True, subtile=True),
    candidate((128, 256, 64), 4, warps=8, stages=4, tma=True, subtile=True),
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
LONGEST_K = max(config.kwargs["BLOCK_K"] for config in (CPU_TILES if INTERPRETED else GPU_TILES))
HEIGHTS = (HIGHEST_HEIGHT // LOWEST_HEIGHT).bit_length()


def with_fields(config: triton.Config, **fields: Any) -> triton.Config:
    """Return the config with further fields, those of one of the kernels."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.Config({**config.kwargs, **fields}, **options, pre_hook=config.pre_hook)


def size_class(choices: int) -> int:
    """Return the power of two as which a number of choices is tuned: it changes from call to call."""
    return 1 << (max(choices, LOWEST_HEIGHT) - 1).bit_length()  # Triton's function takes 1 us


def grid_of_experts(choices: int, columns: int, experts: int, programs: int) -> Grid:
    """Return the grid: at most the programs or the tiles, and one program even without tiles, to wait."""

    def grid(meta: dict[str, Any]) -> tuple[int, int, int]:
        blocks = min(choices, triton.cdiv(choices, meta["BLOCK_M"]) + experts + 1)
        return max(1, min(programs, blocks * triton.cdiv(columns, meta["BLOCK_N"]))), 1, 1

    return grid


def counted(choices: int, programs: int) -> int:
    """Return the choices as far as grids depend on them: large calls with as many programs are alike."""
    return min(choices, programs * HIGHEST_HEIGHT)


def lies_for_tma(weight: torch.Tensor) -> bool:
    """Return whether TMA can load the weight [experts, N, K] as one matrix, expert below expert.

    By columns, a k block must not reach into the next expert, whose elements may be infinite.
    """
    experts, columns, inner = weight.shape
    strides = (weight.stride(0), pitch_of(weight))
    lines = inner if lies_by_columns(weight) else columns
    dense = experts == 1 or strides[0] == lines * strides[1]
    ends = experts == 1 or not lies_by_columns(weight) or inner % LONGEST_K == 0
    return dense and ends and begin_at_16_bytes(weight.element_size(), (weight.data_ptr(),), strides)


def check_experts(weight: torch.Tensor, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless `weight` is [E, N, columns], by rows or by columns, of this type and device."""
    needed = "[E, N, K] is needed, each at least 1"
    check_tensor("weight", weight, dtype, device, 3, needed, may_lie_by_columns=True)
    if 0 in weight.shape:
        raise ValueError(f"weight has shape {list(weight.shape)}; {needed}")
    if weight.shape[2] != columns:
        raise ValueError(f"weight has shape {list(weight.shape)}; its rows must have K={columns} elements")
