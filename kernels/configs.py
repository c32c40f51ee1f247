"""Candidates of all plain kernels: their form, pruning by device and size, and timing without a GPU."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)


def upcasts(dtype: torch.dtype) -> bool:
    """Return whether kernels multiply in float32 where operands are of that type: the interpreter errs."""
    return INTERPRETED and dtype in (torch.bfloat16, torch.float8_e4m3fn)


def candidate(
    blocks: tuple[int, int, int], group_m: int, *, warps: int, stages: int, tma: bool, subtile: bool = False
) -> triton.Config:
    """Return the config of a GEMM with these tiles; `subtile`: its epilogue stores half a tile at a time."""
    block_m, block_n, block_k = blocks
    kwargs = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": group_m,
        "EPILOGUE_SUBTILE": subtile,  # half the shared memory, or half the registers, for the epilogue
        "TMA": tma,
    }
    return triton.Config(kwargs, num_warps=warps, num_stages=stages)


# Of `AllGatherGemm` and `GemmReduceScatter`: picked by sessions in 8 and 20 contexts on H100 and H200; and
# the smallest tiles, for fewer rows than the records have. Large tiles are stored in halves: whole ones
# would spill beside the peers' sums.
GPU_CANDIDATES = [
    # A tuner's first run takes the first: on Hopper, good for large shapes.
    candidate((128, 256, 64), 8, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 256, 64), 4, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 256, 64), 16, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 256, 64), 8, warps=8, stages=3, tma=True, subtile=True),
    candidate((256, 128, 64), 8, warps=8, stages=4, tma=True, subtile=True),
    candidate((128, 128, 64), 8, warps=4, stages=4, tma=True, subtile=True),
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

# Small, so that a few dozen rows are several tiles.
CPU_CANDIDATES = [
    candidate((16, 16, 16), 2, warps=4, stages=1, tma=False),
    candidate((32, 16, 32), 4, warps=4, stages=1, tma=True, subtile=True),
    candidate((32, 32, 32), 1, warps=4, stages=1, tma=False),
    candidate((64, 32, 64), 8, warps=4, stages=1, tma=True),
]

CANDIDATES = CPU_CANDIDATES if INTERPRETED else GPU_CANDIDATES


def shared_memory_bytes() -> int:
    """Return how much shared memory one program may use on the current device."""
    driver = triton.runtime.driver.active
    return int(driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"])


@functools.lru_cache
def capability(device: torch.device) -> int:
    """Return the major compute capability of an NVIDIA GPU on which kernels run, else 0."""
    if device.type != "cuda" or INTERPRETED or torch.version.hip:
        return 0
    return int(torch.cuda.get_device_properties(device).major)


def fitting(configs: list[triton.Config], itemsize: int) -> list[triton.Config]:
    """Return the configs of plain kernels whose tiles in flight fit the device; all where none does.

    The epilogue's share is left out: it differs between Triton's versions.
    """
    if INTERPRETED:
        return configs
    limit, fits = shared_memory_bytes(), []
    for config in configs:
        stages = config.num_stages - 1 if torch.version.hip else config.num_stages
        sides = config.kwargs["BLOCK_M"] + config.kwargs["BLOCK_N"]
        if stages * sides * config.kwargs["BLOCK_K"] * itemsize <= limit:
            fits.append(config)
    return fits or configs


def not_too_large(configs: list[triton.Config], **sizes: int) -> list[triton.Config]:
    """Leave out tiles more than twice as large as the matrix, which only add work; never all configs.

    `sizes` gives the size of the matrix along the block that is named: `BLOCK_M=rows`.
    """
    for side, size in sizes.items():
        smallest = min((config.kwargs[side] for config in configs), default=0)
        most = max(smallest, triton.next_power_of_2(size))
        configs = [config for config in configs if config.kwargs[side] <= most]
    return configs


def prune_overlapped(
    configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any
) -> list[triton.Config]:
    """Return the candidates of a plain kernel that a call's addresses, shape and device allow; never none.

    It looks at facts that all ranks share, save N, so ranks with equal weights keep equal candidates.
    """
    args = {**named_args, **kwargs}
    usable = [config for config in configs if args["TMA_LEGAL"] or not config.kwargs["TMA"]]
    usable = usable or configs  # without TMA_LEGAL the kernel uses pointers whatever the config says
    rows = args["size_class"] if "size_class" in args else args["M"] // args["WORLD"]
    return not_too_large(fitting(usable, args["a_ptr"].element_size()), BLOCK_M=rows, BLOCK_N=args["N"])


def _time_once(kernel_call: Callable[[], Any], quantiles: tuple[float, ...]) -> list[float]:
    """Return milliseconds of one call by the wall clock, for each quantile."""
    started = time.perf_counter()
    kernel_call()
    return [1e3 * (time.perf_counter() - started)] * len(quantiles)


# Triton's own benchmark needs a GPU, also where the kernel is interpreted.
do_bench = _time_once if INTERPRETED else None


class TakeFirst(threading.local):
    """Times nothing, and so has Triton's own autotuner take the first config that is left.

    For a kernel that does not end alone, or not twice: its peers' part is enqueued after the timed launch.
    """

    _asked = 0

    def __call__(self, kernel_call: Callable[[], Any], quantiles: tuple[float, ...]) -> list[float]:
        self._asked += 1
        return [0.0] * len(quantiles)

    def configs_not_timed(self) -> int:
        """Return of how many configs this thread was asked for a time since it last called this."""
        asked, self._asked = self._asked, 0
        return asked


take_first = TakeFirst()
