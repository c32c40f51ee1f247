"""Operators of an `ExpertParallel` with gradients, eager or traced, where each is one node of a graph.

    ep_dispatch          rows of tokens, and where they lie. Backward: `ep_combine` with weights of 1
    ep_combine           sums of rows. Backward: `ep_combine_backward`
    ep_dispatch_matmul   rows of products. Backward: `ep_matmul_combine` across the weight; tokens are
                         dispatched once more for the weight's own gradient
    ep_matmul_combine    sums of products. Backward: the products once more, then `ep_combine_backward`
    ep_matmul            products of rows that are here. Backward: itself, across the weight

An operation goes by its `name`. *Where* rows lie: `offsets`, `sources`, `places`, `topk_ids` of `Dispatched`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tp.expert_operators import outer_products
from ..tp.operator import Operator
from ..tp.operators import by_rows
from .launches import Dispatched
from .operation import OPEN, ExpertParallel


def _where(d: Dispatched) -> tuple[Tensor, Tensor, Tensor]:
    return d.offsets, d.sources, d.places


# ---- what they compute


def _ep_dispatch(x: Tensor, topk_ids: Tensor, name: str, fp8: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d = OPEN[name].dispatch(x.detach(), topk_ids, fp8=fp8)
    return d.rows, *_where(d)


def _ep_dispatch_matmul(
    x: Tensor, weight: Tensor, topk_ids: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d = OPEN[name].dispatch_matmul(x.detach(), weight.detach(), topk_ids)
    return d.rows, *_where(d)


def _ep_combine(
    rows: Tensor,
    topk_weights: Tensor,
    offsets: Tensor,
    sources: Tensor,
    places: Tensor,
    topk_ids: Tensor,
    name: str,
) -> Tensor:
    d = Dispatched(rows, offsets, sources, places, topk_ids)
    return OPEN[name].combine(by_rows(rows.detach()), d, topk_weights.detach())


def _ep_combine_backward(
    grad: Tensor,
    rows: Tensor,
    topk_weights: Tensor,
    offsets: Tensor,
    sources: Tensor,
    places: Tensor,
    topk_ids: Tensor,
    name: str,
) -> tuple[Tensor, Tensor]:
    d = Dispatched(rows, offsets, sources, places, topk_ids)
    return OPEN[name].combine_backward(by_rows(grad), by_rows(rows), d, topk_weights)


def _ep_matmul_combine(
    rows: Tensor,
    weight: Tensor,
    topk_weights: Tensor,
    offsets: Tensor,
    sources: Tensor,
    places: Tensor,
    topk_ids: Tensor,
    name: str,
) -> Tensor:
    d = Dispatched(rows, offsets, sources, places, topk_ids)
    return OPEN[name].matmul_combine(by_rows(rows.detach()), weight.detach(), d, topk_weights.detach())


def _ep_matmul(
    rows: Tensor, weight: Tensor, offsets: Tensor, sources: Tensor, topk_ids: Tensor, name: str
) -> Tensor:
    d = Dispatched(rows, offsets, sources, sources, topk_ids)
    return OPEN[name].matmul(by_rows(rows.detach()), weight.detach(), d)


# ---- their shapes


def _shapes_of_dispatch(x: Tensor, topk_ids: Tensor, name: str, fp8: bool) -> tuple[Tensor, ...]:
    op = OPEN[name]
    return x.new_empty((op.capacity, x.shape[1])), *_shapes_of_where(op, topk_ids)


def _shapes_of_dispatch_matmul(x: Tensor, weight: Tensor, topk_ids: Tensor, name: str) -> tuple[Tensor, ...]:
    op = OPEN[name]
    return x.new_empty((op.capacity, weight.shape[1])), *_shapes_of_where(op, topk_ids)


def _shapes_of_where(op: ExpertParallel, topk_ids: Tensor) -> tuple[Tensor, ...]:
    lengths = (op.experts // op.world_size + 1, op.capacity, op.tokens_per_rank * op.topk)
    return tuple(topk_ids.new_empty((length,), dtype=torch.int32) for length in lengths)


def _shape_of_combine(rows: Tensor, topk_weights: Tensor, *where: Any) -> Tensor:
    return rows.new_empty((topk_weights.shape[0], OPEN[where[-1]].hidden))


def _shapes_of_backward(
    grad: Tensor, rows: Tensor, topk_weights: Tensor, *where: Any
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), topk_weights.new_empty(topk_weights.shape)


def _shape_of_matmul_combine(rows: Tensor, weight: Tensor, topk_weights: Tensor, *where: Any) -> Tensor:
    return _shape_of_combine(rows, topk_weights, *where)


def _shape_of_matmul(rows: Tensor, weight: Tensor, *where: Any) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]))


# ---- their gradients


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, topk_ids, ctx.name, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], topk_ids)


def _gradients_of_dispatch(ctx: Any, needed: tuple[Any, ...], grad: Tensor, *_: None) -> tuple[Any, ...]:
    *where, topk_ids = ctx.saved_tensors
    return (ep_combine(grad, _ones(topk_ids), *where, topk_ids, ctx.name),)


def _keep_for_dispatch_matmul(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, topk_ids, ctx.name = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, *output[1:], topk_ids)


def _gradients_of_dispatch_matmul(
    ctx: Any, needed: tuple[Any, ...], grad: Tensor, *_: None
) -> tuple[Any, ...]:
    x, weight, offsets, sources, places, topk_ids = ctx.saved_tensors
    of_x = of_weight = None
    if needed[0]:
        ones = _ones(topk_ids)
        of_x = ep_matmul_combine(grad, weight.mT, ones, offsets, sources, places, topk_ids, ctx.name)
    if needed[1]:
        rows, *_ = ep_dispatch(x, topk_ids, ctx.name, False)
        of_weight = outer_products(grad, rows, offsets[1:])
    return of_x, of_weight


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.name = inputs
    ctx.save_for_backward(*tensors)


def _gradients_of_combine(ctx: Any, needed: tuple[Any, ...], grad: Tensor) -> tuple[Any, ...]:
    return ep_combine_backward(grad, *ctx.saved_tensors, ctx.name)


def _gradients_of_matmul_combine(ctx: Any, needed: tuple[Any, ...], grad: Tensor) -> tuple[Any, ...]:
    rows, weight, topk_weights, *where = ctx.saved_tensors
    offsets, sources, _, topk_ids = where
    of_matmul = (offsets, sources, topk_ids, ctx.name)
    products = ep_matmul(rows, weight, *of_matmul)
    of_products, of_weights = ep_combine_backward(grad, products, topk_weights, *where, ctx.name)
    of_rows = ep_matmul(of_products, weight.mT, *of_matmul) if needed[0] else None
    of_weight = outer_products(of_products, rows, offsets[1:]) if needed[1] else None
    return of_rows, of_weight, of_weights


def _gradients_of_matmul(ctx: Any, needed: tuple[Any, ...], grad: Tensor) -> tuple[Any, ...]:
    rows, weight, offsets, *where = ctx.saved_tensors
    of_rows = ep_matmul(grad, weight.mT, offsets, *where, ctx.name) if needed[0] else None
    return of_rows, outer_products(grad, rows, offsets[1:]) if needed[1] else None


def _ones(topk_ids: Tensor) -> Tensor:
    return torch.ones(topk_ids.shape, dtype=torch.float32, device=topk_ids.device)


ep_dispatch = Operator(_ep_dispatch, _shapes_of_dispatch, _gradients_of_dispatch, _keep_for_dispatch)
ep_dispatch_matmul = Operator(
    *(_ep_dispatch_matmul, _shapes_of_dispatch_matmul),
    *(_gradients_of_dispatch_matmul, _keep_for_dispatch_matmul),
)
ep_combine = Operator(_ep_combine, _shape_of_combine, _gradients_of_combine, _keep)
ep_combine_backward = Operator(_ep_combine_backward, _shapes_of_backward)
ep_matmul_combine = Operator(
    _ep_matmul_combine, _shape_of_matmul_combine, _gradients_of_matmul_combine, _keep
)
ep_matmul = Operator(*(_ep_matmul, _shape_of_matmul, _gradients_of_matmul, _keep), meets_peers=False)
