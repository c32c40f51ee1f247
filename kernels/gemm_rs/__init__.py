"""GEMM + reduce-scatter: `GemmReduceScatter`, its two sides and the words between them."""

from __future__ import annotations

from ..exchange.operation import PeerTimeout
from .operation import GemmReduceScatter

__all__ = ["GemmReduceScatter", "PeerTimeout"]
