"""The configs among which `persistent_matmul` is tuned, and which of them a call can use."""

from __future__ import annotations

from typing import Any

import triton

from ..compat import HAS_CLUSTERS_AND_PTX
from ..configs import INTERPRETED, not_too_large, pipeline_bytes, shared_memory_bytes
from ..tails import tail_share
from ..tiles import on_host
from .any_width import BOX_N, boxes_of
from .blocks import rows_of_a_cta, set_blocks
from .estimate import estimated_clocks
from .widths import tiles_side_by_side

VARIANTS = ("auto", "pipelined", "persistent", "persistent_pipelined", "warp_specialized")
# Of the last two, for whoever wants to know what each is worth.
PARTS = ("own_buffers", "stealing", "cooperative", "pingpong", "stream_k")
NAMES = (*VARIANTS, *PARTS)  # the kernel's argument `wanted` is an index
CUT_SCHEDULES = ("grouped", "strided")  # under which stream-K knows a program's numbers

MOST_ACCUMULATOR_REGISTERS = 192  # of a thread's 255; pointers, descriptors and the epilogue need the rest
# By how much of K stream-K must shorten the last wave to be tried: what parts cost on an H200, rounded down.
LEAST_SAVED_K = 512
SAVED_K_FOR_A_PART = 8
BARRIER_BYTES = 1024  # more than all mbarriers and a ring of tile numbers take
# Of a call; those that the estimate puts behind are not tried. What has won so far is among them.
MOST_TRIALS = 48 if HAS_CLUSTERS_AND_PTX else 30


def gluon_candidate(
    variant: str,
    blocks: tuple[int, int, int],
    buffers: int,
    *,
    warps: int,
    store: tuple[int, int],
    extra_n: int = 0,
    group_m: int = 8,
) -> triton.Config:
    """Return a config; `store` is how many columns a store has, and how many buffers there are for them."""
    kwargs = {
        "VARIANT": variant,
        "BLOCK_M": blocks[0],
        "BLOCK_N": blocks[1],
        "EXTRA_N": extra_n,
        "BLOCK_K": blocks[2],
        "NUM_BUFFERS": buffers,
        "STORE_N": store[0],
        "STORE_BUFFERS": store[1],  # 0: the epilogue steals two slots of B
        "GROUP_M": group_m,
    }
    return triton.Config(kwargs, num_warps=warps, num_stages=1, pre_hook=set_blocks)


def _candidate(
    variant: str,
    *args: Any,
    stream_k: int = 0,
    stagger: bool = False,
    spread: bool = False,
    joined: bool = False,
    ctas: int = 1,
    **options: Any,
) -> triton.Config:
    """Return a config of `gemm`; stream_k: the fewest k blocks of a tile of the last wave for a program."""
    config = gluon_candidate(variant, *args, **options)
    config.kwargs |= {"STREAM_K": stream_k, "STAGGER": stagger, "SPREAD": spread}
    config.kwargs |= {"JOINED": joined, "CTAS": ctas}
    config.num_ctas = ctas
    return config


def _any_width(
    variant: str, block_m: int, width: int, buffers: int, *, warps: int, ctas: int = 1
) -> triton.Config:
    """Return a config whose tiles are so wide, a multiple of 8."""
    extra_n = width % BOX_N.value
    return _candidate(
        *(variant, (block_m, width - extra_n, 64), buffers),
        warps=warps,
        store=(64, 1),
        extra_n=extra_n,
        joined=True,
        ctas=ctas,
        group_m=8 // ctas,
    )


def _pair(*args: Any, **options: Any) -> triton.Config:
    """Return a config of programs of two CTAs, whose tiles have twice the rows."""
    return _candidate(*args, **{"group_m": 4, **options}, ctas=2)


STOLEN = (128, 0)

GLUON_CANDIDATES = [
    # On Blackwell the first is what a tuner's first run takes, on Hopper that with the best estimate.
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1)),
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1), group_m=16),
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1), group_m=4),
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 2)),
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 1)),
    _candidate("cooperative", (128, 256, 64), 3, warps=8, store=(128, 2)),
    _candidate("cooperative", (128, 256, 128), 2, warps=8, store=(64, 1)),
    _candidate("cooperative", (256, 128, 64), 4, warps=8, store=(64, 1)),
    # The fewest rows loaded for each product: what counts where rows begin between cache lines.
    _candidate("cooperative", (256, 128, 64), 3, warps=8, store=(64, 1), extra_n=64),
    _candidate("cooperative", (256, 128, 64), 4, warps=8, store=(32, 1), extra_n=32),
    _candidate("cooperative", (128, 256, 64), 3, warps=8, store=(64, 1), extra_n=64),
    _candidate("cooperative", (128, 128, 64), 5, warps=8, store=(64, 1), extra_n=64),
    _candidate("cooperative", (128, 128, 64), 5, warps=8, store=(32, 5), extra_n=32),
    _candidate("cooperative", (128, 128, 64), 5, warps=8, store=(16, 9), extra_n=16),
    _candidate("cooperative", (128, 128, 64), 6, warps=8, store=(64, 1)),
    _candidate("cooperative", (128, 256, 64), 4, warps=4, store=(64, 1)),  # Blackwell
    # Small tiles, for as many SMs as possible, with deep rings: few rows, few columns.
    _candidate("cooperative", (128, 64, 64), 8, warps=8, store=(64, 1)),
    _candidate("cooperative", (64, 128, 64), 8, warps=4, store=(64, 2)),
    _candidate("cooperative", (64, 128, 64), 6, warps=4, store=(64, 3), extra_n=64),
    _candidate("cooperative", (64, 64, 128), 6, warps=4, store=(64, 1)),
    _candidate("cooperative", (128, 128, 64), 5, warps=8, store=(32, 5), extra_n=32, stagger=True),
    _candidate("cooperative", (128, 128, 64), 6, warps=8, store=(64, 1), stagger=True),
    _candidate("cooperative", (128, 64, 64), 8, warps=8, store=(64, 1), stagger=True),
    _candidate("cooperative", (64, 128, 64), 8, warps=4, store=(64, 2), stagger=True),
    _candidate("cooperative", (64, 128, 64), 6, warps=4, store=(64, 3), extra_n=64, stagger=True),
    _candidate("cooperative", (64, 64, 128), 6, warps=4, store=(64, 1), stagger=True),
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1), stream_k=8),
    _candidate("cooperative", (128, 256, 64), 3, warps=8, store=(64, 1), extra_n=64, stream_k=8),
    _candidate("cooperative", (256, 128, 64), 3, warps=8, store=(64, 1), extra_n=64, stream_k=8),
    _candidate("cooperative", (128, 128, 64), 5, warps=8, store=(64, 1), extra_n=64, stream_k=8),
    _candidate("cooperative", (128, 128, 64), 6, warps=8, store=(64, 1), stream_k=8),
    _candidate("cooperative", (64, 128, 64), 8, warps=4, store=(64, 2), stream_k=8),
    _candidate("cooperative", (64, 128, 64), 5, warps=4, store=(64, 3), extra_n=64, stream_k=8),
    # A few columns more than whole tiles: for some of these, instead of a tile of its own.
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(32, 2), extra_n=32, spread=True),
    _candidate("cooperative", (256, 128, 64), 4, warps=8, store=(32, 1), extra_n=32, spread=True),
    _candidate("cooperative", (128, 128, 64), 5, warps=8, store=(32, 5), extra_n=32, spread=True),
    _candidate("pingpong", (128, 128, 64), 5, warps=4, store=(32, 1), extra_n=32, spread=True),
    _candidate("pingpong", (128, 128, 64), 4, warps=4, store=(64, 1), extra_n=64, spread=True),
    _candidate("pingpong", (128, 128, 64), 5, warps=4, store=(64, 2)),
    _candidate("pingpong", (128, 128, 64), 5, warps=4, store=(64, 2), stream_k=16),
    _candidate("pingpong", (128, 128, 64), 5, warps=4, store=(64, 1), group_m=16),
    _candidate("pingpong", (128, 128, 64), 5, warps=4, store=(64, 1), group_m=16, stream_k=16),
    _candidate("pingpong", (128, 128, 64), 4, warps=4, store=(128, 1)),
    _candidate("pingpong", (128, 128, 128), 3, warps=4, store=(64, 1)),
    _candidate("pingpong", (128, 128, 64), 4, warps=4, store=(64, 1), extra_n=64),
    _candidate("pingpong", (128, 128, 64), 5, warps=4, store=(32, 1), extra_n=32),
    _candidate("pingpong", (64, 256, 64), 5, warps=4, store=(64, 1)),
    _candidate("pingpong", (64, 128, 64), 6, warps=4, store=(64, 1)),
    _candidate("persistent_pipelined", (128, 256, 64), 4, warps=8, store=(128, 1)),
    _candidate("persistent_pipelined", (128, 256, 64), 4, warps=8, store=(64, 1)),
    _candidate("persistent_pipelined", (128, 256, 64), 4, warps=8, store=STOLEN),
    _candidate("persistent_pipelined", (128, 256, 64), 3, warps=8, store=STOLEN),
    _candidate("persistent_pipelined", (128, 128, 64), 5, warps=4, store=(64, 1)),
    _candidate("persistent_pipelined", (64, 128, 64), 6, warps=4, store=(64, 1)),
    _candidate("persistent", (128, 256, 64), 4, warps=8, store=(128, 1)),
    _candidate("persistent", (128, 256, 64), 4, warps=8, store=(64, 1)),
    _candidate("persistent", (128, 128, 64), 5, warps=4, store=(64, 1)),
    _candidate("pipelined", (128, 256, 64), 4, warps=8, store=(128, 1)),
    _candidate("pipelined", (128, 256, 64), 4, warps=8, store=(64, 1)),
    # One wave: without another partition to start, and without waiting for a buffer of the store.
    _candidate("pipelined", (128, 128, 64), 4, warps=8, store=(64, 3), extra_n=64),
    _candidate("pipelined", (128, 128, 64), 5, warps=8, store=(32, 5), extra_n=32),
    _candidate("pipelined", (128, 128, 64), 3, warps=4, store=(64, 1)),  # two programs on an SM
    _candidate("pipelined", (64, 128, 64), 4, warps=4, store=(64, 1)),
    _candidate("pipelined", (64, 64, 128), 4, warps=4, store=(64, 1)),
]

if HAS_CLUSTERS_AND_PTX:
    GLUON_CANDIDATES += [
        # Widths that a tensor cannot have: as many tiles as there are SMs, or a little less than a multiple.
        *(_any_width("cooperative", 128, width, 4, warps=8) for width in (208, 224, 240)),
        *(_any_width("cooperative", 128, width, 5, warps=8) for width in (144, 160, 176, 192)),
        *(_any_width("cooperative", 128, width, 6, warps=8) for width in (96, 112, 120)),
        *(_any_width("cooperative", 64, width, 5, warps=4) for width in (208, 240)),
        *(_any_width("cooperative", 64, width, 6, warps=4) for width in (144, 160, 176)),
        *(_any_width("cooperative", 64, width, 8, warps=4) for width in (96, 112)),
        *(_any_width("pingpong", 128, width, 4, warps=4) for width in (144, 160, 176)),
        *(_any_width("pingpong", 128, width, 6, warps=4) for width in (96, 112, 120)),
        # Two CTAs, which load half the columns each: where rows begin between cache lines.
        *(_any_width("cooperative", 256, width, 4, warps=8, ctas=2) for width in (208, 216, 224, 240)),
        *(_any_width("cooperative", 256, width, 5, warps=8, ctas=2) for width in (176,)),
        _pair("cooperative", (256, 256, 64), 4, warps=8, store=(128, 1)),
        _pair("cooperative", (256, 256, 64), 4, warps=8, store=(128, 1), group_m=8),
        _pair("cooperative", (256, 256, 64), 4, warps=8, store=(32, 2), extra_n=32, spread=True),
        _pair("cooperative", (256, 256, 64), 4, warps=8, store=(32, 2), extra_n=32, spread=True, group_m=2),
        _pair("cooperative", (512, 128, 64), 4, warps=8, store=(64, 1)),
        _pair("cooperative", (256, 128, 64), 5, warps=8, store=(64, 1), extra_n=64),
        _pair("pingpong", (256, 128, 64), 5, warps=4, store=(64, 2)),
        _pair("pingpong", (256, 128, 64), 4, warps=4, store=(64, 1), extra_n=64),
        _pair("pingpong", (128, 256, 64), 5, warps=4, store=(64, 1)),
    ]


def _plain_config(blocks: tuple[int, int, int], group_m: int, *, warps: int, stages: int) -> triton.Config:
    kwargs = {"BLOCK_M": blocks[0], "BLOCK_N": blocks[1], "BLOCK_K": blocks[2], "GROUP_M": group_m}
    return triton.Config(kwargs, num_warps=warps, num_stages=stages)


PLAIN_GPU_CANDIDATES = [
    _plain_config((128, 256, 64), 8, warps=8, stages=3),
    _plain_config((256, 128, 64), 8, warps=8, stages=2),
    _plain_config((128, 128, 64), 8, warps=8, stages=2),
    _plain_config((128, 128, 64), 8, warps=4, stages=3),
    _plain_config((128, 128, 32), 8, warps=4, stages=3),
    _plain_config((64, 128, 64), 8, warps=4, stages=3),
    _plain_config((64, 128, 64), 8, warps=8, stages=2),
    _plain_config((64, 64, 64), 8, warps=4, stages=2),
    _plain_config((32, 64, 64), 8, warps=4, stages=2),
]

# Small, so that a few dozen rows are several tiles, and large, so that few tiles are many rows.
PLAIN_CPU_CANDIDATES = [
    _plain_config((32, 32, 32), 2, warps=4, stages=1),
    _plain_config((16, 64, 32), 3, warps=4, stages=1),
    _plain_config((128, 128, 128), 2, warps=4, stages=1),
]

PLAIN_CANDIDATES = PLAIN_CPU_CANDIDATES if INTERPRETED else PLAIN_GPU_CANDIDATES


def operand_bytes(kwargs: dict[str, Any]) -> int:
    """Return what the ring of operands takes in shared memory; A and B have two bytes an element."""
    a_bytes = kwargs["NUM_BUFFERS"] * rows_of_a_cta(kwargs) * kwargs["BLOCK_K"] * 2
    width = kwargs["BLOCK_N"] + kwargs["EXTRA_N"]
    if kwargs.get("JOINED"):
        width = BOX_N.value * boxes_of(kwargs["BLOCK_N"], kwargs["EXTRA_N"])
    b_bytes = kwargs["NUM_BUFFERS"] * width * kwargs["BLOCK_K"] * 2
    stolen = kwargs["BLOCK_N"] * kwargs["BLOCK_K"] * 2 if kwargs["STORE_BUFFERS"] == 0 else 0
    return int(a_bytes + b_bytes + stolen)


def shared_bytes(kwargs: dict[str, Any], out_bytes: int, *, tensor_memory: bool) -> int:
    """Return what a config of the Gluon body takes in shared memory, with elements of C of that size."""
    storers = 2 if kwargs["VARIANT"] == "pingpong" and not tensor_memory else 1
    piece = rows_of_a_cta(kwargs) * kwargs["STORE_N"] * out_bytes
    return int(operand_bytes(kwargs) + storers * kwargs["STORE_BUFFERS"] * piece + BARRIER_BYTES)


def accumulator_registers(config: triton.Config) -> int:
    """Return how many registers of each thread the accumulator takes on Hopper."""
    width = config.kwargs["BLOCK_N"] + config.kwargs["EXTRA_N"]
    return int(rows_of_a_cta(config.kwargs) * width // (32 * config.num_warps))


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
    return accumulator_registers(config) <= MOST_ACCUMULATOR_REGISTERS


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
    if args["SCHEDULE"] not in CUT_SCHEDULES or args["splits"] > 1:
        return False
    tiles_n, _wide = tiles_side_by_side(kwargs, args["N"])
    tail = triton.cdiv(args["M"], kwargs["BLOCK_M"]) * tiles_n % programs
    k_blocks = triton.cdiv(args["K"], kwargs["BLOCK_K"])
    share = on_host(tail_share)(tail, k_blocks, programs, kwargs["STREAM_K"])
    parts = triton.cdiv(tail * k_blocks, share) + tail - 1  # each stretch and each tile begins one
    saved_k = (k_blocks - share) * kwargs["BLOCK_K"]
    return bool(tail > 0 and saved_k >= max(LEAST_SAVED_K, parts * SAVED_K_FOR_A_PART))


def saves_tiles(kwargs: dict[str, Any], n: int) -> bool:
    """Return whether tiles of two widths are fewer than of the lesser one; True for one width."""
    if not kwargs["SPREAD"]:
        return True
    tiles_n, wide = tiles_side_by_side(kwargs, n)
    return wide < tiles_n < triton.cdiv(n, kwargs["BLOCK_N"])


def suits(kwargs: dict[str, Any], args: dict[str, Any]) -> bool:
    """Return whether a config can run with the call's layouts, schedule and number of programs."""
    if kwargs["JOINED"] and (args["TRANS_A"] or not args["TRANS_B"]):
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
    usable = [config for config in usable if saves_tiles(config.kwargs, args["N"])] or usable
    usable = not_too_large(usable, BLOCK_M=args["M"], BLOCK_N=args["N"], BLOCK_K=args["K"])
    return usable if args["TENSOR_MEMORY"] else most_promising(usable, args)


def most_promising(configs: list[triton.Config], args: dict[str, Any]) -> list[triton.Config]:
    """Return no more configs than are tried, those that the estimate puts first, in its order."""
    return sorted(configs, key=lambda config: estimated_clocks(config.kwargs, args))[:MOST_TRIALS]


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
