"""Shared by both kernels of `GemmAllReduce`: the tail (residual, RMSNorm), the candidates, the launch.

A kernel's parameters are its own tensors, the four of `Tail`, its own sizes, those of `RowsLaunch`, the rank,
patience and eps. A row is summed in float32 and rounded once, and the norm is that of the rounded sum.

Measured (two H100, 2026-11-24, in graphs, 5 shapes of 1 to 256 rows): a call is 1.11 times as fast as cuBLAS
and NCCL in the geometric mean, with residual and norm 1.25. Rejected: a norm whose warps are tuned, as ranks
that run different candidates would add up squares in different orders.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..configs import INTERPRETED, not_too_large
from ..gemm.configs import class_of_rows
from ..launches.settled import TunedKernel, TunedLaunch

WARPS_OF_NORM = (1, 2, 4, 8, 16, 32)
MOST_COLUMNS_OF_NORM = 32768  # above half of it registers spill
VALUES_OF_THREAD = 8  # of a row whose norm is taken
MOST_PROGRAMS = 1 << 12  # of a launch


Place = tuple[int, int, int]  # the rank, the number of ranks, that of SMs
# Of a call: residual; the norm's weight; where the norm goes, or else the sum; where the sum goes beside it.
Ends = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor | None]


class Tail(NamedTuple):
    """Operands and results of the tail, as a kernel has them."""

    residual_ptr: Any  # [m, N], rows stride_residual apart, if HAS_RESIDUAL
    stride_residual: Any
    weight_ptr: Any  # [N], if NORM
    sum_ptr: Any  # [rows, N], contiguous: the sum, if NORM
    out_ptr: Any  # [rows, N], rows stride_out apart: the norm, or else the sum
    stride_out: Any
    eps: Any


@triton.jit
def end_row(total, at, row, cols, mask, N, is_lost, tail, HAS_RESIDUAL: tl.constexpr, NORM: tl.constexpr):
    """Apply the tail to columns of a float32 sum, to all of them if NORM, and write them.

    at: the row among all m, row: that of `out`. The norm's weight is loaded last: held longer, it spills.
    """
    if HAS_RESIDUAL:
        residual_row_ptr = tail.residual_ptr + tl.cast(at, tl.int64) * tail.stride_residual
        total += tl.load(residual_row_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    total = tl.where(is_lost != 0, float("nan"), total)
    if NORM:
        rounded = total.to(tail.sum_ptr.dtype.element_ty)
        tl.store(tail.sum_ptr + tl.cast(row, tl.int64) * N + cols, rounded, mask=mask)
        value = rounded.to(tl.float32)
        squares = tl.where(mask, value * value, 0.0)
        scale = tl.rsqrt(tl.sum(squares, axis=0) / N + tail.eps)
        total = value * scale * tl.load(tail.weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = tail.out_ptr + tl.cast(row, tl.int64) * tail.stride_out + cols
    tl.store(out_ptrs, total.to(tail.out_ptr.dtype.element_ty), mask=mask)


def candidate(block_n: int, per_sm: int, warps: int) -> triton.Config:
    """Return the config of sums in blocks of columns; block_n = 0: of rows with their norm."""
    return triton.Config({"BLOCK_N": block_n, "PER_SM": per_sm}, num_warps=warps, num_stages=1)


CPU_CANDIDATES = [
    candidate(32, 1, 4),
    candidate(16, 2, 4),
    *(candidate(0, per_sm, 1) for per_sm in (1, 2)),
]


def with_norms(sums: list[triton.Config]) -> list[triton.Config]:
    """Return the candidates of a kernel: those of sums, and of norms with each number of warps."""
    norms = [candidate(0, per_sm, warps) for warps in WARPS_OF_NORM for per_sm in (1, 2, 4)]
    return CPU_CANDIDATES if INTERPRETED else [*sums, *norms]


def warps_of_norm(columns: int) -> int:
    """Return how many warps take a norm of so many columns, whatever candidate runs."""
    if INTERPRETED:
        return 1
    row = triton.next_power_of_2(columns)
    return min(max(row // (32 * VALUES_OF_THREAD), WARPS_OF_NORM[0]), WARPS_OF_NORM[-1])


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Return the candidates for rows with a norm, or for those without; never none."""
    args = {**named_args, **kwargs}
    if args["NORM"]:
        wanted = [each for each in configs if not each.kwargs["BLOCK_N"]]
        return [each for each in wanted if each.num_warps == warps_of_norm(args["N"])] or configs
    wanted = [each for each in configs if each.kwargs["BLOCK_N"]]
    return not_too_large(wanted, BLOCK_N=args["N"]) or configs


class RowsLaunch:
    """Launches a kernel that writes `rows` rows, on the current stream; it is tuned as `of_all` rows are.

    held, sizes: the kernel's own tensors and numbers; own: its constants. `ends` are a call's, of which none
    is kept: others that lie alike may be launched with.
    """

    def __init__(
        self,
        kernel: TunedKernel,
        place: Place,
        held: tuple[torch.Tensor, ...],
        sizes: tuple[int, ...],
        ends: Ends,
        *,
        rows: int,
        of_all: int,
        **own: Any,
    ) -> None:
        (rank, world_size, sms), (residual, norm_weight, out, _), n = place, ends, ends[2].shape[1]
        has_norm = norm_weight is not None
        constants = {"WORLD": world_size, **own, "HAS_RESIDUAL": residual is not None, "NORM": has_norm}
        constants["ROW"] = triton.next_power_of_2(n) if has_norm else 1

        def grid(meta: dict[str, Any]) -> tuple[int, int, int]:
            """Return how many programs run: at most the blocks of all rows."""
            blocks = triton.cdiv(n, meta["BLOCK_N"]) if meta["BLOCK_N"] else 1
            return max(1, min(rows * blocks, meta["PER_SM"] * sms, MOST_PROGRAMS)), 1, 1

        strides = (out if residual is None else residual).stride(0), out.stride(0)
        numbers = (*sizes, class_of_rows(of_all), n, *strides, rank)
        self._launch = TunedLaunch(kernel, grid, constants, held=held, numbers=numbers)

    def __call__(self, ends: Ends, patience_ticks: int, eps: float) -> None:
        residual, norm_weight, out, sums = ends
        if residual is None or norm_weight is None or sums is None:  # the kernel knows which are none
            ends = tuple([out if each is None else each for each in ends])  # type: ignore[assignment]
        self._launch((), ends, (patience_ticks, eps))
