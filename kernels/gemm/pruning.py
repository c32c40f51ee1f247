"""Prunes the configs of the persistent GEMM to those that a call can use and that are worth a trial.

An estimate tells how long a config takes on Hopper: the longest of three times for each k block of a tile
(tensor cores, shared memory, loads from L2), in waves of tiles, and the exposed stores; or memory's time, if
that is longer. The constants are an H200's at 1.98 GHz, by data sheets and the medians in docs/benchmarks.
With 2.5 us for the launch it is within a tenth for half of the configs that `auto` chose below 0.2 ms for
ragged shapes, within a fifth for nearly all. Large products take longer, as the clock falls.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import triton

from ..compat import HAS_INLINE_PTX
from ..configs import fitting, not_too_large, shared_memory_bytes
from ..epilogues import GATE_BLOCK, sums_of_a_result
from .configs import (
    MOST_ACCUMULATOR_REGISTERS,
    NAMES,
    PARTS,
    accumulator_registers,
    as_tiled,
    count_tiles,
    in_words,
    shared_bytes,
)
from .mma import WIDEST_FROM_REGISTERS

L2_BYTES_PER_CLOCK = 60  # into one SM; 55 to 58 were seen with rings of five slots
BETWEEN_LINES, BETWEEN_SECTORS = 1.4, 2.4  # times that for rows of 128 bytes that begin there
SEEN_OVER_NOMINAL = 1.2  # of instructions: from the times of K = 4096 and of K = 1024
SHARED_BYTES_PER_CLOCK = 128
FROM_REGISTERS = 0.95  # of the time in shared memory, where rows of two accumulators pass through registers
MEMORY_BYTES_PER_CLOCK = 2020  # of the GPU: about 4 TB/s
MEMORY_LATENCY = 3500  # clocks, under load
START = 2500  # of a kernel with several partitions, over one without
FILL = 1500  # from the first load of a tile to its first multiplication
STORE_BYTES_PER_CLOCK, STORE_LATENCY = 32, 1000

NEVER_BEST = ("pipelined", "persistent")  # best in 0 of 64 contexts of `auto`: to be asked for by name
MOST_WIDTHS = 4  # tried of tiles that differ in nothing else: the estimate puts winners first


def estimated_clocks(kwargs: dict[str, Any], args: dict[str, Any]) -> float:
    """Return about how many clocks a call takes with a config; kwargs are the config's, args the kernel's."""
    variant, tiles, args = kwargs["VARIANT"], count_tiles(kwargs, args), as_tiled(kwargs, args)
    programs = args["programs"]
    k_blocks = triton.cdiv(args["K"], kwargs["BLOCK_K"])
    k_block = max(multiply_clocks(kwargs), load_clocks(kwargs, args))
    store = kwargs["BLOCK_M"] * _width(kwargs) * out_bytes(args) / STORE_BYTES_PER_CLOCK + STORE_LATENCY
    exposed = 0 if variant == "pingpong" else store
    work = triton.cdiv(tiles, programs) * (k_blocks * k_block + exposed)
    memory = memory_clocks(kwargs, args, min(tiles, programs))
    return START * (variant in PARTS) + max(work, memory) + FILL + store


def out_bytes(args: dict[str, Any]) -> int:
    """Return how many bytes of C each sum becomes."""
    return (4 if args["OUT"] == "fp32" else 2) // sums_of_a_result(args.get("ACTIVATION"))


def multiply_clocks(kwargs: dict[str, Any]) -> float:
    """Return the clocks of an SM's tensor cores, or of its shared memory, for one k block."""
    widths = [width for width in (kwargs["BLOCK_N"], kwargs["EXTRA_N"]) if width > 0]
    if kwargs["JOINED"]:
        widths = [sum(widths)]
    rows = kwargs["BLOCK_M"]
    instructions = rows // 64 * kwargs["BLOCK_K"] // 16  # of each width
    read = instructions * sum(64 + width for width in widths) * 16 * 2
    written = (rows + sum(widths)) * kwargs["BLOCK_K"] * 2
    shared = (read + written) / SHARED_BYTES_PER_CLOCK
    if len(widths) > 1 and widths[1] <= WIDEST_FROM_REGISTERS.value and rows >= 128:
        shared *= 1 if kwargs["VARIANT"] == "pingpong" else FROM_REGISTERS
    return max(SEEN_OVER_NOMINAL * instructions * sum(widths) / 2, shared)


def load_clocks(kwargs: dict[str, Any], args: dict[str, Any]) -> float:
    """Return the clocks in which an SM loads one k block; rows beyond the edges cost nothing."""
    a_rows = min(kwargs["BLOCK_M"], args["M"]) * slowed(args["a_alignment"])
    b_rows = min(_width(kwargs), args["N"]) * slowed(args["b_alignment"])
    return (a_rows + b_rows) * kwargs["BLOCK_K"] * 2 / L2_BYTES_PER_CLOCK


def slowed(alignment: int) -> float:
    """Return the factor by which loads take longer where rows begin at multiples of so many bytes."""
    if alignment % 128 == 0:
        return 1.0
    return BETWEEN_LINES if alignment % 32 == 0 else BETWEEN_SECTORS


def memory_clocks(kwargs: dict[str, Any], args: dict[str, Any], busy: int) -> float:
    """Return the clocks of memory for A, B and C, where `busy` SMs each ask for a ring of buffers at once."""
    m, n, k = args["M"], args["N"], args["K"]
    rows = min(kwargs["BLOCK_M"], m) + min(_width(kwargs), n)
    in_flight = busy * kwargs["NUM_BUFFERS"] * rows * kwargs["BLOCK_K"] * 2
    speed = min(MEMORY_BYTES_PER_CLOCK, in_flight / MEMORY_LATENCY)
    return (2 * (m + n) * k + out_bytes(args) * m * n) / speed


# Tried in a call, in the order of the estimate. All winners so far are among them.
MOST_TRIALS = 54 if HAS_INLINE_PTX else 30


def fits(config: triton.Config, out_bytes: int, limit_bytes: int, *, tensor_memory: bool) -> bool:
    """Return whether the config fits an SM."""
    kwargs = config.kwargs
    if shared_bytes(kwargs, out_bytes, tensor_memory=tensor_memory) > limit_bytes:
        return False
    if not tensor_memory:
        return accumulator_registers(config) <= MOST_ACCUMULATOR_REGISTERS
    # 128 lanes of tensor memory, and two accumulators: there ping-pong is the cooperative variant.
    if kwargs["BLOCK_M"] != 128 or kwargs["EXTRA_N"] > 0 or kwargs["JOINED"]:
        return False
    # ptxas spills the float32 pieces of 8 warps that do everything (Triton 3.6 and 3.9).
    is_narrow = out_bytes <= 2 or kwargs["VARIANT"] == "cooperative" or config.num_warps == 4
    return is_narrow and kwargs["VARIANT"] != "pingpong"


def is_wanted(kwargs: dict[str, Any], wanted: str) -> bool:
    """Return whether a config belongs to one of VARIANTS or PARTS."""
    variant = kwargs["VARIANT"]
    return wanted in ("auto", variant) or (wanted == "warp_specialized" and variant in PARTS)


def suits(kwargs: dict[str, Any], args: dict[str, Any]) -> bool:
    """Return whether a config can run with the call's layouts, and no tile begins inside a gate's columns."""
    is_whole = (
        kwargs["SWAP_AB"] or _width(kwargs) % (GATE_BLOCK * sums_of_a_result(args.get("ACTIVATION"))) == 0
    )
    return bool(is_whole and (not kwargs["JOINED"] or (args["TRANS_B"] and not args["TRANS_A"])))


def saves_tiles(kwargs: dict[str, Any], args: dict[str, Any]) -> bool:
    """Return whether swapped tiles are fewer than the same ones unswapped; True for unswapped ones."""
    unswapped = {**kwargs, "SWAP_AB": False}
    return not kwargs["SWAP_AB"] or count_tiles(kwargs, args) < count_tiles(unswapped, args)


def no_wider_than_need_be(configs: list[triton.Config], args: dict[str, Any]) -> list[triton.Config]:
    """Leave out tiles of any width if narrower ones, alike in all else, are as many."""
    tilings = [
        ((*_kind(each.kwargs), count_tiles(each.kwargs, args)), _width(each.kwargs)) for each in configs
    ]
    narrowest = dict(sorted(tilings, key=lambda tiling: -tiling[1]))  # of its kind the last one stays
    found = zip(configs, tilings, strict=True)
    return [each for each, (kind, width) in found if not each.kwargs["JOINED"] or width == narrowest[kind]]


def _kind(kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields of tiles of any width, but for the width."""
    return tuple(kwargs[name] for name in ("JOINED", "VARIANT", "BLOCK_M", "SWAP_AB", "GROUP_M", "STORE_N"))


def _width(kwargs: dict[str, Any]) -> int:
    return int(kwargs["BLOCK_N"] + kwargs["EXTRA_N"])


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Return the candidates of the Gluon body that this call can use."""
    args = in_words({**named_args, **kwargs})
    limit, on_blackwell, wanted = shared_memory_bytes(), args["TENSOR_MEMORY"], NAMES[args["wanted"]]
    usable = [
        config
        for config in configs
        if is_wanted(config.kwargs, wanted)
        and fits(config, out_bytes(args), limit, tensor_memory=on_blackwell)
        and suits(config.kwargs, args)
    ]
    if wanted == "auto":
        usable = [config for config in usable if config.kwargs["VARIANT"] not in NEVER_BEST] or usable
    usable = [config for config in usable if saves_tiles(config.kwargs, args)] or usable
    usable = no_wider_than_need_be(usable, args)
    small = []
    for swap_ab in (False, True):  # tiles no more than twice as large as C
        kind = [config for config in usable if config.kwargs["SWAP_AB"] == swap_ab]
        sizes = as_tiled({"SWAP_AB": swap_ab}, args)
        small += not_too_large(kind, BLOCK_M=sizes["M"], BLOCK_N=sizes["N"], BLOCK_K=sizes["K"])
    return small if on_blackwell else most_promising(small, args)


def most_promising(configs: list[triton.Config], args: dict[str, Any]) -> list[triton.Config]:
    """Return the MOST_TRIALS configs that the estimate puts first, in its order; few widths of a kind."""
    promising = []
    widths: Counter[tuple[Any, ...]] = Counter()
    for config in sorted(configs, key=lambda config: estimated_clocks(config.kwargs, args)):
        kind = _kind(config.kwargs)
        widths[kind] += 1
        if not config.kwargs["JOINED"] or widths[kind] <= MOST_WIDTHS:
            promising.append(config)
    return promising[:MOST_TRIALS]


def prune_plain(
    configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any
) -> list[triton.Config]:
    """Return the candidates of the plain body that this call can use."""
    args = {**named_args, **kwargs}
    usable = fitting(configs, args["a_ptr"].element_size())
    return not_too_large(usable, BLOCK_M=args["M"], BLOCK_N=args["N"], BLOCK_K=args["K"])


TYPE_NAMES = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}


def fewest_rows(configs: list[triton.Config], *, tensor_memory: bool) -> int:
    """Return the fewest rows of a chunk that a Gluon kernel takes: those of its lowest tile."""
    return 128 if tensor_memory else min(config.kwargs["BLOCK_M"] for config in configs)


def prune_chunks(
    configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any
) -> list[triton.Config]:
    """Return the candidates of a Gluon kernel over chunks that a call's shape and device allow.

    It looks at facts that all ranks share, save N of a gather and K of a scatter, so ranks with equal weights
    keep equal candidates.
    """
    args = in_words({**named_args, **kwargs})
    rows, limit = args.get("size_class") or args["M"] // args["WORLD"], shared_memory_bytes()
    usable = [
        config
        for config in configs
        if config.kwargs["BLOCK_M"] <= rows
        and fits(config, 2, limit, tensor_memory=args["TENSOR_MEMORY"])
        and (args.get("TRANS_B", True) or not config.kwargs["JOINED"])
    ]
    return not_too_large(usable, BLOCK_N=args["N"], BLOCK_K=args["K"])
