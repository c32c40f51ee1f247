"""All-gather + GEMM: `AllGatherGemm` and its consumers. May import `exchange`, `gemm` and `symm`."""

from __future__ import annotations

from ..exchange.operation import PeerTimeout
from .operation import AllGatherGemm

__all__ = ["AllGatherGemm", "PeerTimeout"]
