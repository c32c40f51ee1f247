"""The host side of the warp-specialised family: whether it can run, its configs, and the way to a launch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..configs import capability, not_too_large, shared_memory_bytes, take_first
from ..epilogues import NO_EPILOGUE, EpilogueKind
from ..exchange.spoil import spoil_chunks
from ..gemm.configs import blocks_of, class_of_chunk, gluon_candidate, in_words
from ..gemm.pruning import TYPE_NAMES, fits
from ..launch import SettledLaunches, load
from ..matrices import Block, Matrix, describe, matrix_of_rows
from ..tensors import FP8, lies_by_columns
from .operands import Call
from .specialized_kernel import specialized_all_gather_gemm

CANDIDATES = [
    # The first is what a tuner's first run takes.
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1)),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1), group_m=16),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1), group_m=4),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 2)),
    gluon_candidate("cooperative", (256, 128, 64), 4, warps=8, store=(64, 1)),
    gluon_candidate("cooperative", (128, 128, 64), 5, warps=8, store=(64, 1), extra_n=64),
    gluon_candidate("cooperative", (128, 128, 64), 6, warps=8, store=(64, 1)),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=4, store=(64, 1)),  # Blackwell
    gluon_candidate("pingpong", (128, 128, 64), 5, warps=4, store=(64, 2)),
    gluon_candidate("pingpong", (128, 128, 64), 5, warps=4, store=(64, 1), group_m=16),
    gluon_candidate("pingpong", (128, 128, 64), 4, warps=4, store=(64, 1), extra_n=64),
    gluon_candidate("pingpong", (64, 256, 64), 5, warps=4, store=(64, 1)),
    gluon_candidate("pingpong", (64, 128, 64), 6, warps=4, store=(64, 1)),
    gluon_candidate("cooperative", (64, 128, 128), 4, warps=4, store=(64, 1)),  # few rows
]
WORDS_PER_TILE = 4  # see `empty_trace`


def fewest_rows(*, tensor_memory: bool) -> int:
    """Return how many rows a chunk has at least: a tile must not be higher than a chunk."""
    heights = [config.kwargs["BLOCK_M"] for config in CANDIDATES]
    return 128 if tensor_memory else min(heights)


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Return the candidates that this call's shape and device allow.

    It looks at what all ranks share, save N, so ranks with equal weights keep equal candidates.
    """
    args = in_words({**named_args, **kwargs})
    rows, limit = args.get("size_class") or args["M"] // args["WORLD"], shared_memory_bytes()
    usable = [
        config
        for config in configs
        if config.kwargs["BLOCK_M"] <= rows and fits(config, 2, limit, tensor_memory=args["TENSOR_MEMORY"])
    ]
    return not_too_large(usable, BLOCK_N=args["N"], BLOCK_K=args["K"])


OPERAND_TYPES = (torch.float16, torch.bfloat16, FP8)

tuned = triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "K", "DTYPE", "TRANS_B", "ACTIVATION"],  # and the type of a bias, if any
    prune_configs_by={"early_config_prune": prune},
    do_bench=take_first,  # outside a tuned function: a launch waits for peers, who would pick another config
)(specialized_all_gather_gemm)


@functools.lru_cache(maxsize=4096)
def _size_class(rows: int) -> int:
    return class_of_chunk(rows, CANDIDATES)


class Shape(NamedTuple):
    """What the choice of a config and the compiled kernel depend on. Each call hashes one: no dataclass."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    world_size: int
    programs: int
    device: torch.device
    by_columns: bool
    trace: bool
    epilogue: EpilogueKind = NO_EPILOGUE

    def sizes(self) -> dict[str, int]:
        return {"M": self.m, "N": self.n, "K": self.k, "size_class": self.size_class()}

    def size_class(self) -> int:
        """Return the number of rows of a chunk that this one is tuned as."""
        return _size_class(self.m // self.world_size)

    def constants(self) -> dict[str, Any]:
        return {
            "WORLD": self.world_size,
            "TENSOR_MEMORY": capability(self.device) == 10,
            "DTYPE": TYPE_NAMES[self.dtype],
            "TRANS_B": not self.by_columns,
            "TRACE": self.trace,
            "ACTIVATION": self.epilogue.activation,
        }

    def tiles(self, meta: dict[str, Any]) -> int:
        """Return how many tiles there are under a config."""
        rows = triton.cdiv(self.m // self.world_size, meta["BLOCK_M"])
        return int(self.world_size * rows * triton.cdiv(self.n, meta["BLOCK_N"] + meta["EXTRA_N"]))

    def grid(self, meta: dict[str, Any]) -> tuple[int, int, int]:
        return min(self.programs, self.tiles(meta)), 1, 1


_SETTLED: SettledLaunches[Shape] = SettledLaunches(tuned, blocks_of, operation="AllGatherGemm")


def can_run(gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> bool:
    """Return whether `SpecializedConsumer` takes these: a GPU with a body, TMA's alignment, a tile's rows.

    The answer depends on addresses and on N: it is this rank's own.
    """
    major = capability(gather.device)
    if major not in (9, 10) or gather.dtype not in OPERAND_TYPES:
        return False
    if major == 10 and gather.dtype == FP8:
        return False  # between the flag of a row and whoever reads its scale are the tensor cores alone
    if rows < fewest_rows(tensor_memory=major == 10) or weight.shape[0] == 1:
        return False
    return all(matrix.is_addressable() for matrix in _matrices(gather, weight, out))


class SpecializedConsumer:
    """Multiplies in one kernel, whose load warp waits; only where `can_run`."""

    def __init__(self, gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self._matrices = _matrices(gather, weight, out)  # as they lie: their addresses are of the first call

    def load(self, gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, call: Call) -> None:
        shape = self._shape_of(weight, call)
        if _SETTLED.find(shape) is None:
            arguments = self._arguments_of(shape, call)
            load(tuned, shape.grid, *_describe(gather, weight, out), *arguments, **shape.constants())
            spoil_chunks(out, call, only_load=True)

    def launch(self, gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, call: Call) -> None:
        shape = self._shape_of(weight, call)
        arguments = self._arguments_of(shape, call)
        settled = _SETTLED.find(shape)
        if settled is not None:
            b = weight.data_ptr()
            settled.prepared(self._matrices)((gather.data_ptr(), b, b, out.data_ptr()), *arguments)
        else:
            constants = shape.constants()
            compiled = tuned[shape.grid](*_describe(gather, weight, out), *arguments, **constants)
            _SETTLED.remember(shape, compiled, constants, arguments[:6])
        spoil_chunks(out, call)  # only the load warp knows what it has given up

    def _shape_of(self, weight: torch.Tensor, call: Call) -> Shape:
        a, b, _, c = self._matrices
        sizes = (c.rows, weight.shape[0], a.columns)
        of_launch = (call.world_size, call.programs, weight.device)
        is_traced, epilogue = call.trace is not None, call.epilogue.kind()
        return Shape(*sizes, a.dtype, *of_launch, b.transposed, is_traced, epilogue)

    def _arguments_of(self, shape: Shape, call: Call) -> tuple[Any, ...]:
        """Return the kernel's arguments between descriptors and constants: six tensors and the scalars."""
        trace = call.errors if call.trace is None else call.trace
        ending = call.epilogue
        tensors = (call.flags, call.errors, trace, ending.scale_a, ending.scale_b, ending.bias)
        scalars = (call.rank, call.epoch, call.base, call.pushed, call.patience_ticks)
        return (*tensors, shape.m, shape.n, shape.k, call.capacity, *scalars, shape.size_class())


def _describe(gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> list[TensorDescriptor]:
    any_block = Block(8, 64)  # the config's `pre_hook` sets the right ones
    return [describe(matrix, any_block) for matrix in _matrices(gather, weight, out)]


def empty_trace(out: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return `Call.trace` for a call that writes `out`: -1, with a row for each tile under any config.

    Tiles are numbered in the order of visits: chunk `rank` first, then `rank` + 1. A row that stays -1 is of
    no tile. Otherwise: ns before the tile's wait, behind it, and when its stores had been started; the SM.
    """
    m, n = out.shape
    shape = Shape(m, n, 0, out.dtype, world_size, 0, out.device, by_columns=False, trace=True)
    tiles = max(shape.tiles(config.kwargs) for config in tuned.configs)
    return torch.full((tiles, WORDS_PER_TILE), -1, dtype=torch.int64, device=out.device)


def _matrices(
    gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Return A, B, B again for its further columns, and C."""
    slots, capacity, k = gather.shape
    a = Matrix(gather.data_ptr(), slots * capacity, k, gather.stride(1), gather.dtype, transposed=False)
    by_columns = lies_by_columns(weight)
    b = matrix_of_rows(weight.mT if by_columns else weight, transposed=by_columns)
    return a, b, b, matrix_of_rows(out)
