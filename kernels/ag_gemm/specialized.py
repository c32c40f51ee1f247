"""The host side of the warp-specialised family: whether it can run, its configs, and the way to a launch."""

from __future__ import annotations

import functools

import torch
import triton

from ..compat import HAS_INLINE_PTX
from ..configs import capability, take_first
from ..gemm.configs import any_width, blocks_of, class_of_chunk, gluon_candidate
from ..gemm.pruning import TYPE_NAMES, ChunkShape, fewest_rows, prune_chunks
from ..launches.settled import SettledLaunches, ShapeLaunch
from ..matrices import Matrix, describe_at, matrix_of_rows
from ..tensors import FP8, lies_by_columns
from .call import GatherCall
from .specialized_kernel import specialized_all_gather_gemm

# Picked by sessions in 22 contexts; tiles of further shapes; and 256 x 192, not yet timed in this kernel: for
# large products alone sessions pick it where 128 x 256 leaves a last wave nearly empty.
CANDIDATES = [
    # A tuner's first run takes the first.
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1)),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1), group_m=16),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(128, 1), group_m=4),
    gluon_candidate("cooperative", (256, 128, 64), 3, warps=8, store=(64, 1), extra_n=64),
    gluon_candidate("cooperative", (128, 128, 64), 6, warps=8, store=(64, 1)),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=4, store=(64, 1)),  # Blackwell
    gluon_candidate("pingpong", (128, 128, 64), 5, warps=4, store=(64, 2)),
    gluon_candidate("pingpong", (128, 128, 64), 4, warps=4, store=(64, 1), extra_n=64),
    gluon_candidate("pingpong", (64, 256, 64), 5, warps=4, store=(64, 1)),
    gluon_candidate("pingpong", (64, 128, 64), 6, warps=4, store=(64, 1)),
    gluon_candidate("cooperative", (64, 128, 128), 4, warps=4, store=(64, 1)),  # few rows
]
if HAS_INLINE_PTX:
    WIDTHS = {"pingpong": (144, 160, 176), "cooperative": (208, 224)}
    CANDIDATES += [
        gluon_candidate(**any_width(variant, 128, width))
        for variant, widths in WIDTHS.items()
        for width in widths
    ]

OPERAND_TYPES = (torch.float16, torch.bfloat16, FP8)

tuned = triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "K", "DTYPE", "TRANS_B", "ACTIVATION"],  # and the type of a bias, if any
    prune_configs_by={"early_config_prune": prune_chunks},
    do_bench=take_first,  # outside a tuned function: a launch waits for peers, who would pick another config
)(specialized_all_gather_gemm)


@functools.lru_cache(maxsize=4096)
def _size_class(rows: int) -> int:
    return class_of_chunk(rows, CANDIDATES)


CONSTANTS = ("TENSOR_MEMORY", "DTYPE", "TRANS_B", "ACTIVATION")

_SETTLED: SettledLaunches[ChunkShape] = SettledLaunches(tuned, blocks_of, operation="AllGatherGemm")


def can_run(gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> bool:
    """Return whether `SpecializedConsumer` takes these: a GPU with a body, TMA's alignment, a tile's rows.

    The answer depends on addresses and on N: it is this rank's own.
    """
    major = capability(gather.device)
    if major not in (9, 10) or gather.dtype not in OPERAND_TYPES:
        return False
    if major == 10 and gather.dtype == FP8:
        return False  # between the flag of a row and whoever reads its scale are the tensor cores alone
    if rows < fewest_rows(CANDIDATES, tensor_memory=major == 10) or weight.shape[0] == 1:
        return False
    return all(matrix.is_addressable() for matrix in _matrices(gather, weight, out))


class SpecializedConsumer:
    """Multiplies in one kernel, whose load warp waits; only where `can_run`."""

    def __init__(self, gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self._matrices = _matrices(gather, weight, out)  # as they lie: their addresses are of the first call
        a, b, _, c = self._matrices
        self._sizes = (c.rows, weight.shape[0], a.columns)
        self._compiled_for = (a.dtype, weight.device, CONSTANTS)
        self._constants = (capability(weight.device) == 10, TYPE_NAMES[a.dtype], not b.transposed)
        self._launches: dict[int, ShapeLaunch[ChunkShape]] = {}  # by the number of programs

    def load(self, gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, call: GatherCall) -> None:
        shape = self._shape_of(call)
        ending = call.epilogue
        tensors = (call.flags, call.errors, ending.scale_a, ending.scale_b, ending.bias)
        scalars = (*self._sizes, call.capacity, call.rank, call.patience_ticks, _size_class(call.rows))
        b = weight.data_ptr()
        descriptors = describe_at(self._matrices, (gather.data_ptr(), b, b, out.data_ptr()))
        _SETTLED.load(shape, (*descriptors, *tensors, *scalars))

    def launch(self, gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, call: GatherCall) -> None:
        launch = self._launches.get(call.programs)
        if launch is None:
            held, numbers = (call.flags, call.errors), (*self._sizes, call.capacity, call.rank)
            launch = ShapeLaunch(_SETTLED, self._shape_of(call), self._matrices, held=held, numbers=numbers)
            self._launches[call.programs] = launch
        b, ending = weight.data_ptr(), call.epilogue
        tensors = (ending.scale_a, ending.scale_b, ending.bias)
        scalars = (call.patience_ticks, _size_class(call.rows))
        launch((gather.data_ptr(), b, b, out.data_ptr()), tensors, scalars)

    def _shape_of(self, call: GatherCall) -> ChunkShape:
        world, kind = call.world_size, call.epilogue.kind()
        of_launch = (world, world, call.programs, _size_class(call.rows))
        constants = (*self._constants, kind.activation)
        return ChunkShape(*self._sizes, *of_launch, *self._compiled_for, constants, (kind,))


def _matrices(
    gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Return A, B, B again for its further columns, and C."""
    world_size, capacity, k = gather.shape
    a = Matrix(gather.data_ptr(), world_size * capacity, k, gather.stride(1), gather.dtype, transposed=False)
    by_columns = lies_by_columns(weight)
    b = matrix_of_rows(weight.mT if by_columns else weight, transposed=by_columns)
    return a, b, b, matrix_of_rows(out)
