"""Launches of the Gluon body: tuned at first, then straight from what the tuning left (`settled_launch`).

Descriptors come from their cache then. Nothing here keeps a caller's tensor, nor the parts of stream-K.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..matrices import Block, Matrix, describe
from ..settled_launch import SettledLaunches
from .blocks import blocks_of, count_tiles
from .body import gemm
from .candidates import CUT_SCHEDULES, GLUON_CANDIDATES, NAMES
from .pruning import prune
from .size_classes import class_of_rows

COUNTERS_KEPT = 64
TYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

tuned_gemm = triton.autotune(
    configs=GLUON_CANDIDATES,
    key=[
        *("m_class", "n_class", "K", "wanted", "programs", "a_alignment", "b_alignment"),
        *("TRANS_A", "TRANS_B", "SCHEDULE", "OUT", "DTYPE"),
    ],
    prune_configs_by={"early_config_prune": prune},
)(gemm)


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
        }

    def grid(self, meta: dict[str, Any]) -> tuple[int, int, int]:
        """Return how many programs run under a config."""
        if meta["STREAM_K"]:
            return self.programs, 1, 1
        tiles = count_tiles(meta, {"M": self.m, "N": self.n})
        return (
            (tiles if meta["VARIANT"] == "pipelined" else min(max(self.programs // meta["CTAS"], 1), tiles)),
            1,
            1,
        )


# A tuner keeps the arguments and the config of its launch under way: it is asked by one thread at a time.
_TURN = threading.Lock()
_SETTLED: SettledLaunches[Shape] = SettledLaunches(tuned_gemm, blocks_of)
_COUNTERS: OrderedDict[tuple[str, int, int], torch.Tensor] = OrderedDict()


def launch(a: Matrix, b: Matrix, c: Matrix, shape: Shape) -> None:
    """Write C = A @ B on the current stream of the shape's device, which is the current device."""
    settled = _SETTLED.find(shape)
    if settled is not None:
        counter, parts = scratch_of(shape, part_elements(settled.config))
        further = a if settled.config.kwargs["SWAP_AB"] else b
        settled.launch((a, b, further, c), counter, *shape.sizes().values(), parts)
        return
    largest = max(map(part_elements, tuned_gemm.configs)) if shape.schedule in CUT_SCHEDULES else 0
    counter, parts = scratch_of(shape, largest)  # for any config
    any_block = Block(8, 64)  # the config's `pre_hook` sets the right ones
    descriptors = [describe(matrix, any_block) for matrix in (a, b, b, c)]
    sizes, constants = shape.sizes(), shape.constants()
    dtypes = (str(counter.dtype), str(parts.dtype))
    with _TURN:
        compiled = tuned_gemm[shape.grid](*descriptors, counter, *sizes.values(), parts, **constants)
        _SETTLED.remember(shape, compiled, shape.grid, sizes, constants, dtypes)


def part_elements(config: triton.Config) -> int:
    """Return how many elements a part of a tile has; 0 where tiles are not cut."""
    kwargs = config.kwargs
    return int(kwargs["BLOCK_M"] * (kwargs["BLOCK_N"] + kwargs["EXTRA_N"]) if kwargs["STREAM_K"] else 0)


def scratch_of(shape: Shape, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words in which programs count, and room for their parts of tiles of so many elements."""
    if elements == 0:
        return counter_of(shape.device, counts=shape.schedule == "dynamic"), _no_parts(shape.device)
    counter = counter_of(shape.device, counts=True, words=2 + shape.programs)
    return counter, torch.empty(2 * shape.programs * elements, dtype=torch.float32, device=shape.device)


@functools.lru_cache
def _no_parts(device: torch.device) -> torch.Tensor:
    return torch.empty(1, dtype=torch.float32, device=device)


@functools.lru_cache
def _no_counter(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


def counter_of(device: torch.device, *, counts: bool, words: int = 2) -> torch.Tensor:
    """Return words for kernels that count, as the dynamic schedule does: zeros, as every launch leaves them.

    Launches that do not count share theirs. Of the others each stream has its own, as two at once must not
    share tiles; and a captured launch, whose replays may run beside launches on any stream. What is zeroed in
    the capture is zeroed in each replay.
    """
    if not counts:
        return _no_counter(device)
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return torch.zeros(words, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else -1
    place = (str(device), stream, words)
    counter = _COUNTERS.get(place)
    if counter is None:
        counter = _COUNTERS[place] = torch.zeros(words, dtype=torch.int32, device=device)
        if len(_COUNTERS) > COUNTERS_KEPT:
            _COUNTERS.popitem(last=False)  # its memory goes back to its stream, behind its last launch
    return counter
