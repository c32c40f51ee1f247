"""The registered operators over experts, each the other's backward, for ranks with equally many tokens.

    all_gather_moe       every rank's tokens times the matrices of their experts, a row for each choice
    moe_reduce_scatter   this rank's tokens' rows, times the matrices, weighted, summed over choices and ranks
    outer_products       for each expert the sum, over its choices, of left's row times right's

Backward gathers tokens and choices again; the gradients of weights are grouped products of cuBLAS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..moe.ag_moe import AllGatherMoE
from ..moe.moe_rs import MoEReduceScatter
from .operators import by_rows, check_first_order, library, register, start_gather, wait
from .registry import opened, size_of

library.define("all_gather_moe(Tensor x_shard, Tensor weight, Tensor topk_ids, str group_name) -> Tensor")
library.define(
    "moe_reduce_scatter(Tensor y, Tensor weight, Tensor topk_ids, Tensor topk_weights, str group_name)"
    " -> Tensor"
)
library.define("outer_products(Tensor left, Tensor right, Tensor ids, int experts) -> Tensor")
_ops = torch.ops.dist_autotune


# ---- what they compute, and their shapes


def _all_gather_moe(x_shard: Tensor, weight: Tensor, topk_ids: Tensor, group_name: str) -> Tensor:
    tokens, features = x_shard.shape
    operation = opened(AllGatherMoE, x_shard, max(tokens, 1), features, group_name)
    return operation(by_rows(x_shard), weight, topk_ids, tokens=[tokens] * size_of(group_name))


def _moe_reduce_scatter(
    y: Tensor, weight: Tensor, topk_ids: Tensor, topk_weights: Tensor, group_name: str
) -> Tensor:
    tokens = topk_ids.shape[0]
    operation = opened(MoEReduceScatter, y, max(tokens, 1), weight.shape[1], group_name)
    return operation(by_rows(y), weight, topk_ids, topk_weights, tokens=[tokens] * size_of(group_name))


def _outer_products(left: Tensor, right: Tensor, ids: Tensor, experts: int) -> Tensor:
    """Rows of left [T, N] and right [T, K], a choice each: [experts, N, K]; an id of -1 counts nowhere."""
    chosen = ids.reshape(-1)
    by_expert, order = chosen.where(chosen >= 0, experts).sort(stable=True)
    each = torch.arange(experts, device=ids.device, dtype=by_expert.dtype)
    ends = torch.searchsorted(by_expert, each, right=True).to(torch.int32)
    result: Tensor = torch.nn.functional.grouped_mm(left[order].T, right[order], offs=ends)
    return result


def _shape_of_products(left: Tensor, right: Tensor, ids: Tensor, experts: int) -> Tensor:
    return left.new_empty((experts, left.shape[1], right.shape[1]))


def _shape_of_gather(x_shard: Tensor, weight: Tensor, topk_ids: Tensor, group_name: str) -> Tensor:
    tokens, topk = topk_ids.shape
    return x_shard.new_empty((size_of(group_name) * tokens * topk, weight.shape[1]))


def _shape_of_scatter(
    y: Tensor, weight: Tensor, topk_ids: Tensor, topk_weights: Tensor, group_name: str
) -> Tensor:
    return y.new_empty((topk_ids.shape[0], weight.shape[1]))


# ---- their gradients


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.group_name = inputs
    ctx.save_for_backward(*tensors)


def _gradients_of_gather(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    check_first_order()
    x_shard, weight, ids = ctx.saved_tensors
    of_x = of_weight = None
    gathering = [start_gather(each, ctx.group_name) for each in (x_shard, ids)] if _asked(ctx, 1) else []
    if _asked(ctx, 0):
        ones = torch.ones_like(ids, dtype=torch.float32)
        of_x = _ops.moe_reduce_scatter(grad, weight.mT, ids, ones, ctx.group_name)
    if gathering:
        x, all_ids = map(wait, gathering)
        rows = x.repeat_interleave(ids.shape[1], 0)
        of_weight = _ops.outer_products(grad, rows, all_ids, weight.shape[0])
    return of_x, of_weight, None, None


def _gradients_of_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    check_first_order()
    y, weight, ids, weights = ctx.saved_tensors
    topk, of_y, of_weight, of_weights = ids.shape[1], None, None, None
    started = [start_gather(each, ctx.group_name) for each in (weights, ids)]
    gathering = start_gather(grad, ctx.group_name) if _asked(ctx, 1) else None
    if _asked(ctx, 0) or _asked(ctx, 3):
        unweighted = _ops.all_gather_moe(grad, weight.mT, ids, ctx.group_name)
    all_weights, all_ids = map(wait, started)
    factors = all_weights.where(all_ids >= 0, 0.0).reshape(-1, 1).to(y.dtype)
    if _asked(ctx, 0):
        of_y = unweighted * factors
    if _asked(ctx, 3):
        dots = (unweighted.float() * y.float()).sum(1).reshape(-1, topk)
        ranks = size_of(ctx.group_name)
        summed = torch.ops._c10d_functional.reduce_scatter_tensor(dots, "sum", ranks, ctx.group_name)
        of_weights = wait(summed).where(ids >= 0, 0.0).to(weights.dtype)
    if gathering is not None:
        of_rows = wait(gathering).repeat_interleave(topk, 0) * factors
        of_weight = _ops.outer_products(of_rows, y, all_ids, weight.shape[0])
    return of_y, of_weight, None, of_weights, None


def _asked(ctx: Any, index: int) -> bool:
    return bool(ctx.needs_input_grad[index])


register("all_gather_moe", _all_gather_moe, _shape_of_gather, _gradients_of_gather, _keep_inputs)
register("moe_reduce_scatter", _moe_reduce_scatter, _shape_of_scatter, _gradients_of_scatter, _keep_inputs)
register("outer_products", _outer_products, _shape_of_products)
