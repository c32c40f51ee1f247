"""`dispatch` and `combine` of an `ExpertParallel` with gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .launches import Dispatched
from .operation import ExpertParallel


class _Dispatch(torch.autograd.Function):
    """The gradient of a token is the sum of those of its rows: a combine with weights of 1."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, op: ExpertParallel, topk_ids: torch.Tensor, kept: list
    ) -> torch.Tensor:
        d = op.dispatch(x.detach(), topk_ids)
        kept.append(d)
        ctx.op, ctx.d = op, dataclasses.replace(d, rows=d.rows.new_empty(0).expand(d.rows.shape[0], 0))
        ctx.hidden = x.shape[1]
        return d.rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad = grad.contiguous()
        d = ctx.d.with_rows(grad)
        ones = torch.ones(d.topk_ids.shape, dtype=torch.float32, device=grad.device)
        return ctx.op.combine(grad, d, ones), None, None, None


class _Combine(torch.autograd.Function):
    """The gradient of a row is its weight times that of its token's sum; of a weight, its row times that."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, topk_weights: torch.Tensor, op: ExpertParallel, d: Dispatched
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, topk_weights)
        ctx.op, ctx.d = op, d
        return op.combine(rows.detach(), d, topk_weights.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        rows, topk_weights = ctx.saved_tensors
        of_rows, of_weights = ctx.op.combine_backward(grad.contiguous(), rows, ctx.d, topk_weights)
        return of_rows, of_weights, None, None


def dispatch(op: ExpertParallel, x: torch.Tensor, topk_ids: torch.Tensor) -> Dispatched:
    """Return `op.dispatch(x, topk_ids)`, whose rows have a gradient. All ranks run its backward pass."""
    kept: list[Dispatched] = []
    rows = _Dispatch.apply(x, op, topk_ids, kept)
    return kept[0].with_rows(rows)


def combine(
    op: ExpertParallel, rows: torch.Tensor, d: Dispatched, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Return `op.combine(rows, d, topk_weights)` with its gradients. All ranks run its backward pass."""
    return _Combine.apply(rows, topk_weights, op, d)
