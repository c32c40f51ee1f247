"""All-gather + grouped GEMM over experts: `AllGatherMoE`."""

from __future__ import annotations

from .exchange.operation import PeerTimeout
from .moe.ag_moe import AllGatherMoE

__all__ = ["AllGatherMoE", "PeerTimeout"]
