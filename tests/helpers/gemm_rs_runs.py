"""What the tests of GemmReduceScatter do on a rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from operation_runs import device, seed_and_leave_one, synchronize
from operations import HALF, DenseRuns

from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.plain import CANDIDATES, gemm_reduce_scatter


def begin(rank: int, candidate: int | None = None) -> None:
    """Seed this rank and leave its kernel one candidate: by default another one on each rank."""
    seed_and_leave_one(rank, gemm_reduce_scatter, CANDIDATES, candidate)


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fresh random a [m, k] and weight [n, k]."""
    return torch.randn(m, k, device=device()).to(dtype), torch.randn(n, k, device=device()).to(dtype)


def poison(op: GemmReduceScatter) -> None:
    """Fill the buffers with NaN, so that whatever is read before it arrives shows."""
    for buffer in (op._staged.local, op._partial):
        buffer.fill_(float("nan"))
    synchronize()


def error_ratio(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, group=None) -> float:
    """Return the error against float32 as a multiple of what the arithmetic explains.

    Rounding each rank's part to the type costs at most its eps, and so does rounding the sum, which may be
    much smaller than its parts; products of halves are exact in float32, and each is added there.
    """
    a, weight = a.float(), weight.float()
    part = a @ weight.T
    sums = torch.stack([part, part.abs(), a.abs() @ weight.abs().T])
    if dist.is_initialized():
        dist.all_reduce(sums, group=group)
    world, rank = (dist.get_world_size(group), dist.get_rank(group)) if dist.is_initialized() else (1, 0)
    wanted, of_parts, of_products = sums.chunk(world, dim=1)[rank]
    rounded = torch.finfo(out.dtype).eps * (wanted.abs() + of_parts)
    explained = rounded + torch.finfo(torch.float32).eps * of_products
    ratio = float((out.float() - wanted).norm() / explained.norm())
    return ratio if math.isfinite(ratio) else math.inf  # max() may pass a NaN over


def call_and_compare(op: GemmReduceScatter, m: int, k: int, *, group=None) -> float:
    """Return the error of one call with fresh inputs and an output full of NaN."""
    a, weight = operands(m, op._n, k, op._dtype)
    out = torch.full((m // op.world_size, op._n), float("nan"), dtype=op._dtype, device=a.device)
    assert op(a, weight, out) is out
    return error_ratio(out, a, weight, group)


class ScatteringSums(DenseRuns):
    """GemmReduceScatter is opened with N and called with K."""

    name, kernel, candidates = "GemmReduceScatter", gemm_reduce_scatter, CANDIDATES
    begin, poison, error_ratio = (staticmethod(each) for each in (begin, poison, error_ratio))

    def sizes(self, k, n):
        return n, k

    def open(self, rows, size, dtype=HALF, group=None, **named):
        world = dist.get_world_size(group) if dist.is_initialized() else 1
        return GemmReduceScatter(world * rows, size, dtype, group, **named)

    def buffers(self, op):
        return op._staged.local, op._partial

    def operands(self, op, rows, size, experts=3, topk=2, kind="any", group=None):
        return operands(op.world_size * self.rows_of(rows), op._n, size, op._dtype)

    def new_out(self, op, rows, operands):
        shape = len(operands[0]) // op.world_size, op._n
        return torch.full(shape, float("nan"), dtype=op._dtype, device=device())


SCATTERING_SUMS = ScatteringSums()
