"""All-gather + GEMM: `AllGatherGemm`, its two sides and the words between them."""

from __future__ import annotations

from ..exchange.operation import PeerTimeout
from .operation import AllGatherGemm

__all__ = ["AllGatherGemm", "PeerTimeout"]
