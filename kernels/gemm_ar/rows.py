"""What the kernels of `GemmAllReduce` share: how a row ends, and the candidates that may end it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..configs import INTERPRETED

WARPS_OF_NORM = (1, 2, 4, 8, 16, 32)
MOST_COLUMNS_OF_NORM = 32768  # above half of it registers spill
VALUES_OF_THREAD = 8  # of a row whose norm is taken


class Ending(NamedTuple):
    """What becomes of sums; the norm's weight and where the sums go are both given, or neither."""

    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    eps: float = 0.0


class Tail(NamedTuple):
    """The same, as a kernel knows it."""

    residual_ptr: Any  # [m, N], rows stride_residual apart, if HAS_RESIDUAL
    stride_residual: Any
    weight_ptr: Any  # [N], if NORM
    sum_ptr: Any  # [rows, N], contiguous: the sum, if NORM
    out_ptr: Any  # [rows, N], rows stride_out apart: the norm, or else the sum
    stride_out: Any
    eps: Any


@triton.jit
def end_row(total, at, row, cols, mask, N, is_lost, tail, HAS_RESIDUAL: tl.constexpr, NORM: tl.constexpr):
    """Write `row` of the results: columns of a float32 sum, of row `at`; if NORM they are all of the row."""
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
    smallest = min((each.kwargs["BLOCK_N"] for each in wanted), default=0)
    most = max(smallest, triton.next_power_of_2(args["N"]))
    return [each for each in wanted if each.kwargs["BLOCK_N"] <= most] or configs


def width_of_norm(columns: int, *, has_norm: bool) -> int:
    """Return the block that holds a row, if its norm is taken; else 1."""
    return triton.next_power_of_2(columns) if has_norm else 1


def programs_of(rows: int, columns: int, sms: int, meta: dict[str, Any]) -> int:
    """Return how many programs end so many rows under a config."""
    blocks = triton.cdiv(columns, meta["BLOCK_N"]) if meta["BLOCK_N"] else 1
    return max(1, min(rows * blocks, meta["PER_SM"] * sms))
