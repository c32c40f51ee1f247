"""The host side of Gluon kernels: TMA descriptors, scratch memory, the tuned kernel.

A `LaunchPlan` is that of one product, and depends on the layout of tensors: it is made once, and later calls
with tensors that lie alike execute it. The first launch of a shape tunes it; later ones take its config and
its compiled kernel directly. Nothing here keeps a caller's tensor.

At the end stands what kernels over chunks of rows share, those of `AllGatherGemm` and `GemmReduceScatter`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import triton

from ..configs import capability, take_first
from ..epilogues import GATED, NO_ACTIVATION, ONLY_SUMS, Epilogue
from ..launches.prepared import PlainLaunch
from ..launches.settled import Tensors, TunedKernel, TunedLaunch
from ..matrices import LINE_BYTES, Matrix, as_matrix, matrix_of_rows
from ..tensors import FP8, lies_by_columns
from .body import gemm
from .configs import GLUON_CANDIDATES, NAMES, blocks_of, class_of_rows, count_tiles
from .copies import copies_pay, copy_of, room_for, runs_along_columns
from .pruning import TYPE_NAMES, fewest_rows, prune, prune_chunks

INPUT_DTYPES = (torch.float16, torch.bfloat16, FP8)

Operands = TypeVar("Operands")

tuned_gemm = triton.autotune(
    configs=GLUON_CANDIDATES,
    key=[
        *("m_class", "n_class", "K", "wanted", "programs", "a_alignment", "b_alignment"),
        *("TRANS_A", "TRANS_B", "OUT", "DTYPE", "ACTIVATION"),  # and of scales and a bias
    ],
    prune_configs_by={"early_config_prune": prune},
)(gemm)


# Of which of A, B, B and C each descriptor is under a config: see `configs.set_blocks`.
_KERNEL = TunedKernel(
    tuned_gemm, blocks_of, sources_of=lambda kwargs: (0, 1, 0, 3) if kwargs["SWAP_AB"] else (0, 1, 2, 3)
)


@dataclass(eq=False)
class LaunchPlan:
    """The launch for tensors of one layout.

    A matrix is None where TMA cannot address it, and then it is copied.
    """

    sizes: dict[str, int]  # the kernel's, in the order of its parameters
    constants: dict[str, Any]  # that no config sets
    exchanged: bool  # out.T = b.T @ a.T is computed, and the matrices are those of b.T, a.T and out.T
    a: Matrix | None
    b: Matrix | None
    out: Matrix | None
    tuned: TunedLaunch | None = None  # made in the first call
    copies: dict[str, PlainLaunch] = field(default_factory=dict)  # these, too

    def launch(self, a: Matrix, b: Matrix, c: Matrix, epilogue: Epilogue) -> None:
        """Write C = A @ B, of matrices that lie alike in all calls, on the current stream of their device.

        The epilogue is of the caller's rows and columns: C's columns and rows where `exchanged`.
        """
        if self.tuned is None:
            numbers = tuple(self.sizes.values())
            self.tuned = TunedLaunch(_KERNEL, self._grid, self.constants, (a, b, b, c), numbers=numbers)
        bias, _, of_rows, of_columns = epilogue
        vectors = (of_columns, of_rows, bias, None) if self.exchanged else (of_rows, of_columns, None, bias)
        self.tuned((a.address, b.address, b.address, c.address), vectors, ())

    def copy(self, name: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a matrix to another; all copies of one name are of one layout."""
        copy = self.copies.get(name)
        if copy is None:
            copy = self.copies[name] = copy_of(source, target)
        copy(source, target)

    def padded(self, name: str, tensor: torch.Tensor) -> tuple[Matrix, torch.Tensor]:
        """Return a copy of A or B that TMA can address, and its memory; keep that until the launch."""
        transposed = self.constants[f"TRANS_{name}"]
        source = tensor.mT if transposed else tensor
        room = room_for(source.shape[0], source.shape[1], source.dtype, source.device)
        self.copy(name, source, room)
        return matrix_of_rows(room, transposed=transposed), room

    def _grid(self, meta: dict[str, Any]) -> tuple[int, int, int]:
        """Return how many programs run under a config."""
        tiles = count_tiles(meta, self.sizes)
        return (tiles if meta["VARIANT"] == "pipelined" else min(self.sizes["programs"], tiles)), 1, 1


def plan_launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    variant: str,
    programs: int,
    activation: str | None = None,
    *,
    tensor_memory: bool,
) -> LaunchPlan | None:
    """Return how to launch out = a @ b; None where TMA cannot address all tensors, and copies do not pay.

    Then the plain body computes it. On Blackwell nothing is copied.
    """
    c = as_matrix(out)
    exchanged = runs_along_columns(out) if c is None else c.transposed
    if exchanged and activation in GATED:  # gate and up would be rows of all tiles
        c, exchanged = None, False
    if exchanged:
        a, b, out = b.mT, a.mT, out.mT
        c = c and c._replace(transposed=False)  # the same memory, now the rows of `out`
    left, right = as_matrix(a), as_matrix(b)
    (m, k), n = a.shape, b.shape[1]
    is_copied = c is None or left is None or right is None
    if is_copied and (tensor_memory or not copies_pay(m, n, k)):
        return None
    sizes = {
        "M": m,
        "N": n,
        "K": k,
        "wanted": NAMES.index(variant),
        "programs": programs,
        "a_alignment": LINE_BYTES if left is None else left.alignment(),
        "b_alignment": LINE_BYTES if right is None else right.alignment(),
        # Of the caller's rows, which change from call to call.
        "m_class": m if exchanged else class_of_rows(m),
        "n_class": class_of_rows(n) if exchanged else n,
    }
    constants = {
        "TRANS_A": runs_along_columns(a) if left is None else left.transposed,
        "TRANS_B": runs_along_columns(b) if right is None else right.transposed,
        "TENSOR_MEMORY": tensor_memory,
        "OUT": TYPE_NAMES[out.dtype],
        "DTYPE": TYPE_NAMES[a.dtype],
        "ACTIVATION": activation or NO_ACTIVATION,
    }
    return LaunchPlan(sizes, constants, exchanged, left, right, c)


def execute(
    plan: LaunchPlan,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue = ONLY_SUMS,
) -> None:
    """Write a @ b, ended as planned, to `out`, for tensors that lie as those that the plan was made for."""
    room = None
    first, second = (b, a) if plan.exchanged else (a, b)
    left, right, c = _at(plan.a, first), _at(plan.b, second), _at(plan.out, out)
    if plan.exchanged and (left is None or right is None or c is None):
        a, b, out = b.mT, a.mT, out.mT
    if left is None:
        left, a = plan.padded("A", a)
    if right is None:
        right, b = plan.padded("B", b)
    if c is None:
        room = room_for(out.shape[0], out.shape[1], out.dtype, out.device)
        c = matrix_of_rows(room)
    plan.launch(left, right, c, epilogue)
    if room is not None:
        plan.copy("C", room, out)


def _at(matrix: Matrix | None, tensor: torch.Tensor) -> Matrix | None:
    """Return the matrix where this tensor, which lies alike, is."""
    return matrix and matrix._replace(address=tensor.data_ptr())


# ---- kernels over chunks of rows


@dataclass(frozen=True, eq=False)
class ChunkCall:
    """What is the same in launches of all layouts; an operation makes each once, as they are compared so."""

    world_size: int
    chunks: int  # how many the launch computes: all, or one
    programs: int  # the most that run at once
    numbers: tuple[int, ...]  # of the kernel, in front of its patience


class ChunkBody(abc.ABC, Generic[Operands]):
    """A kernel over chunks of rows, for operands that lie alike, of which it keeps no address.

    Operands: the tensors of a call. A subclass sets what its launches share: M, N and K of all chunks, the
    numbers between those and a call's, constants, the class of a chunk's rows; and, where there are any, the
    matrices of descriptors and the first tensors.
    """

    in_steps = False  # an eager call may launch it once for each chunk, as a captured call does
    _sizes: tuple[int, int, int]
    _further: tuple[int, ...]
    _constants: dict[str, Any]
    _size_class: int
    _matrices: tuple[Matrix, ...] = ()
    _tensors: tuple[torch.Tensor, ...] = ()
    _beside = 0  # programs that compute no tiles

    def __init__(self, kernel: TunedKernel) -> None:
        self._kernel = kernel
        self._launches: dict[ChunkCall, TunedLaunch] = {}

    def load(self, operands: Operands, call: ChunkCall, patience_ticks: int) -> None:
        """Load what `launch` would run, and write nothing."""
        self._launch_of(call).load(*self._arguments(operands), (patience_ticks, self._size_class))

    def launch(self, operands: Operands, call: ChunkCall, patience_ticks: int) -> None:
        """Enqueue the kernel on the current stream; patience_ticks: how long it waits for a peer."""
        launch = self._launches.get(call)
        if launch is None:
            launch = self._launches[call] = self._launch_of(call)
        launch(*self._arguments(operands), (patience_ticks, self._size_class))

    def _launch_of(self, call: ChunkCall) -> TunedLaunch:
        (rows, columns, _), world = self._sizes, call.world_size

        def grid(meta: dict[str, Any]) -> tuple[int, int, int]:
            width = meta["BLOCK_N"] + meta.get("EXTRA_N", 0)
            tiles = triton.cdiv(rows // world, meta["BLOCK_M"]) * triton.cdiv(columns, width)
            return self._beside + min(max(1, call.programs - self._beside), call.chunks * tiles), 1, 1

        constants, matrices = {"WORLD": world, **self._constants}, self._matrices
        numbers = (*self._sizes, *self._further, *call.numbers)
        return TunedLaunch(self._kernel, grid, constants, matrices, held=self._tensors, numbers=numbers)

    @abc.abstractmethod
    def _arguments(self, operands: Operands) -> tuple[tuple[int, ...], Tensors]:
        """Return the addresses of the matrices, and the tensors that a launch takes."""


def tuned_over_chunks(kernel: Any, candidates: list[triton.Config], *further: str) -> Any:
    """Return the tuner of a Gluon kernel; further: names in its key, beside types of tensors or None."""
    return triton.autotune(
        configs=candidates,
        key=["size_class", "N", "K", "DTYPE", "TRANS_B", *further],
        prune_configs_by={"early_config_prune": prune_chunks},
        do_bench=take_first,  # outside a tuned function: a launch ends when the peers push, after theirs
    )(kernel)


def matrix_of_weight(weight: torch.Tensor) -> Matrix:
    """Return a weight's rows, or its columns, whichever are contiguous."""
    by_columns = lies_by_columns(weight)
    return matrix_of_rows(weight.mT if by_columns else weight, transposed=by_columns)


def can_take_chunks(
    matrices: Sequence[Matrix],
    rows: int,
    device: torch.device,
    candidates: list[triton.Config],
) -> bool:
    """Return whether a GPU has a Gluon kernel for chunks of so many rows: TMA can address all matrices."""
    major, dtype = capability(device), matrices[0].dtype
    return (
        # In fp8, on Blackwell, the tensor cores alone are between a row's flag and who reads its scale.
        (major == 9 or (major == 10 and dtype != FP8))
        and dtype in INPUT_DTYPES
        and rows >= fewest_rows(candidates, tensor_memory=major == 10)
        and all(matrix.is_addressable() for matrix in matrices)
    )


def constants_of_chunks(matrices: Sequence[Matrix], device: torch.device) -> dict[str, Any]:
    """Return the constants that Gluon kernels over chunks of A and B have alike; matrices: both first."""
    a, b, *_ = matrices
    on_blackwell = capability(device) == 10
    return {"TENSOR_MEMORY": on_blackwell, "DTYPE": TYPE_NAMES[a.dtype], "TRANS_B": not b.transposed}
