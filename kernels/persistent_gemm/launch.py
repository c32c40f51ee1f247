"""Launches of the Gluon body: tuned at first, then straight from what the tuning left.

    first calls of a shape     Autotuner -> the config's blocks go into new descriptors -> the kernel
    settled                    config, compiled kernel and grid from `_SETTLED`, descriptors from their cache:
                               neither the tuner's nor the compiler's lookup is repeated

The short way is taken while no launch may be a trial, and as long as the tuner's result for the shape is the
one that was remembered, so a later tuning is followed at once. Nothing here keeps a caller's tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from dist_autotune import is_tuning

from ..matrices import Matrix, describe, described
from .blocks import blocks_of
from .body import gemm
from .candidates import GLUON_CANDIDATES, NAMES, prune

SETTLED_KEPT = 512
COUNTERS_KEPT = 64
TYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

tuned_gemm = triton.autotune(
    configs=GLUON_CANDIDATES,
    key=["M", "N", "K", "splits", "wanted", "TRANS_A", "TRANS_B", "SCHEDULE", "OUT", "DTYPE"],
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
    splits: int
    split_rows: int
    programs: int
    device: torch.device
    tensor_memory: bool

    def sizes(self) -> tuple[int, ...]:
        """Return the kernel's M, N, K, `splits`, `split_rows` and `wanted`."""
        return self.m, self.n, self.k, self.splits, self.split_rows, NAMES.index(self.wanted)

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
        width = meta["BLOCK_N"] + meta["EXTRA_N"]
        tiles = triton.cdiv(self.m, meta["BLOCK_M"]) * triton.cdiv(self.n, width) * self.splits
        return (tiles if meta["VARIANT"] == "pipelined" else min(self.programs, tiles)), 1, 1


@dataclass(frozen=True)
class Settled:
    """How a shape is launched as long as `config` is the tuner's choice."""

    config: triton.Config
    blocks: tuple[tuple[int, int], ...]  # of a, b, b's further columns and c
    constants: tuple[Any, ...]
    run: Callable[..., Any]  # the compiled kernel, with its grid


_SETTLED: OrderedDict[Shape, Settled] = OrderedDict()
_COUNTERS: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()


def launch(a: Matrix, b: Matrix, c: Matrix, shape: Shape) -> None:
    """Write C = A @ B on the current stream of the shape's device, which is the current device."""
    counter = counter_of(shape.device, dynamic=shape.schedule == "dynamic")
    settled = _SETTLED.get(shape)
    if settled is not None and not is_tuning() and _choice(shape, counter) is settled.config:
        kept = map(described, (a, b, b, c), settled.blocks)
        settled.run(*kept, counter, *shape.sizes(), *settled.constants)
        return
    any_block = (8, 64)  # the config's `pre_hook` sets the right ones
    descriptors = [describe(matrix, any_block) for matrix in (a, b, b, c)]
    compiled = tuned_gemm[shape.grid](*descriptors, counter, *shape.sizes(), **shape.constants())
    if not is_tuning():
        _remember(shape, counter, compiled)


def _choice(shape: Shape, counter: torch.Tensor) -> triton.Config | None:
    """Return the tuner's settled config for the shape, if there is one."""
    if len(tuned_gemm.configs) == 1:
        return tuned_gemm.configs[0]
    named = {"M": shape.m, "N": shape.n, "K": shape.k, "splits": shape.splits, **shape.constants()}
    named["wanted"] = NAMES.index(shape.wanted)
    key = (*(named[name] for name in tuned_gemm.keys), str(counter.dtype))
    return tuned_gemm.cache.get(key)


def _remember(shape: Shape, counter: torch.Tensor, compiled: Any) -> None:
    """Keep the short way to what has just been launched, if that is what the tuner has settled on."""
    config = _choice(shape, counter)
    if config is None or config is not tuned_gemm.best_config or not hasattr(compiled, "packed_metadata"):
        return
    constants = {**shape.constants(), **config.kwargs}
    of_kernel = tuple(constants[name] for name in tuned_gemm.arg_names if name in constants)
    _SETTLED[shape] = Settled(
        config, tuple(blocks_of(constants).values()), of_kernel, compiled[shape.grid(config.kwargs)]
    )
    if len(_SETTLED) > SETTLED_KEPT:
        _SETTLED.popitem(last=False)


def counter_of(device: torch.device, *, dynamic: bool) -> torch.Tensor:
    """Return the two words of the dynamic schedule, zeros again at the end of every launch.

    One pair for each stream, as two launches at once must not share tiles. A captured launch has its own: its
    replays may run beside launches on any stream. What is zeroed in the capture is zeroed in each replay.
    """
    on_gpu = device.type == "cuda"
    if dynamic and on_gpu and torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if dynamic and on_gpu else -1
    place = (str(device), stream)
    counter = _COUNTERS.get(place)
    if counter is None:
        counter = _COUNTERS[place] = torch.zeros(2, dtype=torch.int32, device=device)
        if len(_COUNTERS) > COUNTERS_KEPT:
            _COUNTERS.popitem(last=False)  # its memory goes back to its stream, behind its last launch
    return counter
