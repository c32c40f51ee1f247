"""The configs among which `MoEReduceScatter` is tuned."""

from __future__ import annotations

from ..configs import INTERPRETED
from ..moe.candidates import CPU_TILES, GPU_TILES, prune

__all__ = ["CANDIDATES", "GPU_CANDIDATES", "prune"]

GPU_CANDIDATES = GPU_TILES
CANDIDATES = CPU_TILES if INTERPRETED else GPU_CANDIDATES
