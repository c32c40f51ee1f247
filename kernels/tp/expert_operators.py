"""The registered operators over experts, for ranks with equally many tokens, which sort choices once a layer.

    all_gather_moe       every rank's tokens times the matrices of their experts, by expert; and the routing
    all_gather_routed    the same for choices that are routed: the backward of the next
    moe_reduce_scatter   this rank's tokens' rows, times the matrices, weighted, summed over choices and
                         ranks; with weights of 1 the backward of the first
    outer_products       for each expert the sum, over its choices, of left's row times right's

Rows by expert lie as the `Routing` says, whose words travel as a tensor. Backward gathers tokens again; the
gradients of weights are grouped products of cuBLAS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

from ..moe.ag_moe import AllGatherMoE
from ..moe.moe_rs import MoEReduceScatter
from ..moe.plan import Routing, words_of_shared
from .operator import Operator
from .operators import by_rows, start_gather, wait
from .registry import opened, size_of

# ---- what they compute, and their shapes


def _all_gather_moe(
    x_shard: Tensor, weight: Tensor, topk_ids: Tensor, topk_weights: Tensor, group_name: str
) -> tuple[Tensor, Tensor]:
    tokens = [x_shard.shape[0]] * size_of(group_name)
    operation = _gather_of(x_shard, group_name)
    products, routing = operation.route(by_rows(x_shard), weight, topk_ids, topk_weights, tokens=tokens)
    return products, routing.words


def _all_gather_routed(
    x_shard: Tensor, weight: Tensor, routing: Tensor, topk: int, group_name: str
) -> Tensor:
    routed = _routing(routing, x_shard.shape[0], topk, weight, group_name)
    return _gather_of(x_shard, group_name).by_expert(by_rows(x_shard), weight, routed)


def _gather_of(x_shard: Tensor, group_name: str) -> AllGatherMoE:
    tokens, features = x_shard.shape
    return opened(AllGatherMoE, x_shard, max(tokens, 1), features, group_name)


def _moe_reduce_scatter(
    y: Tensor, weight: Tensor, routing: Tensor, topk_weights: Tensor | None, topk: int, group_name: str
) -> Tensor:
    tokens = _tokens(y, topk, group_name)
    routed = _routing(routing, tokens, topk, weight, group_name)
    ones = torch.ones_like(routed.weights) if topk_weights is None else None
    operation = opened(MoEReduceScatter, y, max(tokens, 1), weight.shape[1], group_name)
    return operation.by_expert(by_rows(y), weight, routed, ones)


def _tokens(y: Tensor, topk: int, group_name: str) -> int:
    """Return the tokens of each rank, of all of whose choices y has rows."""
    return y.shape[0] // (size_of(group_name) * topk)


def _routing(words: Tensor, tokens: int, topk: int, weight: Tensor, group_name: str) -> Routing:
    of_ranks = (tokens,) * size_of(group_name)
    return Routing.of_words(words, tokens=of_ranks, topk=topk, experts=weight.shape[0])


def _outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Rows of left [T, N] and right [T, K] by expert: [experts, N, K]; those after them count nowhere."""
    products = grouped_mm(_at_16_bytes(left).T, _at_16_bytes(right), offs=ends)
    return products[:, : left.shape[1], : right.shape[1]].contiguous()


def _at_16_bytes(matrix: Tensor) -> Tensor:
    """Return the matrix, padded where torch's grouped product would refuse it: rows begin at 16 bytes."""
    matrix, quantum = by_rows(matrix), 16 // matrix.element_size()
    if matrix.stride(0) % quantum == 0 and matrix.data_ptr() % 16 == 0:
        return matrix
    return pad(matrix, (0, -matrix.shape[1] % quantum)).contiguous()


def _shape_of_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty((ends.shape[0], left.shape[1], right.shape[1]))


def _shapes_of_gather(
    x_shard: Tensor, weight: Tensor, topk_ids: Tensor, topk_weights: Tensor, group_name: str
) -> tuple[Tensor, Tensor]:
    ranks = size_of(group_name)
    choices = ranks * topk_ids.shape[0] * topk_ids.shape[1]
    words = words_of_shared(ranks, weight.shape[0], choices)
    return x_shard.new_empty((choices, weight.shape[1])), topk_ids.new_empty((words,), dtype=torch.int32)


def _shape_of_routed(x_shard: Tensor, weight: Tensor, routing: Tensor, topk: int, group_name: str) -> Tensor:
    return x_shard.new_empty((size_of(group_name) * x_shard.shape[0] * topk, weight.shape[1]))


def _shape_of_scatter(
    y: Tensor, weight: Tensor, routing: Tensor, topk_weights: Tensor | None, topk: int, group_name: str
) -> Tensor:
    return y.new_empty((_tokens(y, topk, group_name), weight.shape[1]))


# ---- their gradients


def _keep_for_gather(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_shard, weight, topk_ids, _, ctx.group_name = inputs
    ctx.topk = topk_ids.shape[1]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x_shard, weight, output[1])


def _gradients_of_gather(
    ctx: Any, needed: tuple[bool, ...], grad: Tensor | None, _of_routing: None
) -> tuple[Tensor | None, ...]:
    x_shard, weight, words = ctx.saved_tensors
    of_x = of_weight = None
    for_x, for_weight, *_ = needed
    gathering = start_gather(x_shard, ctx.group_name) if for_weight and grad is not None else None
    if for_x and grad is not None:
        of_x = moe_reduce_scatter(grad, weight.mT, words, None, ctx.topk, ctx.group_name)
    if gathering is not None:
        routing = _routing(words, x_shard.shape[0], ctx.topk, weight, ctx.group_name)
        rows = wait(gathering)[routing.rows // ctx.topk]
        of_weight = outer_products(grad, rows, routing.ends)
    return of_x, of_weight


def _keep_for_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.topk, ctx.group_name = inputs
    ctx.save_for_backward(*tensors)


def _gradients_of_scatter(ctx: Any, needed: tuple[bool, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    for_y, for_weight, _, for_weights, *_ = needed
    y, weight, words, weights = ctx.saved_tensors
    topk, of_y, of_weight, of_weights = ctx.topk, None, None, None
    gathering = start_gather(grad, ctx.group_name) if for_weight else None
    routing = _routing(words, grad.shape[0], topk, weight, ctx.group_name)
    factors = routing.weights[:, None].to(y.dtype)
    if for_y or for_weights:
        unweighted = all_gather_routed(grad, weight.mT, words, topk, ctx.group_name)
    if for_y:
        of_y = unweighted * factors
    if for_weights:
        of_weights = _gradient_of_weights((unweighted.float() * y.float()).sum(1), routing, ctx.group_name)
        of_weights = of_weights.to(weights.dtype)
    if gathering is not None:
        of_rows = wait(gathering)[routing.rows // topk] * factors
        of_weight = outer_products(of_rows, y, routing.ends)
    return of_y, of_weight, None, of_weights


def _gradient_of_weights(dots: Tensor, routing: Routing, group_name: str) -> Tensor:
    """Return the sums over the ranks of each choice's dot, [tokens of a rank, topk]; 0 if it is dropped."""
    is_kept = torch.arange(len(dots), device=dots.device) < routing.ends[-1]
    by_choice = dots.new_zeros(len(dots)).index_copy(0, routing.rows.long(), dots.where(is_kept, 0.0))
    by_token, ranks = by_choice.view(-1, routing.topk), size_of(group_name)
    return wait(torch.ops._c10d_functional.reduce_scatter_tensor(by_token, "sum", ranks, group_name))


all_gather_moe = Operator(_all_gather_moe, _shapes_of_gather, _gradients_of_gather, _keep_for_gather)
all_gather_routed = Operator(_all_gather_routed, _shape_of_routed)
moe_reduce_scatter = Operator(
    _moe_reduce_scatter, _shape_of_scatter, _gradients_of_scatter, _keep_for_scatter
)
outer_products = Operator(_outer_products, _shape_of_products, meets_peers=False)
