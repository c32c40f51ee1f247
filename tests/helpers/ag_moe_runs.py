"""What the tests of AllGatherMoE do on a rank."""

from __future__ import annotations

import torch
from moe_runs import (
    ExpertRuns,
    explained_error,
    of_all_ranks,
    products,
    random_choices,
    randoms,
    relative_error,
)
from operation_runs import device
from operations import HALF

from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.moe.ag_moe_kernel import CANDIDATES, all_gather_moe


class Gathering(ExpertRuns):
    """AllGatherMoE is opened with K and called with N."""

    name, kernel, candidates = "AllGatherMoE", all_gather_moe, CANDIDATES
    can_be_in_place = True

    def sizes(self, k, n):
        return k, n

    def open(self, tokens_per_rank, size, dtype=HALF, group=None, **named):
        return AllGatherMoE(tokens_per_rank, size, dtype, group, **named)

    def buffers(self, op):
        return (op._gather.local,)

    def operands(self, op, tokens, size, experts=3, topk=2, kind="any", group=None):
        count = tokens[op.rank]
        x = randoms(count, op._k, dtype=op._dtype)
        weight = randoms(experts, size, op._k, dtype=op._dtype)
        return x, weight, random_choices(count, experts, topk, kind)

    def new_out(self, op, tokens, operands):
        _, weight, ids = operands
        shape = (sum(tokens) * ids.shape[1], weight.shape[1])
        return torch.full(shape, float("nan"), dtype=op._dtype, device=device())

    def given(self, op, operands, *, told, in_place):
        x, weight, ids = operands
        if in_place:
            x = op.shard[: len(x)].copy_(x)
        return x, weight, ids.to(torch.int32) if told else ids

    def error_ratio(self, out, x, weight, ids, group=None):
        rows = torch.cat(of_all_ranks(x, group)).repeat_interleave(ids.shape[1], dim=0)
        wanted = products(rows, weight, torch.cat(of_all_ranks(ids, group)).reshape(-1))
        assert out.shape == wanted.shape
        return relative_error(out, wanted) / explained_error(out.dtype, 1, x.shape[1])

    def fresh_call(self, op, tokens, *, told=True, topk=2, ids=None):
        ids = random_choices(tokens[op.rank], 3, topk) if ids is None else ids.to(device())
        given = list(tokens) if told else None
        op(randoms(len(ids), op._k), randoms(3, 16, op._k), ids, tokens=given)


GATHERING = Gathering()
