"""A matrix product by kernels that stay on the chip: `persistent_matmul`, its variants and their parts."""

from __future__ import annotations

from .gemm.configs import PARTS, VARIANTS
from .gemm.operation import SCHEDULERS, persistent_matmul

__all__ = ["PARTS", "SCHEDULERS", "VARIANTS", "persistent_matmul"]
