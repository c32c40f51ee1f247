"""Grouped GEMM over experts + top-k combination + reduce-scatter: `MoEReduceScatter`."""

from __future__ import annotations

from ..operation import PeerTimeout
from .operation import MoEReduceScatter

__all__ = ["MoEReduceScatter", "PeerTimeout"]
