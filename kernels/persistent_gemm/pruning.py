"""Which of the `candidates` a call of `persistent_matmul` can use, and which of those are worth a trial."""

from __future__ import annotations

from collections import Counter
from typing import Any

import triton

from ..compat import HAS_CLUSTERS_AND_PTX
from ..configs import INTERPRETED, not_too_large, pipeline_bytes, shared_memory_bytes
from ..tails import tail_share
from ..tiles import on_host
from .blocks import as_tiled, count_tiles
from .candidates import CUT_SCHEDULES, NAMES
from .estimate import estimated_clocks
from .footprint import accumulator_registers, most_accumulator_registers, shared_bytes

# By how much of K stream-K must shorten the last wave to be tried: what parts cost on an H200, rounded down.
LEAST_SAVED_K = 512
SAVED_K_FOR_A_PART = 8
# Of a call; those that the estimate puts behind are not tried. What has won so far is among them.
MOST_TRIALS = 54 if HAS_CLUSTERS_AND_PTX else 30
MOST_WIDTHS = 4  # of tiles that differ in nothing else, which the estimate tells apart: it puts winners first


def fits(config: triton.Config, out_bytes: int, limit_bytes: int, *, tensor_memory: bool) -> bool:
    """Return whether the config fits an SM."""
    kwargs = config.kwargs
    if shared_bytes(kwargs, out_bytes, tensor_memory=tensor_memory) > limit_bytes:
        return False
    if kwargs["STORE_BUFFERS"] == 0 and _stolen_is_too_small(kwargs, out_bytes):
        return False
    if tensor_memory:
        # 128 lanes of tensor memory; two accumulators, so ping-pong is nothing of its own.
        if kwargs["BLOCK_M"] != 128 or kwargs["EXTRA_N"] > 0 or kwargs["VARIANT"] == "pingpong":
            return False
        if config.num_ctas > 1 or kwargs.get("JOINED"):
            return False
        # ptxas spills the float32 pieces of 8 warps that do everything (Triton 3.6 and 3.9).
        return out_bytes == 2 or kwargs["VARIANT"] == "cooperative" or config.num_warps == 4
    return accumulator_registers(config) <= most_accumulator_registers(kwargs)


def _stolen_is_too_small(kwargs: dict[str, Any], out_bytes: int) -> bool:
    piece = kwargs["BLOCK_M"] * kwargs["STORE_N"] * out_bytes
    return bool(piece > kwargs["BLOCK_N"] * kwargs["BLOCK_K"] * 2)


def is_wanted(kwargs: dict[str, Any], wanted: str) -> bool:
    """Return whether a config belongs to one of VARIANTS or PARTS."""
    variant, steals = kwargs["VARIANT"], kwargs["STORE_BUFFERS"] == 0
    if wanted == "warp_specialized":
        return variant in ("cooperative", "pingpong")
    if wanted == "stream_k" or kwargs["STREAM_K"] > 0:  # neither cooperative nor ping-pong as PARTS
        return kwargs["STREAM_K"] > 0 and wanted in ("auto", "stream_k")
    if wanted in ("own_buffers", "stealing"):
        return variant == "persistent_pipelined" and steals == (wanted == "stealing")
    return wanted in ("auto", variant)


def cuts_the_last_wave(kwargs: dict[str, Any], args: dict[str, Any], programs: int) -> bool:
    """Return whether a config with STREAM_K makes the last wave enough shorter to be worth a trial."""
    if args["SCHEDULE"] not in CUT_SCHEDULES:
        return False
    tail = count_tiles(kwargs, args) % programs
    k_blocks = triton.cdiv(args["K"], kwargs["BLOCK_K"])
    share = on_host(tail_share)(tail, k_blocks, programs, kwargs["STREAM_K"])
    parts = triton.cdiv(tail * k_blocks, share) + tail - 1  # each stretch and each tile begins one
    saved_k = (k_blocks - share) * kwargs["BLOCK_K"]
    return bool(tail > 0 and saved_k >= max(LEAST_SAVED_K, parts * SAVED_K_FOR_A_PART))


def saves_tiles(kwargs: dict[str, Any], args: dict[str, Any]) -> bool:
    """Return whether swapped tiles are fewer than the same ones unswapped; True for unswapped ones."""
    if not kwargs["SWAP_AB"]:
        return True
    return count_tiles(kwargs, args) < count_tiles({**kwargs, "SWAP_AB": False}, args)


def no_wider_than_need_be(configs: list[triton.Config], args: dict[str, Any]) -> list[triton.Config]:
    """Leave out tiles of any width of which others that differ in it alone are as many, and narrower."""
    least: dict[tuple[Any, ...], int] = {}
    for config in configs:
        kind = _kind_and_tiles(config, args)
        least[kind] = min(_width(config), least.get(kind, _width(config)))
    return [
        config
        for config in configs
        if not config.kwargs["JOINED"] or _width(config) == least[_kind_and_tiles(config, args)]
    ]


def _kind(config: triton.Config) -> tuple[Any, ...]:
    """Return what tiles of any width have in common that differ in it alone."""
    names = ("JOINED", "VARIANT", "BLOCK_M", "CTAS", "SWAP_AB", "GROUP_M", "STORE_N")
    return tuple(config.kwargs[name] for name in names)


def _kind_and_tiles(config: triton.Config, args: dict[str, Any]) -> tuple[Any, ...]:
    return (*_kind(config), triton.cdiv(as_tiled(config.kwargs, args)["N"], _width(config)))


def _width(config: triton.Config) -> int:
    return int(config.kwargs["BLOCK_N"] + config.kwargs["EXTRA_N"])


def suits(kwargs: dict[str, Any], args: dict[str, Any]) -> bool:
    """Return whether a config can run with the call's layouts, schedule and number of programs."""
    if kwargs["JOINED"] and (args["TRANS_A"] or not args["TRANS_B"]):
        return False
    if kwargs["TEAMS"] > 1 and args["SCHEDULE"] == "dynamic":
        return False
    if kwargs["CTAS"] == 1:
        return True
    # With columns of A in memory two CTAs have not been run.
    return bool(not args["TRANS_A"] and args["SCHEDULE"] != "dynamic" and args["programs"] >= kwargs["CTAS"])


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Return the candidates of the Gluon body that this call can use."""
    args = {**named_args, **kwargs}
    out_bytes, limit = (4 if args["OUT"] == "fp32" else 2), shared_memory_bytes()
    wanted = NAMES[args["wanted"]]
    usable = [
        config
        for config in configs
        if is_wanted(config.kwargs, wanted)
        and (
            config.kwargs["STREAM_K"] == 0
            or wanted == "stream_k"
            or cuts_the_last_wave(config.kwargs, args, args["programs"])
        )
        and fits(config, out_bytes, limit, tensor_memory=args["TENSOR_MEMORY"])
        and suits(config.kwargs, args)
    ]
    usable = [config for config in usable if saves_tiles(config.kwargs, args)] or usable
    usable = no_wider_than_need_be(usable, args)
    usable = [config for swap_ab in (False, True) for config in _not_too_large(usable, args, swap_ab)]
    return usable if args["TENSOR_MEMORY"] else most_promising(usable, args)


def _not_too_large(configs: list[triton.Config], args: dict[str, Any], swap_ab: bool) -> list[triton.Config]:
    """Return those of either kind whose tiles are no more than twice as large as C."""
    kind = [config for config in configs if config.kwargs["SWAP_AB"] == swap_ab]
    sizes = as_tiled({"SWAP_AB": swap_ab}, args)
    return not_too_large(kind, BLOCK_M=sizes["M"], BLOCK_N=sizes["N"], BLOCK_K=sizes["K"])


def most_promising(configs: list[triton.Config], args: dict[str, Any]) -> list[triton.Config]:
    """Return no more configs than are tried, those that the estimate puts first, in its order."""
    promising = []
    widths: Counter[tuple[Any, ...]] = Counter()
    for config in sorted(configs, key=lambda config: estimated_clocks(config.kwargs, args)):
        widths[_kind(config)] += 1
        if not config.kwargs["JOINED"] or widths[_kind(config)] <= MOST_WIDTHS:
            promising.append(config)
    return promising[:MOST_TRIALS]


def prune_plain(
    configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any
) -> list[triton.Config]:
    """Return the candidates of the plain body that this call can use."""
    args = {**named_args, **kwargs}
    usable = configs
    if not INTERPRETED:
        limit = shared_memory_bytes()
        usable = [config for config in configs if pipeline_bytes(config, 2) <= limit] or configs
    return not_too_large(usable, BLOCK_M=args["M"], BLOCK_N=args["N"], BLOCK_K=args["K"])
