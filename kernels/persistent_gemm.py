"""A matrix product by kernels that stay on the chip: `persistent_matmul`, its variants and their parts."""

from __future__ import annotations

from .epilogues import interleave_gate_up, split_gate_up
from .gemm.configs import PARTS, VARIANTS
from .gemm.operation import SCHEDULERS, persistent_matmul

__all__ = ["PARTS", "SCHEDULERS", "VARIANTS", "interleave_gate_up", "persistent_matmul", "split_gate_up"]
