"""All-gather + GEMM: `AllGatherGemm` and its consumers. May import `exchange`, `gemm` and `symm`."""

from __future__ import annotations

from ..agreement.errors import PeerTimeout
from ..epilogues import interleave_gate_up, split_gate_up
from .operation import AllGatherGemm

__all__ = ["AllGatherGemm", "PeerTimeout", "interleave_gate_up", "split_gate_up"]
