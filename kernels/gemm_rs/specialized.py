"""The body for Hopper and Blackwell, on the host: whether it can run, its configs, the way to a launch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from ..compat import HAS_INLINE_PTX
from ..configs import capability, not_too_large, shared_memory_bytes, take_first
from ..gemm.configs import any_width, blocks_of, class_of_chunk, gluon_candidate
from ..gemm.pruning import TYPE_NAMES, fits
from ..launch import SettledLaunches
from ..matrices import Block, Matrix, describe, matrix_of_rows, set_block
from ..tensors import lies_by_columns
from .call import Call, Held, Operands
from .specialized_kernel import specialized_gemm_reduce_scatter


def blocks_of_all(args: dict[str, Any]) -> dict[str, Block]:
    """Return the block of each descriptor of the kernel, in the order of its parameters."""
    blocks = blocks_of(args)
    return blocks | {"partial_desc": blocks["c_desc"]}


def _set_blocks(args: dict[str, Any]) -> None:
    for name, block in blocks_of_all(args).items():
        set_block(args[name], block)


def _candidate(*args: Any, joined: bool = False, **options: Any) -> triton.Config:
    config = gluon_candidate(*args, **options)
    config.kwargs["JOINED"] = joined
    config.pre_hook = _set_blocks
    return config


# What the epilogue adds lies beside the accumulator, so pieces are narrow: wider ones spill.
CANDIDATES = [
    # The first is what a tuner's first run takes.
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 2)),
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 2), group_m=16),
    _candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 1), group_m=4),
    _candidate("cooperative", (256, 128, 64), 4, warps=8, store=(32, 2)),
    _candidate("cooperative", (128, 128, 64), 5, warps=8, store=(64, 1), extra_n=64),
    _candidate("cooperative", (128, 128, 64), 6, warps=8, store=(64, 1)),
    _candidate("cooperative", (128, 256, 64), 4, warps=4, store=(64, 1)),  # Blackwell
    _candidate("pingpong", (128, 128, 64), 5, warps=4, store=(32, 2)),
    _candidate("pingpong", (128, 128, 64), 5, warps=4, store=(32, 2), group_m=16),
    _candidate("pingpong", (64, 256, 64), 5, warps=4, store=(64, 1)),
    _candidate("pingpong", (64, 128, 64), 6, warps=4, store=(64, 1)),
    # Few rows for each rank.
    _candidate("cooperative", (64, 128, 64), 8, warps=4, store=(64, 2)),
    _candidate("cooperative", (64, 128, 128), 4, warps=4, store=(64, 1)),
]
if HAS_INLINE_PTX:
    WIDTHS = (176, 192, 208, 224)
    CANDIDATES += [_candidate(**any_width("cooperative", 128, width), joined=True) for width in WIDTHS]


def fewest_rows(*, tensor_memory: bool) -> int:
    """Return how many rows a chunk has at least: a tile must not be higher than a chunk."""
    return 128 if tensor_memory else min(config.kwargs["BLOCK_M"] for config in CANDIDATES)


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Return the candidates that this call's shape and device allow.

    It looks at what all ranks share, save K, so ranks with equal weights keep equal candidates.
    """
    args = {**named_args, **kwargs}
    rows, limit = args.get("size_class") or args["M"] // args["WORLD"], shared_memory_bytes()
    usable = [
        config
        for config in configs
        if config.kwargs["BLOCK_M"] <= rows
        and fits(config, 2, limit, tensor_memory=args["TENSOR_MEMORY"])
        and (args["TRANS_B"] or not config.kwargs["JOINED"])
    ]
    return not_too_large(usable, BLOCK_N=args["N"], BLOCK_K=args["K"])


OPERAND_TYPES = (torch.float16, torch.bfloat16)

tuned = triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "K", "DTYPE", "TRANS_B"],  # and the type of an addend, if any
    prune_configs_by={"early_config_prune": prune},
    do_bench=take_first,  # outside a tuned function: a launch ends when the peers have pushed, behind theirs
)(specialized_gemm_reduce_scatter)


@functools.lru_cache(maxsize=4096)
def _size_class(rows: int) -> int:
    return class_of_chunk(rows, CANDIDATES)


class Shape(NamedTuple):
    """What the choice of a config and the compiled kernel depend on. Each call hashes one: no dataclass."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    by_columns: bool
    has_addend: bool
    world_size: int
    chunks: int  # of one launch
    programs: int

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
        }

    def grid(self, meta: dict[str, Any]) -> tuple[int, int, int]:
        rows = triton.cdiv(self.m // self.world_size, meta["BLOCK_M"])
        columns = triton.cdiv(self.n, meta["BLOCK_N"] + meta["EXTRA_N"])
        return min(self.programs, self.chunks * rows * columns), 1, 1


_SETTLED: SettledLaunches[Shape] = SettledLaunches(tuned, blocks_of_all, operation="GemmReduceScatter")


def can_run(operands: Operands, held: Held) -> bool:
    """Return whether `SpecializedBody` takes these: a GPU with a body, TMA's alignment, a tile's rows.

    The answer depends on addresses and on K: it is this rank's own.
    """
    a, _weight, out, addend = operands
    major = capability(a.device)
    if major not in (9, 10) or a.dtype not in OPERAND_TYPES:
        return False
    if out.shape[0] < fewest_rows(tensor_memory=major == 10):
        return False
    by_pointers = held.staged.data_ptr() | (0 if addend is None else addend.data_ptr())
    return by_pointers % 16 == 0 and all(matrix.is_addressable() for matrix in _matrices(operands, held))


class SpecializedBody:
    """Multiplies by the warp-specialised kernel; only where `can_run`."""

    def __init__(self, operands: Operands, held: Held) -> None:
        self._matrices = _matrices(operands, held)  # as they lie: their addresses are of the first call
        a, b, *_ = self._matrices
        sizes = (a.rows, operands.out.shape[1], a.columns)
        has_addend = operands.addend is not None
        self._of_all = (*sizes, a.dtype, operands.a.device, b.transposed, has_addend)

    def launch(self, operands: Operands, call: Call) -> None:
        shape = Shape._make((*self._of_all, call.world_size, call.chunks, call.programs))
        held, addend = call.held, operands.addend
        tensors = (held.staged, held.flags, held.counts, held.errors, addend)
        scalars = (call.capacity, call.first, call.chunks, call.rank, call.patience_ticks)
        arguments = (*tensors, shape.m, shape.n, shape.k, *scalars, shape.size_class())
        settled = _SETTLED.find(shape)
        if settled is not None:
            a, b, out, partial = (each.data_ptr() for each in (*operands[:3], held.partial))
            settled.prepared(self._matrices)((a, b, b, out, partial), *arguments)
            return
        any_block = Block(8, 64)  # the config's `pre_hook` sets the right ones
        descriptors = [describe(matrix, any_block) for matrix in _matrices(operands, held)]
        constants = shape.constants()
        compiled = tuned[shape.grid](*descriptors, *arguments, **constants)
        _SETTLED.remember(shape, compiled, constants, tensors)


def _matrices(operands: Operands, held: Held) -> tuple[Matrix, Matrix, Matrix, Matrix, Matrix]:
    """Return A, B, B again for its further columns, C and the partial sums of all peers."""
    by_columns = lies_by_columns(operands.weight)
    weight = operands.weight.mT if by_columns else operands.weight
    b = matrix_of_rows(weight, transposed=by_columns)
    partial = matrix_of_rows(held.partial.flatten(0, -2))
    return matrix_of_rows(operands.a), b, b, matrix_of_rows(operands.out), partial
