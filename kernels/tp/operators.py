"""The products of tensor parallelism: what they compute, their shapes, their gradients.

    all_gather_matmul                every rank's rows times each weight.T, with one gather
    matmul_reduce_scatter            this rank's rows of the sum of all products, over pairs and ranks
    matmul_reduce_scatter_backward   the gradients of its operands, with one gather
    matmul_all_reduce                the sum of all ranks' products on all ranks; forward only

Weights are [N, K], by rows or by columns: so each is the other's backward with `w.T`, and none is copied.
Matrices of activations whose rows are not contiguous are copied. Ranks must call in the same order, which
backward keeps where the graphs are equal.

With fp8 a forward multiplies rows in fp8, each with a scale, made anew in each call; gradients are those of
the product of the rows as they were given, in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives  # it registers torch.ops._c10d_functional
from torch import Tensor
from torch.nn.functional import linear

from ..ag_gemm import AllGatherGemm
from ..exchange.call import NumberedCalls
from ..gemm_ar import GemmAllReduce
from ..gemm_rs import GemmReduceScatter
from ..tensors import FP8
from .operator import Operator
from .registry import announce_none, opened, size_of

# ---- every rank's rows times each weight.T


def _all_gather_matmul(
    a_shard: Tensor, weights: list[Tensor], group_name: str, save_gathered: bool, fp8: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Return the products and, to be saved, all ranks' rows; else, and with fp8, there are none of them."""
    gathered = a_shard.new_empty((0, a_shard.shape[1]))  # no alias of an operand
    if not a_shard.shape[0]:
        return _products_of_none(a_shard, weights, group_name), gathered
    if fp8:
        return _products_in_fp8(a_shard, weights, group_name), gathered
    if not save_gathered:
        return _gather(a_shard, weights, group_name, needs_rows=False)[0], gathered
    gathered = a_shard.new_empty((size_of(group_name) * a_shard.shape[0], a_shard.shape[1]))
    return _gather(a_shard, weights, group_name, gathered, needs_rows=True)[0], gathered


def _products_of_none(a_shard: Tensor, weights: Sequence[Tensor], group_name: str) -> list[Tensor]:
    """Return the products of no rows: all ranks have none."""
    announce_none(AllGatherGemm, a_shard, a_shard.shape[1], group_name)
    return [a_shard.new_empty((0, weight.shape[0])) for weight in weights]


def _products_in_fp8(a_shard: Tensor, weights: Sequence[Tensor], group_name: str) -> list[Tensor]:
    """Return the products of rows in fp8: one, of all weights together, after which each is copied out."""
    rows, scale_a = rows_in_fp8(a_shard)
    weight, scale_weight = rows_in_fp8(torch.cat([*weights]) if len(weights) > 1 else weights[0])
    operation = opened(AllGatherGemm, rows, rows.shape[0], rows.shape[1], group_name)
    product = operation(rows, weight, scale_a=scale_a, scale_weight=scale_weight)
    if len(weights) == 1:
        return [product]
    return [each.contiguous() for each in product.split([len(weight) for weight in weights], dim=1)]


def rows_in_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a matrix in fp8, contiguous, and the scale of each: its largest number / fp8's."""
    if matrix.dtype != torch.bfloat16:
        raise TypeError(f"fp8=True takes activations and weights in torch.bfloat16, not {matrix.dtype}")
    largest = matrix.detach().abs().amax(1, keepdim=True).float()
    scales = largest.clamp(min=1e-30) / torch.finfo(FP8).max  # of zeros, too, no denormal number
    return (matrix.detach() / scales).to(FP8, memory_format=torch.contiguous_format), scales


def _gather(
    a_shard: Tensor,
    weights: Sequence[Tensor],
    group_name: str,
    rows: Tensor | None = None,
    *,
    needs_rows: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """Return the products and, if somebody needs them, all rows: in `rows`, or else until the next call.

    The gather hides behind the largest product.
    """
    operation = opened(AllGatherGemm, a_shard, a_shard.shape[0], a_shard.shape[1], group_name)
    if not needs_rows and len(weights) == 1:  # reading them may copy them
        return [operation(by_rows(a_shard), weights[0])], None
    sizes = [weight.shape[0] for weight in weights]
    largest = sizes.index(max(sizes))
    first, gathered = operation.with_gathered(by_rows(a_shard), weights[largest], gathered=rows)
    products = [first if i == largest else linear(gathered, weight) for i, weight in enumerate(weights)]
    return products, gathered


def _shapes_of_gather(
    a_shard: Tensor, weights: list[Tensor], group_name: str, save_gathered: bool, fp8: bool = False
) -> tuple[list[Tensor], Tensor]:
    rows = size_of(group_name) * a_shard.shape[0]
    gathered = a_shard.new_empty((rows if save_gathered and not fp8 else 0, a_shard.shape[1]))
    return [a_shard.new_empty((rows, weight.shape[0])) for weight in weights], gathered


def _keep_for_gather(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
    a_shard, weights, ctx.group_name, save_gathered, fp8 = inputs
    ctx.is_gathered = save_gathered and not fp8
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1] if ctx.is_gathered else a_shard, *weights)


def _gradients_of_gather(
    ctx: Any, needed: tuple[Any, ...], grads: list[Tensor | None], _of_gathered: None
) -> tuple[Any, ...]:
    for_a, for_weights, *_ = needed
    rows, *weights = ctx.saved_tensors
    wanted = [grad if asked else None for grad, asked in zip(grads, for_weights, strict=True)]
    gathers = not ctx.is_gathered and any(grad is not None for grad in wanted)
    if gathers:
        rows = start_gather(rows, ctx.group_name)
    of_a, left = None, [grad for grad in grads if grad is not None]
    if for_a and left:
        right = [weight.t() for grad, weight in zip(grads, weights, strict=True) if grad is not None]
        of_a = matmul_reduce_scatter(left, right, ctx.group_name, False)
    if gathers:
        rows = wait(rows)
    return of_a, [None if grad is None else torch.mm(grad.t(), rows) for grad in wanted]


# ---- this rank's rows of the sum of all products


def _matmul_reduce_scatter(
    a: list[Tensor], weights: list[Tensor], group_name: str, fp8: bool = False
) -> Tensor:
    """Return this rank's rows of the sum of all products; fp8: of one.

    The scatter hides behind the largest product, which starts from the sum of the others.
    """
    if not a[0].shape[0]:
        return _sum_of_none(GemmReduceScatter, a[0], weights[0], group_name)
    if fp8:
        ((rows, scale_a),), ((weight, scale_weight),) = map(rows_in_fp8, a), map(rows_in_fp8, weights)
        operation = opened(GemmReduceScatter, rows, rows.shape[0], weight.shape[0], group_name)
        return operation(rows, weight, scale_a=scale_a, scale_weight=scale_weight)
    largest, addend = 0, None
    if len(a) > 1:
        sizes = [rows.shape[1] for rows in a]
        largest = sizes.index(max(sizes))
    for i, (rows, weight) in enumerate(zip(a, weights, strict=True)):
        if i != largest:
            addend = linear(rows, weight) if addend is None else addend.addmm_(rows, weight.t())
    rows, weight = a[largest], weights[largest]
    operation = opened(GemmReduceScatter, rows, rows.shape[0], weight.shape[0], group_name)
    return operation(by_rows(rows), weight, addend=addend)


def _sum_of_none(kind: type[NumberedCalls], a: Tensor, weight: Tensor, group_name: str) -> Tensor:
    """Return the sum of products of no rows: all ranks have none."""
    announce_none(kind, a, weight.shape[0], group_name)
    return a.new_empty((0, weight.shape[0]))


def _shape_of_scatter(a: list[Tensor], weights: list[Tensor], group_name: str, fp8: bool = False) -> Tensor:
    return a[0].new_empty((a[0].shape[0] // size_of(group_name), weights[0].shape[0]))


def _keep_for_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, weights, ctx.group_name, _ = inputs
    ctx.pairs = len(a)
    ctx.save_for_backward(*a, *weights)


def _gradients_of_scatter(ctx: Any, needed: tuple[Any, ...], grad: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: a checkpoint computes them anew at each access
    a, weights = list(saved[: ctx.pairs]), list(saved[ctx.pairs :])
    for_a, for_weights, *_ = needed
    of_a, of_weights = matmul_reduce_scatter_backward(
        grad, a, weights, ctx.group_name, list(for_a), list(for_weights)
    )
    return _spread(of_a, for_a), _spread(of_weights, for_weights)


def _spread(gradients: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients at the places for which they were computed."""
    left = iter(gradients)
    return [next(left) if is_needed else None for is_needed in needed]


def _matmul_reduce_scatter_backward(
    grad: Tensor,
    a: list[Tensor],
    weights: list[Tensor],
    group_name: str,
    for_a: list[bool],
    for_weights: list[bool],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of a scatter for those operands that need one."""
    across = [weight.t() for weight, is_needed in zip(weights, for_a, strict=True) if is_needed]
    multiplied = [rows for rows, is_needed in zip(a, for_weights, strict=True) if is_needed]
    of_a: list[Tensor] = []
    gathered = None
    if not grad.shape[0]:
        of_a, gathered = _products_of_none(grad, across, group_name), grad
    elif across:
        of_a, gathered = _gather(grad, across, group_name, needs_rows=bool(multiplied))
    elif multiplied:
        gathered = wait(start_gather(grad, group_name))
    return of_a, [] if gathered is None else [torch.mm(gathered.t(), rows) for rows in multiplied]


def _shapes_of_backward(
    grad: Tensor,
    a: list[Tensor],
    weights: list[Tensor],
    group_name: str,
    for_a: list[bool],
    for_weights: list[bool],
) -> tuple[list[Tensor], list[Tensor]]:
    of_a, of_weights = (
        [each.new_empty(each.shape) for each, is_needed in zip(operands, needed, strict=True) if is_needed]
        for operands, needed in ((a, for_a), (weights, for_weights))
    )
    return of_a, of_weights


# ---- the sum of all ranks' products


def _matmul_all_reduce(a: Tensor, weight: Tensor, group_name: str) -> Tensor:
    if not a.shape[0]:
        return _sum_of_none(GemmAllReduce, a, weight, group_name)
    operation = opened(GemmAllReduce, a, a.shape[0], weight.shape[0], group_name)
    result = operation(by_rows(a), weight)
    assert isinstance(result, Tensor)
    return result


def _shape_of_all_reduce(a: Tensor, weight: Tensor, group_name: str) -> Tensor:
    return a.new_empty((a.shape[0], weight.shape[0]))


# ---- parts of several


def by_rows(matrix: Tensor) -> Tensor:
    """Return the matrix with contiguous rows that do not overlap, as those of an expanded gradient do."""
    lies_by_rows = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    return matrix if lies_by_rows else matrix.clone(memory_format=torch.contiguous_format)


def start_gather(shard: Tensor, group_name: str) -> Tensor:
    """Return what will be all ranks' rows; `wait` before they are read."""
    ranks = size_of(group_name)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(shard.contiguous(), ranks, group_name)
    return wait(gathered) if gathered.is_cpu else gathered  # gloo: no two collectives in flight at a time


def wait(gathered: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(gathered)


all_gather_matmul = Operator(_all_gather_matmul, _shapes_of_gather, _gradients_of_gather, _keep_for_gather)
matmul_reduce_scatter = Operator(
    _matmul_reduce_scatter, _shape_of_scatter, _gradients_of_scatter, _keep_for_scatter
)
matmul_reduce_scatter_backward = Operator(_matmul_reduce_scatter_backward, _shapes_of_backward)
matmul_all_reduce = Operator(_matmul_all_reduce, _shape_of_all_reduce)
