"""What the tests of GemmReduceScatter do on a rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from operation_runs import device
from operations import HALF, DenseRuns, factors, sums_of_ranks

from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.plain import CANDIDATES, gemm_reduce_scatter


class ScatteringSums(DenseRuns):
    """GemmReduceScatter is opened with N and called with K."""

    name, kernel, candidates = "GemmReduceScatter", gemm_reduce_scatter, CANDIDATES

    def sizes(self, k, n):
        return n, k

    def open(self, rows, size, dtype=HALF, group=None, **named):
        world = dist.get_world_size(group) if dist.is_initialized() else 1
        return GemmReduceScatter(world * rows, size, dtype, group, **named)

    def buffers(self, op):
        return op._staged.local, op._partial

    def operands(self, op, rows, size, experts=3, topk=2, kind="any", group=None):
        return factors(op.world_size * self.rows_of(rows), op._n, size, op._dtype)

    def new_out(self, op, rows, operands):
        shape = len(operands[0]) // op.world_size, op._n
        return torch.full(shape, float("nan"), dtype=op._dtype, device=device())

    def error_ratio(self, out, a, weight, group=None):
        """Rounding each rank's part to the type costs at most its eps, and so does rounding the sum, which
        may be much smaller than its parts; each product is added in float32."""
        world, rank = (dist.get_world_size(group), dist.get_rank(group)) if dist.is_initialized() else (1, 0)
        wanted, of_parts, of_products = sums_of_ranks(a, weight, group).chunk(world, dim=1)[rank]
        rounded = torch.finfo(out.dtype).eps * (wanted.abs() + of_parts)
        explained = rounded + torch.finfo(torch.float32).eps * of_products
        ratio = float((out.float() - wanted).norm() / explained.norm())
        return ratio if math.isfinite(ratio) else math.inf  # max() may pass a NaN over


SCATTERING_SUMS = ScatteringSums()
