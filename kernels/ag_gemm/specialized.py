"""The host side of the warp-specialised family: whether it can run, its configs, and the way to a launch."""

from __future__ import annotations

import torch

from ..compat import HAS_INLINE_PTX
from ..epilogues import NO_ACTIVATION
from ..gemm.configs import any_width, blocks_of, class_of_chunk, gluon_candidate
from ..gemm.launch import can_take_chunks, constants_of_chunks, matrix_of_weight, tuned_over_chunks
from ..launches.settled import Tensors, TunedKernel
from ..matrices import Matrix, matrix_of_rows
from .call import Consumer, GatherMemory, Product
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

tuned = tuned_over_chunks(specialized_all_gather_gemm, CANDIDATES, "ACTIVATION")

_KERNEL = TunedKernel(tuned, blocks_of, operation="AllGatherGemm")


def can_run(gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> bool:
    """Return whether `SpecializedConsumer` takes these: this rank's own answer, by addresses and N."""
    matrices = _matrices(gather, weight, out)
    has_columns = weight.shape[0] > 1
    return has_columns and can_take_chunks(matrices, rows, gather.device, CANDIDATES)


class SpecializedConsumer(Consumer):
    """Multiplies in one kernel, whose load warp waits; only where `can_run`."""

    def __init__(self, product: Product, held: GatherMemory) -> None:
        super().__init__(_KERNEL)
        _, weight, out, epilogue, *_ = product
        gather, self._tensors = held.gather, (held.flags, held.errors)
        self._matrices = _matrices(gather, weight, out)  # as they lie: their addresses are of the first call
        self._gather_at, self._further = gather.data_ptr(), (gather.shape[1],)
        self._sizes = (len(out), len(weight), gather.shape[2])
        self._size_class = class_of_chunk(len(out) // held.world_size, CANDIDATES)
        activation = {"ACTIVATION": epilogue.activation or NO_ACTIVATION}
        self._constants = constants_of_chunks(self._matrices, gather.device) | activation

    def _arguments(self, operands: Product) -> tuple[tuple[int, ...], Tensors]:
        _, weight, out, ending, *_ = operands
        b = weight.data_ptr()
        return (self._gather_at, b, b, out.data_ptr()), (ending.scale_a, ending.scale_b, ending.bias)


def _matrices(
    gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Return A, B, B again for its further columns, and C."""
    world_size, capacity, k = gather.shape
    a = Matrix(gather.data_ptr(), world_size * capacity, k, gather.stride(1), gather.dtype, transposed=False)
    b = matrix_of_weight(weight)
    return a, b, b, matrix_of_rows(out)
