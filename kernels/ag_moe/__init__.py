"""All-gather + grouped GEMM over experts: `AllGatherMoE`."""

from __future__ import annotations

from ..operation import PeerTimeout
from .operation import AllGatherMoE

__all__ = ["AllGatherMoE", "PeerTimeout"]
