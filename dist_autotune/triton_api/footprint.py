"""The share of the device that a launch holds: programs per SM, and the part of an SM that each needs."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

THOUSAND = 1000
RESERVED_BYTES = 1024  # of shared memory, for each block
REGISTERS = 65536  # of an SM, since Kepler
REGISTERS_STEP = 8  # a thread gets a multiple of so many
HALF = 0.5  # of an SM: a block that needs more lets no other of its kind beside it


@functools.cache
def device_properties(device: int) -> Any:
    """Return torch's properties of a device; None: torch has no devices, though Triton may have."""
    return torch.cuda.get_device_properties(device) if torch.cuda.is_available() else None


def share(programs: int, kernel: Any, device: Any) -> int:
    """Return the thousandths of a device's SMs that a launch of so many programs holds; 0: it is not known.

    Programs that wait for others to end hold nothing. An SM counts half if its programs take at most half
    of its shared memory, registers and threads.
    """
    metadata = getattr(kernel, "metadata", None)
    warps, shared = getattr(metadata, "num_warps", 0), getattr(metadata, "shared", 0)
    if not warps or programs <= 0 or device is None:
        return 0
    threads = 32 * warps
    registers = math.ceil((getattr(kernel, "n_regs", 0) or 0) / REGISTERS_STEP) * REGISTERS_STEP
    part: float = max(
        (shared + RESERVED_BYTES) / device.shared_memory_per_multiprocessor,
        registers * threads / getattr(device, "regs_per_multiprocessor", REGISTERS),
        threads / device.max_threads_per_multi_processor,
    )
    blocks = programs * max(getattr(metadata, "num_ctas", 1) or 1, 1)
    count: int = device.multi_processor_count
    resident = min(blocks, count * max(int(1 / part), 1))
    on_each = min(resident / min(resident, count) * part, 1.0)
    held = min(resident, count) / count * (HALF if on_each <= HALF else 1.0)
    return max(round(THOUSAND * held), 1)


def fill(programs: int, processors: int) -> float:
    """Return how much of the SMs' time programs of equal length fill, one on each SM at a time."""
    return programs / (math.ceil(programs / processors) * processors)


class RecordedGrid:
    """The grid of a launch; it remembers how many programs it had."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self.programs = 0
        if not callable(grid):
            self.programs = product(grid)

    def __call__(self, meta: Any) -> Any:
        found = self._grid(meta)
        self.programs = product(found)
        return found


def product(grid: Any) -> int:
    """Return the number of programs; 0: not a grid of integers."""
    try:
        return math.prod(int(size) for size in grid) if not isinstance(grid, int) else grid
    except (TypeError, ValueError):
        return 0
