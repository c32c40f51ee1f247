"""Grouped GEMM over experts + top-k combination + reduce-scatter: `MoEReduceScatter`."""

from __future__ import annotations

from .exchange.operation import PeerTimeout
from .moe.moe_rs import MoEReduceScatter

__all__ = ["MoEReduceScatter", "PeerTimeout"]
