"""All-gather + grouped GEMM over experts: `AllGatherMoE`."""

from __future__ import annotations

from .agreement.errors import PeerTimeout
from .moe.ag_moe import AllGatherMoE

__all__ = ["AllGatherMoE", "PeerTimeout"]
