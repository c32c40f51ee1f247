"""The configs among which `AllGatherMoE` is tuned."""

from __future__ import annotations

from ..configs import INTERPRETED
from ..moe.candidates import CPU_TILES, GPU_TILES, ordered, prune

__all__ = ["CANDIDATES", "GPU_CANDIDATES", "prune"]

# Expert by expert is for short gathers: nearly all tiles wait for all of it, and each weight is read once.
GPU_CANDIDATES = [
    *(ordered(config, by_arrival=True) for config in GPU_TILES),
    *(ordered(config, by_arrival=False) for config in (*GPU_TILES[:4], *GPU_TILES[9:12])),
]
CPU_CANDIDATES = [
    ordered(config, by_arrival=by_arrival)
    for config, by_arrival in zip(CPU_TILES, (True, True, False, False), strict=True)
]

CANDIDATES = CPU_CANDIDATES if INTERPRETED else GPU_CANDIDATES
