"""GEMM + all-reduce: `GemmAllReduce` and its kernel. May import `gemm_rs`, `gemm`, `exchange` and `symm`."""

from __future__ import annotations

from ..agreement.errors import PeerTimeout
from .operation import GemmAllReduce

__all__ = ["GemmAllReduce", "PeerTimeout"]
