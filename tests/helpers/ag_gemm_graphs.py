"""Captured calls of AllGatherGemm: replayed, their results kept and compared in the end."""

from __future__ import annotations

import torch
from ag_gemm_runs import error_ratio, gathered_by_torch
from operation_runs import device

HALF = torch.float16
PATIENCE_S = 60.0  # less than a test has


class Captured:
    """A call in a graph, with the tensors that a replay reads and writes."""

    def __init__(self, op, m, n, *, in_place, call=None):
        k, dtype = op.shard.shape[1], op.shard.dtype
        self.op = op
        self.a_shard = op.shard[:m] if in_place else torch.empty(m, k, dtype=dtype, device=device())
        self.weight = torch.empty(n, k, dtype=dtype, device=device())
        self.out = torch.empty(m * op.world_size, n, dtype=dtype, device=device())
        self.call = call or op
        self.refresh()
        self.call(self.a_shard, self.weight, self.out)  # loads the kernel

    def capture(self):
        self.call(self.a_shard, self.weight, self.out)
        self.gathered = self.op.gathered

    def refresh(self):
        """Enqueue new inputs and NaN for the output."""
        self.a_shard.normal_()
        self.weight.normal_()
        self.out.fill_(float("nan"))

    def results(self):
        """Return copies of the inputs and results of the last replay; waits for nothing."""
        return self.a_shard.clone(), self.weight.clone(), self.out.clone(), self.gathered.clone()


def graph_of(*calls):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call.capture()
    return graph


def errors_of(kept):
    errors = []
    for a_shard, weight, out, gathered in kept:
        full = gathered_by_torch(a_shard)
        right = gathered is None or torch.equal(gathered, full)
        errors.append(error_ratio(out, full, weight) if right else float("inf"))
    return errors
