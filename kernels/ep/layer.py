"""A layer of experts that live on different ranks, with SwiGLU inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .functions import combine, dispatch, matmul
from .operation import ExpertParallel


class ExpertParallelMoE(nn.Module):
    """The experts of this rank, between a dispatch and a combine; the router stays outside.

    y[t] = sum over choices j of topk_weights[t, j] * w2[e] (silu(w1[e] x[t]) * w3[e] x[t]) with e =
    topk_ids[t, j]. This rank's experts: w1, w3 [experts / W, intermediate, hidden], w2 [experts / W, hidden,
    intermediate]. Layers that run one after another may share `op`.
    """

    def __init__(self, op: ExpertParallel, intermediate: int) -> None:
        super().__init__()
        self.op = op
        experts, hidden = op.experts // op.world_size, op.hidden

        def weight(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(experts, rows, columns, dtype=op.dtype, device=op.device))

        self.w1, self.w3 = weight(intermediate, hidden), weight(intermediate, hidden)
        self.w2 = weight(hidden, intermediate)
        for each in self.parameters():
            nn.init.normal_(each, std=each.shape[2] ** -0.5)

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden] for x [T, hidden], topk_ids and topk_weights [T, topk]."""
        d = dispatch(self.op, x, topk_ids)
        gate, up = (matmul(self.op, d.rows, weight, d) for weight in (self.w1, self.w3))
        return combine(self.op, matmul(self.op, F.silu(gate) * up, self.w2, d), d, topk_weights)
