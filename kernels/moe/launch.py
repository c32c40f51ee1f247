"""The way to a launch of a grouped GEMM: by the tuner at first, then the settled one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ..tensors import begin_at_16_bytes
from .candidates import HIGHEST_HEIGHT


class Shape(NamedTuple):
    """What the choice of a config, the compiled kernel and its grid depend on."""

    choices: int  # as far as the grid depends on them, see `counted`
    size_class: int
    n: int
    k: int
    experts: int
    strides: tuple[int, ...]  # those among the kernel's parameters
    world_size: int
    programs: int
    dtype: torch.dtype
    device: torch.device
    aligned: tuple[bool, ...]  # to 16 bytes, which the compiler makes use of: of each tensor
    tma_legal: bool
    upcasts: bool

    def sizes(self) -> dict[str, int]:
        return {"size_class": self.size_class, "N": self.n, "K": self.k, "experts": self.experts}

    def constants(self) -> dict[str, Any]:
        return {"WORLD": self.world_size, "TMA_LEGAL": self.tma_legal, "UPCAST": self.upcasts}

    def grid(self, meta: dict[str, Any]) -> tuple[int, int, int]:
        """Return how many programs run under a config: no more than SMs, nor than there may be tiles.

        There is one even without tiles: it waits for what the peers push in every call.
        """
        blocks = min(self.choices, triton.cdiv(self.choices, meta["BLOCK_M"]) + self.experts + 1)
        return max(1, min(self.programs, blocks * triton.cdiv(self.n, meta["BLOCK_N"]))), 1, 1


def counted(choices: int, programs: int) -> int:
    """Return the number of choices, or one with the same grids that is the same for all large calls.

    The number changes from call to call; from one full block for each program on, the grid is all programs.
    """
    return min(choices, programs * HIGHEST_HEIGHT)


def lies_for_tma(weight: torch.Tensor) -> bool:
    """Return whether TMA can load the weight [experts, N, K] as one matrix, expert below expert."""
    experts, columns, _ = weight.shape
    strides = (weight.stride(0), weight.stride(1))
    dense = experts == 1 or strides[0] == columns * strides[1]
    return dense and begin_at_16_bytes(weight.element_size(), (weight.data_ptr(),), strides)
