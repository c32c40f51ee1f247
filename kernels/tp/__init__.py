"""Tensor parallelism that trains: products with gradients, layers, and a plan for whole models."""

from __future__ import annotations

from .functions import all_gather_matmul, matmul_reduce_scatter, sum_gradient
from .registry import release, reserve

__all__ = [
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "release",
    "reserve",
    "sum_gradient",
]
