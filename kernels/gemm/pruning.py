"""Which configs a call of the persistent GEMM can use, and which of those are worth a trial.

An estimate says how long a config takes on Hopper. A k block of a tile costs what takes longest, in clocks
of an SM:

    multiply    an instruction of 64 rows and w columns takes w / 2 for each 16 of K, by data sheets. Products
                of random numbers were seen to take 1.2 times that, cuBLAS' as well
    share       shared memory passes 128 bytes a clock: what is loaded is written there, and each instruction
                reads its rows of A and its columns of B. A tile of two accumulators reads its rows twice, so
                128 + 64 columns are bound by that
    load        60 bytes a clock come from L2, fewer where rows begin between its lines or sectors

Tiles are done in waves. What is not hidden of a tile's store and of its first loads comes on top, and nothing
is faster than memory, which is as fast as there are bytes in flight.

The constants are an H200's at 1.98 GHz, which is what it runs at for products that take little power: of data
sheets, or such that the medians in docs/benchmarks come out. With 2.5 us for the launch, half of the configs
that `auto` chose below 0.2 ms for the ragged shapes are within a tenth, nearly all within a fifth. Large
products take longer, as the clock falls.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..compat import HAS_INLINE_PTX
from ..configs import INTERPRETED, not_too_large, pipeline_bytes, shared_memory_bytes
from ..epilogues import GATE_BLOCK, NO_EPILOGUE, EpilogueKind, sums_of_a_result
from ..tiles import on_host, stream_k_share
from .configs import (
    CUT_SCHEDULES,
    MOST_ACCUMULATOR_REGISTERS,
    NAMES,
    accumulator_registers,
    as_tiled,
    class_of_rows,
    count_tiles,
    in_words,
    shared_bytes,
)
from .mma import WIDEST_FROM_REGISTERS

L2_BYTES_PER_CLOCK = 60  # into one SM; 55 to 58 were seen with rings of five slots
BETWEEN_LINES, BETWEEN_SECTORS = 1.4, 2.4  # times that for rows of 128 bytes that begin there
SEEN_OVER_NOMINAL = 1.2  # of instructions, by what K = 4096 takes longer than K = 1024
SHARED_BYTES_PER_CLOCK = 128
FROM_REGISTERS = 0.95  # times that where the rows of two accumulators pass through registers
MEMORY_BYTES_PER_CLOCK = 2020  # of the GPU: about 4 TB/s
MEMORY_LATENCY = 3500  # clocks, under load
START = 2500  # of a kernel with several partitions, over one without
FILL = 1500  # from the first load of a tile to its first multiplication
STORE_BYTES_PER_CLOCK, STORE_LATENCY = 32, 1000
# A part of stream-K is written by all SMs at once, and the parts of a tile are read by one.
PART_WRITE_BYTES_PER_CLOCK, PART_READ_BYTES_PER_CLOCK = 20, 40

STORES_EXPOSED = {"pingpong": 0}
FILLS_EXPOSED = {"pipelined": 1, "persistent": 1}
STARTS = {"cooperative": 1, "pingpong": 1}
# By how much of K stream-K must shorten the last wave to be tried: what parts cost on an H200, rounded down.
LEAST_SAVED_K = 512
SAVED_K_FOR_A_PART = 8
MOST_WIDTHS = 4  # of tiles that differ in nothing else, which the estimate tells apart: it puts winners first


def estimated_clocks(kwargs: dict[str, Any], args: dict[str, Any]) -> float:
    """Return about how many clocks a call takes with a config; kwargs are the config's, args the kernel's."""
    variant, tiles, args = kwargs["VARIANT"], count_tiles(kwargs, args), as_tiled(kwargs, args)
    programs = args["programs"]
    width = kwargs["BLOCK_N"] + kwargs["EXTRA_N"]
    k_blocks = triton.cdiv(args["K"], kwargs["BLOCK_K"])
    k_block = max(multiply_clocks(kwargs), load_clocks(kwargs, args))
    store = kwargs["BLOCK_M"] * width * out_bytes(args) / STORE_BYTES_PER_CLOCK + STORE_LATENCY
    exposed = STORES_EXPOSED.get(variant, 1) * store + FILLS_EXPOSED.get(variant, 0) * FILL
    if kwargs["STREAM_K"]:
        waves, tail = divmod(tiles, programs)
        share = on_host(stream_k_share)(tail, k_blocks, programs, kwargs["STREAM_K"])
        busy, cut = programs, share * k_block
        ends = FILL + store + part_clocks(kwargs, triton.cdiv(k_blocks, share))
    else:
        waves, busy, cut = triton.cdiv(tiles, programs), min(tiles, programs), 0.0
        ends = FILL + store
    work = waves * (k_blocks * k_block + exposed) + cut
    return STARTS.get(variant, 0) * START + max(work, memory_clocks(kwargs, args, busy)) + ends


def out_bytes(args: dict[str, Any]) -> int:
    """Return how many bytes of C come of a sum."""
    return (4 if args["OUT"] == "fp32" else 2) // sums_of_a_result(args.get("ACTIVATION"))


def multiply_clocks(kwargs: dict[str, Any]) -> float:
    """Return what the tensor cores of an SM, or its shared memory, take for one k block."""
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
    """Return what an SM takes to load one k block, whose rows beyond the edges cost nothing."""
    width = kwargs["BLOCK_N"] + kwargs["EXTRA_N"]
    a_rows = min(kwargs["BLOCK_M"], args["M"]) * slowed(args["a_alignment"])
    b_rows = min(width, args["N"]) * slowed(args["b_alignment"])
    return (a_rows + b_rows) * kwargs["BLOCK_K"] * 2 / L2_BYTES_PER_CLOCK


def slowed(alignment: int) -> float:
    """Return by how much loads take longer from a matrix whose rows begin at multiples of so many bytes."""
    if alignment % 128 == 0:
        return 1.0
    return BETWEEN_LINES if alignment % 32 == 0 else BETWEEN_SECTORS


def part_clocks(kwargs: dict[str, Any], parts: int) -> float:
    """Return what stream-K takes to write a part of a tile and to read all of them."""
    part_bytes = 4 * kwargs["BLOCK_M"] * (kwargs["BLOCK_N"] + kwargs["EXTRA_N"])
    latency = 2 * STORE_LATENCY
    return latency + part_bytes / PART_WRITE_BYTES_PER_CLOCK + parts * part_bytes / PART_READ_BYTES_PER_CLOCK


def memory_clocks(kwargs: dict[str, Any], args: dict[str, Any], busy: int) -> float:
    """Return what memory takes for A, B and C, asked by `busy` SMs, each for as much as fits its buffers."""
    m, n, k = args["M"], args["N"], args["K"]
    rows = min(kwargs["BLOCK_M"], m) + min(kwargs["BLOCK_N"] + kwargs["EXTRA_N"], n)
    in_flight = busy * kwargs["NUM_BUFFERS"] * rows * kwargs["BLOCK_K"] * 2
    speed = min(MEMORY_BYTES_PER_CLOCK, in_flight / MEMORY_LATENCY)
    return (2 * (m + n) * k + out_bytes(args) * m * n) / speed


# Of a call; those that the estimate puts behind are not tried. What has won so far is among them.
MOST_TRIALS = 54 if HAS_INLINE_PTX else 30


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
        if kwargs.get("JOINED"):
            return False
        # ptxas spills the float32 pieces of 8 warps that do everything (Triton 3.6 and 3.9).
        return out_bytes <= 2 or kwargs["VARIANT"] == "cooperative" or config.num_warps == 4
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
    if args["SCHEDULE"] not in CUT_SCHEDULES:
        return False
    tail = count_tiles(kwargs, args) % programs
    k_blocks = triton.cdiv(args["K"], kwargs["BLOCK_K"])
    share = on_host(stream_k_share)(tail, k_blocks, programs, kwargs["STREAM_K"])
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
    names = ("JOINED", "VARIANT", "BLOCK_M", "SWAP_AB", "GROUP_M", "STORE_N")
    return tuple(config.kwargs[name] for name in names)


def _kind_and_tiles(config: triton.Config, args: dict[str, Any]) -> tuple[Any, ...]:
    return (*_kind(config), triton.cdiv(as_tiled(config.kwargs, args)["N"], _width(config)))


def _width(config: triton.Config) -> int:
    return int(config.kwargs["BLOCK_N"] + config.kwargs["EXTRA_N"])


def suits(kwargs: dict[str, Any], args: dict[str, Any]) -> bool:
    """Return whether a config can run with the call's layouts, and no tile begins inside a gate's columns."""
    width = kwargs["BLOCK_N"] + kwargs["EXTRA_N"]
    is_whole = kwargs["SWAP_AB"] or width % (GATE_BLOCK * sums_of_a_result(args.get("ACTIVATION"))) == 0
    return bool(is_whole and (not kwargs["JOINED"] or (args["TRANS_B"] and not args["TRANS_A"])))


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Return the candidates of the Gluon body that this call can use."""
    args = in_words({**named_args, **kwargs})
    limit = shared_memory_bytes()
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
        and fits(config, out_bytes(args), limit, tensor_memory=args["TENSOR_MEMORY"])
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
        limit, itemsize = shared_memory_bytes(), args["a_ptr"].element_size()
        usable = [config for config in configs if pipeline_bytes(config, itemsize) <= limit] or configs
    return not_too_large(usable, BLOCK_M=args["M"], BLOCK_N=args["N"], BLOCK_K=args["K"])


TYPE_NAMES = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}


@dataclass(frozen=True)
class Shape:
    """What the choice of a config and the compiled kernel depend on."""

    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool
    dtype: torch.dtype
    out_dtype: torch.dtype
    schedule: str
    wanted: str
    programs: int
    a_alignment: int
    b_alignment: int
    device: torch.device
    tensor_memory: bool
    exchanged: bool = False  # columns are the rows of the caller's product: what changes from call to call
    epilogue: EpilogueKind = NO_EPILOGUE

    def sizes(self) -> dict[str, int]:
        """Return the kernel's sizes, in the order of its parameters."""
        return {
            "M": self.m,
            "N": self.n,
            "K": self.k,
            "wanted": NAMES.index(self.wanted),
            "programs": self.programs,
            "a_alignment": self.a_alignment,
            "b_alignment": self.b_alignment,
            "m_class": self.m if self.exchanged else class_of_rows(self.m),
            "n_class": class_of_rows(self.n) if self.exchanged else self.n,
        }

    def constants(self) -> dict[str, Any]:
        """Return the constexprs of the kernel that no config sets, in the order of its parameters."""
        return {
            "TRANS_A": self.trans_a,
            "TRANS_B": self.trans_b,
            "TENSOR_MEMORY": self.tensor_memory,
            "SCHEDULE": self.schedule,
            "OUT": TYPE_NAMES[self.out_dtype],
            "DTYPE": TYPE_NAMES[self.dtype],
            "ACTIVATION": self.epilogue.activation,
        }

    def grid(self, meta: dict[str, Any]) -> tuple[int, int, int]:
        """Return how many programs run under a config."""
        if meta["STREAM_K"]:
            return self.programs, 1, 1
        tiles = count_tiles(meta, {"M": self.m, "N": self.n})
        return (tiles if meta["VARIANT"] == "pipelined" else min(self.programs, tiles)), 1, 1
