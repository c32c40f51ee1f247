"""The configs among which `GemmReduceScatter` is tuned."""

from __future__ import annotations

from ..ag_gemm.candidates import prune
from ..configs import CPU_CANDIDATES, INTERPRETED, candidate

__all__ = ["CANDIDATES", "GPU_CANDIDATES", "prune"]

# The epilogue loads what the peers have sent beside the accumulator: large tiles do it in halves, or spill.
GPU_CANDIDATES = [
    # The first is what a tuner's first run takes: on Hopper, good for large shapes.
    candidate((128, 256, 64), 8, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 256, 64), 4, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 256, 64), 16, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 256, 64), 8, warps=8, stages=3, tma=True, subtile=True),
    candidate((256, 128, 64), 8, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 128, 64), 8, warps=4, stages=4, tma=True, subtile=True),
    candidate((128, 128, 64), 8, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 128, 128), 8, warps=8, stages=3, tma=True),
    candidate((64, 256, 64), 8, warps=4, stages=4, tma=True, subtile=True),
    candidate((64, 128, 64), 8, warps=4, stages=4, tma=True),
    candidate((64, 128, 128), 8, warps=4, stages=3, tma=True),
    candidate((64, 64, 128), 8, warps=4, stages=3, tma=True),
    # Plain pointers: for rows that TMA cannot address and for devices without it.
    candidate((128, 256, 64), 8, warps=8, stages=3, tma=False, subtile=True),
    candidate((128, 128, 64), 8, warps=8, stages=3, tma=False),
    candidate((128, 128, 64), 8, warps=8, stages=2, tma=False),
    candidate((128, 128, 32), 8, warps=8, stages=3, tma=False),
    candidate((64, 128, 64), 8, warps=4, stages=3, tma=False),
    candidate((64, 64, 64), 8, warps=4, stages=2, tma=False),
]

CANDIDATES = CPU_CANDIDATES if INTERPRETED else GPU_CANDIDATES
