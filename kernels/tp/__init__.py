"""Tensor parallelism that trains: products with gradients, layers, a plan for whole models.

May import the rooms of the operations, and what they may import.
"""

from __future__ import annotations

from ..exchange.calls import check_calls
from .functions import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, sum_gradient
from .layers import ColumnParallelLinear, RowParallelLinear, SwiGLU
from .moe_layer import MoE
from .parallelize import ColumnParallel, RowParallel, SequenceParallel, parallelize
from .registry import meet_first, release, reserve

__all__ = [
    "ColumnParallel",
    "ColumnParallelLinear",
    "MoE",
    "RowParallel",
    "RowParallelLinear",
    "SequenceParallel",
    "SwiGLU",
    "all_gather_matmul",
    "check_calls",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "meet_first",
    "parallelize",
    "release",
    "reserve",
    "sum_gradient",
]
