"""The body for Hopper and Blackwell, on the host: whether it can run, its configs, the way to a launch."""

from __future__ import annotations

from ..compat import HAS_INLINE_PTX
from ..gemm.configs import any_width, blocks_of, class_of_chunk, gluon_candidate
from ..gemm.launch import can_take_chunks, constants_of_chunks, matrix_of_weight, tuned_over_chunks
from ..launches.settled import Tensors, TunedKernel
from ..matrices import Matrix, matrix_of_rows
from .call import Body, ScatterMemory, ScatterOperands
from .specialized_kernel import specialized_gemm_reduce_scatter

# The peers' sums lie in registers beside the accumulator, so pieces are narrow: wider ones spill.
CANDIDATES = [
    # A tuner's first run takes the first.
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 2)),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 2), group_m=16),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=8, store=(64, 1), group_m=4),
    gluon_candidate("cooperative", (256, 128, 64), 4, warps=8, store=(32, 2)),
    gluon_candidate("cooperative", (128, 128, 64), 5, warps=8, store=(64, 1), extra_n=64),
    gluon_candidate("cooperative", (128, 128, 64), 6, warps=8, store=(64, 1)),
    gluon_candidate("cooperative", (128, 256, 64), 4, warps=4, store=(64, 1)),  # Blackwell
    gluon_candidate("pingpong", (128, 128, 64), 5, warps=4, store=(32, 2)),
    gluon_candidate("pingpong", (128, 128, 64), 5, warps=4, store=(32, 2), group_m=16),
    gluon_candidate("pingpong", (64, 256, 64), 5, warps=4, store=(64, 1)),
    gluon_candidate("pingpong", (64, 128, 64), 6, warps=4, store=(64, 1)),
    # Few rows for each rank.
    gluon_candidate("cooperative", (64, 128, 64), 8, warps=4, store=(64, 2)),
    gluon_candidate("cooperative", (64, 128, 128), 4, warps=4, store=(64, 1)),
]
if HAS_INLINE_PTX:
    WIDTHS = (176, 192, 208, 224)
    CANDIDATES += [gluon_candidate(**any_width("cooperative", 128, width)) for width in WIDTHS]

# Rows of a chunk from which on each has its own launch. In one launch, programs that have left the peers'
# chunk wait, at their first own tile, until its last tile is computed and has travelled. Launches of 512
# and 768 rows take 12 to 23 % less, of 256 rows 9 % less to 4 % more (two ranks, docs/gemm_rs.md).
STEP_ROWS = 384

tuned = tuned_over_chunks(specialized_gemm_reduce_scatter, CANDIDATES, "STORES")

_KERNEL = TunedKernel(tuned, blocks_of, operation="GemmReduceScatter")


def can_run(operands: ScatterOperands, held: ScatterMemory) -> bool:
    """Return whether `SpecializedBody` takes these: this rank's own answer, by addresses and K."""
    a, out, addend = operands.a, operands.out, operands.addend
    by_pointers = held.staged.data_ptr() | (0 if addend is None else addend.data_ptr())
    matrices = _matrices(operands, held)
    return can_take_chunks(matrices, len(out), a.device, CANDIDATES) and by_pointers % 16 == 0


class SpecializedBody(Body):
    """Multiplies by the warp-specialised kernel; only where `can_run`. stores: sums for peers to them."""

    def __init__(self, operands: ScatterOperands, held: ScatterMemory, *, stores: bool = False) -> None:
        super().__init__(_KERNEL)
        self._matrices = _matrices(operands, held)  # as they lie: their addresses are of the first call
        a, rows = self._matrices[0], operands.out.shape[0]
        self._tensors = (held.table, *held[2:])
        self._sizes, self._further = (a.rows, operands.out.shape[1], a.columns), (held.partial.shape[1],)
        self.in_steps, self._size_class = rows >= STEP_ROWS, class_of_chunk(rows, CANDIDATES)
        self._constants = constants_of_chunks(self._matrices, operands.a.device) | {"STORES": stores}
        self._partial_at = held.partial.data_ptr()

    def _arguments(self, operands: ScatterOperands) -> tuple[tuple[int, ...], Tensors]:
        a, b, out = operands.a.data_ptr(), operands.weight.data_ptr(), operands.out.data_ptr()
        return (a, b, b, out, self._partial_at), operands[3:]


def _matrices(
    operands: ScatterOperands, held: ScatterMemory
) -> tuple[Matrix, Matrix, Matrix, Matrix, Matrix]:
    """Return A, B, B again for its further columns, C and the partial sums of all peers."""
    b, partial = matrix_of_weight(operands.weight), matrix_of_rows(held.partial.flatten(0, -2))
    return matrix_of_rows(operands.a), b, b, matrix_of_rows(operands.out), partial
