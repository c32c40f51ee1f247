"""Grouped GEMM over experts + top-k combination + reduce-scatter: `MoEReduceScatter`."""

from __future__ import annotations

from .agreement.errors import PeerTimeout
from .moe.moe_rs import MoEReduceScatter

__all__ = ["MoEReduceScatter", "PeerTimeout"]
