"""GEMM + reduce-scatter: `GemmReduceScatter` and its kernel. May import `exchange` and `symm`."""

from __future__ import annotations

from ..agreement.errors import PeerTimeout
from .operation import GemmReduceScatter

__all__ = ["GemmReduceScatter", "PeerTimeout"]
