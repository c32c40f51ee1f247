"""What the tests of MoEReduceScatter do on a rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from moe_runs import (
    HALF,
    ExpertRuns,
    explained_error,
    of_all_ranks,
    products,
    random_choices,
    randoms,
    relative_error,
)
from operation_runs import device

from dist_autotune.kernels.moe.moe_rs_kernel import CANDIDATES, moe_reduce_scatter
from dist_autotune.kernels.moe_rs import MoEReduceScatter


class Scattering(ExpertRuns):
    """MoEReduceScatter is opened with N and called with this rank's part of K."""

    name, kernel, candidates = "MoEReduceScatter", moe_reduce_scatter, CANDIDATES
    choices_copied = 2  # ids and weights
    lost_push = "did not push its sums for chunk 0 in time"

    def begin(self, rank, candidate=None):
        """Do that; and memory that torch hands out is NaN from now on, so products that are read before they
        are stored show. `torch.set_deterministic_debug_mode("default")` ends it."""
        torch.set_deterministic_debug_mode("warn")
        super().begin(rank, candidate)

    def sizes(self, k, n):
        return n, k

    def open(self, tokens_per_rank, size, *options, **named):
        return MoEReduceScatter(tokens_per_rank, size, *options, **named)

    def buffers(self, op):
        return op._staged.local, op._partial, op._weights.local

    def operands(self, op, tokens, size, experts, topk, kind="any", group=None):
        """Return y, weight, ids and weights; a dropped choice has NaN for its row and its weight."""
        ids = random_choices(tokens[op.rank], experts, topk, kind)
        weights = torch.randn(ids.shape, device=device())
        weights[ids < 0] = float("nan")
        y = randoms(sum(tokens) * topk, size, dtype=op._dtype)
        y[torch.cat(of_all_ranks(ids, group)).reshape(-1) < 0] = float("nan")
        return y, randoms(experts, op._n, size, dtype=op._dtype), ids, weights

    def new_out(self, op, tokens, operands):
        return torch.full((tokens[op.rank], op._n), float("nan"), dtype=op._dtype, device=device())

    def error_ratio(self, out, y, weight, ids, weights, group=None):
        """Three roundings: of each product, of each rank's part of a sum, of the sum."""
        counts, topk = of_all_ranks(len(ids), group), ids.shape[1]
        all_ids = torch.cat(of_all_ranks(ids, group))
        scale = torch.where(all_ids < 0, 0.0, torch.cat(of_all_ranks(weights, group)))
        parts = products(y, weight, all_ids.reshape(-1)) * scale.reshape(-1, 1)
        total = parts.reshape(-1, topk, weight.shape[1]).sum(dim=1)
        if dist.is_initialized():
            dist.all_reduce(total, group=group)
        begin = sum(counts[: dist.get_rank(group)]) if dist.is_initialized() else 0
        inner = topk * sum(of_all_ranks(y.shape[1], group))
        wanted = total[begin : begin + len(ids)]
        assert out.shape == wanted.shape
        return relative_error(out, wanted) / explained_error(out.dtype, 3, inner)

    def fresh_call(self, op, tokens, *, told=True, topk=2, ids=None, rows=None):
        ids = random_choices(tokens[op.rank], 3, topk) if ids is None else ids.to(device())
        y = randoms(sum(tokens) * topk if rows is None else rows, 16)
        weights = torch.ones(ids.shape, device=device())
        op(y, randoms(3, op._n, 16), ids, weights, tokens=list(tokens) if told else None)


SCATTERING = Scattering()


def same_call_twice(rank):
    SCATTERING.begin(rank)
    with SCATTERING.open(40, 24, HALF) as op:
        given = SCATTERING.operands(op, [40, 31], 16, 3, 3)
        first = op(*given)
        SCATTERING.call_and_compare(op, [5, 40], 16, 3, 2)
        return torch.equal(first, op(*given))
