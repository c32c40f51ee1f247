"""The configs among which `persistent_matmul` is tuned; which of them a call can use, `pruning` says."""

from __future__ import annotations

from typing import Any

import triton

from ..compat import HAS_CLUSTERS_AND_PTX
from ..configs import INTERPRETED
from .any_width import in_boxes
from .blocks import set_blocks
from .footprint import deepest_ring

VARIANTS = ("auto", "pipelined", "persistent", "persistent_pipelined", "warp_specialized")
# Of the last two, for whoever wants to know what each is worth.
PARTS = ("own_buffers", "stealing", "cooperative", "pingpong", "stream_k")
NAMES = (*VARIANTS, *PARTS)  # the kernel's argument `wanted` is an index
CUT_SCHEDULES = ("grouped", "strided")  # under which stream-K knows a program's numbers


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
    joined: bool = False,
    teams: int = 1,
    ctas: int = 1,
    swap_ab: bool = False,
    **options: Any,
) -> triton.Config:
    """Return a config of `gemm`; stream_k: the fewest k blocks of a tile of the last wave for a program."""
    config = gluon_candidate(variant, *args, **options)
    config.kwargs |= {
        "STREAM_K": stream_k,
        "JOINED": joined,
        "TEAMS": teams,
        "CTAS": ctas,
        "SWAP_AB": swap_ab,
    }
    config.num_ctas = ctas
    return config


def _any_width(
    variant: str, block_m: int, width: int, *, ctas: int = 1, swap_ab: bool = False
) -> triton.Config:
    """Return a config whose tiles are so wide, a multiple of 8, and whose ring is as deep as fits."""
    block_n, extra_n = in_boxes(width)
    storers = 2 if variant == "pingpong" else 1  # of all rows
    rows, store_n = block_m // ctas, 64
    teams = 3 if rows == 192 else 1
    return _candidate(
        *(variant, (block_m, block_n, 64)),
        deepest_ring(rows, width, store_bytes=storers * rows * store_n * 2),
        warps=4 if variant == "pingpong" or rows // teams == 64 else 8,
        store=(store_n, 1),
        extra_n=extra_n,
        joined=True,
        teams=teams,
        ctas=ctas,
        swap_ab=swap_ab,
        group_m=8 // ctas,
    )


def _pair(*args: Any, **options: Any) -> triton.Config:
    """Return a config of programs of two CTAs, whose tiles have twice the rows."""
    return _candidate(*args, **{"group_m": 4, **options}, ctas=2)


STOLEN = (128, 0)
# Of tiles of any width; a call is tried with those that none does with as many tiles and fewer columns.
WIDTHS = (80, 96, 104, 112, 120, 128, 144, 152, 160, 176, 192, 200, 208, 216, 224, 240)
PINGPONG_WIDTHS = tuple(width for width in WIDTHS if width <= 192)  # registers of a thread
TEAM_WIDTHS = tuple(width for width in WIDTHS if 112 <= width <= 192)  # 96 of 512 threads' 128 registers
TEAM_PAIR_WIDTHS = tuple(width for width in TEAM_WIDTHS if width >= 144)
FEWEST_PAIR_COLUMNS = 176  # fewer are more rows loaded for each product, which is what pairs are to avoid

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
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1), stream_k=8),
    _candidate("cooperative", (128, 256, 64), 3, warps=8, store=(64, 1), extra_n=64, stream_k=8),
    _candidate("cooperative", (256, 128, 64), 3, warps=8, store=(64, 1), extra_n=64, stream_k=8),
    _candidate("cooperative", (128, 128, 64), 5, warps=8, store=(64, 1), extra_n=64, stream_k=8),
    _candidate("cooperative", (128, 128, 64), 6, warps=8, store=(64, 1), stream_k=8),
    _candidate("cooperative", (64, 128, 64), 8, warps=4, store=(64, 2), stream_k=8),
    _candidate("cooperative", (64, 128, 64), 5, warps=4, store=(64, 3), extra_n=64, stream_k=8),
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
        *(_any_width("cooperative", 64, width) for width in WIDTHS),
        *(_any_width("cooperative", 128, width) for width in WIDTHS),
        *(_any_width("pingpong", 128, width) for width in PINGPONG_WIDTHS),
        # Two CTAs, which L2 sends the columns once: where rows begin between cache lines.
        *(_any_width("cooperative", 256, width, ctas=2) for width in WIDTHS if width >= FEWEST_PAIR_COLUMNS),
        *(_any_width("pingpong", 256, width, ctas=2) for width in (144, 176, 192)),
        # 192 rows of a CTA, in three teams.
        *(_any_width("cooperative", 192, width) for width in TEAM_WIDTHS),
        *(_any_width("cooperative", 384, width, ctas=2) for width in TEAM_PAIR_WIDTHS),
        # A tile's rows are columns of C: where its columns divide C's rows better.
        *(_any_width("cooperative", 64, width, swap_ab=True) for width in WIDTHS),
        *(_any_width("pingpong", 128, width, swap_ab=True) for width in PINGPONG_WIDTHS),
        *(_any_width("cooperative", 192, width, swap_ab=True) for width in TEAM_WIDTHS),
        *(_any_width("cooperative", 384, width, ctas=2, swap_ab=True) for width in TEAM_PAIR_WIDTHS),
        _pair("cooperative", (256, 256, 64), 4, warps=8, store=(128, 1)),
        _pair("cooperative", (256, 256, 64), 4, warps=8, store=(128, 1), group_m=8),
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
