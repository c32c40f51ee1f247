"""The way to a launch of the GEMM: by the tuner at first, then the settled one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ..launch import SettledLaunches
from .kernel import gemm_reduce_scatter


class Held(NamedTuple):
    """The tensors of an operation that no call changes, in the order of the kernel's parameters."""

    partial: torch.Tensor
    staged: torch.Tensor
    words: torch.Tensor
    counts: torch.Tensor
    errors: torch.Tensor


class Shape(NamedTuple):
    """What the choice of a config, the compiled kernel and its grid depend on, and the kernel's arguments."""

    m: int
    n: int
    k: int
    capacity: int
    stride_am: int
    stride_bn: int
    stride_cm: int
    world_size: int
    chunks: int  # of one launch
    programs: int
    dtype: torch.dtype
    device: torch.device
    aligned: tuple[bool, bool, bool]  # to 16 bytes, which the compiler makes use of: a, weight and out
    held_aligned: tuple[bool, ...]
    tma_legal: bool
    upcasts: bool

    def sizes(self) -> dict[str, int]:
        return {"M": self.m, "N": self.n, "K": self.k}

    def constants(self) -> dict[str, Any]:
        return {"WORLD": self.world_size, "TMA_LEGAL": self.tma_legal, "UPCAST": self.upcasts}

    def grid(self, meta: dict[str, Any]) -> tuple[int, int, int]:
        rows = triton.cdiv(self.m // self.world_size, meta["BLOCK_M"])
        return min(self.programs, self.chunks * rows * triton.cdiv(self.n, meta["BLOCK_N"])), 1, 1


_SETTLED: SettledLaunches[Shape] = SettledLaunches(gemm_reduce_scatter, operation="GemmReduceScatter")


class ProductLauncher:
    """Launches `gemm_reduce_scatter` for one operation, of which it is told what does not change."""

    def __init__(
        self,
        held: Held,
        *,
        capacity: int,
        rank: int,
        world_size: int,
        programs: int,
        has_tma: bool,
        upcasts: bool,
    ) -> None:
        self._held, self._held_aligned = held, tuple(tensor.data_ptr() % 16 == 0 for tensor in held)
        self._capacity, self._rank, self._world_size = capacity, rank, world_size
        self._programs, self._has_tma, self._upcasts = programs, has_tma, upcasts

    def launch(
        self,
        a: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        patience_ticks: int,
        step: int | None = None,
    ) -> None:
        """Enqueue the product of one call on the current stream; of one chunk alone, that of rank + 1 + step.

        The own chunk is the last one, and the only one that waits for what the peers push.
        """
        first, chunks = (0, self._world_size) if step is None else (step, 1)
        m, k = a.shape
        stride_am, stride_bn = a.stride(0), weight.stride(0)
        aligned = (a.data_ptr() % 16 == 0, weight.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0)
        addressable = (stride_am | stride_bn) * a.element_size() % 16 == 0
        shape = Shape(
            m,
            weight.shape[0],
            k,
            self._capacity,
            stride_am,
            stride_bn,
            out.stride(0),
            self._world_size,
            chunks,
            self._programs,
            a.dtype,
            a.device,
            aligned,
            self._held_aligned,
            self._has_tma and addressable and aligned[0] and aligned[1],
            self._upcasts,
        )
        tensors = (a.detach(), weight.detach(), out, *self._held)
        scalars = (*shape[:7], first, chunks, self._rank, patience_ticks)
        _SETTLED.launch(shape, tensors, scalars)
