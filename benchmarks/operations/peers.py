"""Other libraries: torch's collectives and fused operations, and QuACK's kernels where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from benchmarks.common.ranks import ON_GPU, Ranks, Unsupported

Call: TypeAlias = Callable[[], torch.Tensor]
QUACK = "QuACK"
# Of its all-gather GEMM on Hopper: rows, columns, CTAs of a cluster, whether consumers take turns.
QUACK_TILES = ((128, 192, 2, True), (128, 256, 2, False), (256, 128, 2, False), (128, 128, 1, True))
TRIAL_CALLS = 10  # of each tile

# Old names warn in torch 2.13, whose new ones 2.11 does not have.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def fused_by_torch(name: str) -> tuple[Callable[..., Any], str]:
    """Return an operation of torch's symmetric memory, and the name of the group of all ranks."""
    if not ON_GPU:
        raise Unsupported("torch's symmetric memory needs GPUs")
    import torch.distributed._symmetric_memory  # registers the operation

    group = dist.group.WORLD
    assert group is not None
    return getattr(torch.ops.symm_mem, name), group.group_name


def quack_gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Call:
    """Return QuACK's product of a [M, K] and b [K, N], which its first call tunes on this rank alone."""
    gemm = _quack("gemm_interface").gemm

    def call() -> torch.Tensor:
        gemm(a, b, out=out)
        return out

    return call


def quack_all_gather_gemm(
    a_shard: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, ranks: Ranks
) -> Call:
    """Return QuACK's all-gather of a_shard [M / W, K] and product with weight [N, K].

    The tile is that with the least median of the slowest rank.
    """
    tiles = [tile for tile in QUACK_TILES if a_shard.shape[0] % (tile[0] * tile[2]) == 0]
    gemm, runners = _quack("gemm").gemm, _quack("distributed")
    if not tiles:
        raise Unsupported(f"{QUACK}'s tiles do not divide the {a_shard.shape[0]} rows of a rank")
    runner = runners.AllGatherRunner(*a_shard.shape, a_shard.dtype)

    def call_of(tile_m: int, tile_n: int, cluster_m: int, pingpong: bool) -> Call:
        sizes = {"tile_M": tile_m, "tile_N": tile_n, "cluster_M": cluster_m, "cluster_N": 1}

        def call() -> torch.Tensor:
            with runner.gather(a_shard) as (rows, arguments):
                gemm(rows, weight, out, None, None, **sizes, pingpong=pingpong, ag_args=arguments)
            return out

        return call

    calls = [call_of(*tile) for tile in tiles]
    return min((_slowest_ms(call, ranks), place, call) for place, call in enumerate(calls))[2]


def _slowest_ms(call: Call, ranks: Ranks) -> float:
    times_ms = []
    for number in range(3 + TRIAL_CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if number >= 3:  # those before compile and warm up
            times_ms.append(begin.elapsed_time(end))
    return max(ranks.gather(statistics.median(times_ms)))


def _quack(module: str) -> ModuleType:
    if not ON_GPU:
        raise Unsupported(f"{QUACK} needs a GPU")
    if importlib.util.find_spec("quack") is None:
        raise Unsupported(f"{QUACK} is not installed: pip install quack-kernels")
    try:
        return importlib.import_module(f"quack.{module}")
    except ImportError as error:
        raise Unsupported(f"{QUACK} cannot be imported: {error}") from error
