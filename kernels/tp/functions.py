"""Tensor-parallel products with gradients, over any number of dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from ..tensors import check_no_gradient
from . import operators
from .operator import wants_gradient
from .registry import Group, name_of, size_of


@overload
def all_gather_matmul(
    a_shard: Tensor,
    weights: Tensor,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    gather_dim: int = 0,
    save_gathered: bool = True,
    fp8: bool = False,
) -> Tensor: ...
@overload
def all_gather_matmul(
    a_shard: Tensor,
    weights: Sequence[Tensor],
    group: Group = None,
    *,
    bias: Sequence[Tensor | None] | None = None,
    gather_dim: int = 0,
    save_gathered: bool = True,
    fp8: bool = False,
) -> tuple[Tensor, ...]: ...
def all_gather_matmul(
    a_shard: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: Group = None,
    *,
    bias: Any = None,
    gather_dim: int = 0,
    save_gathered: bool = True,
    fp8: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Return `all_gather(a_shard) @ weight.T + bias`; for several weights a tuple, with one gather.

    a_shard [..., K], gathered along `gather_dim`, equal in shape on all ranks; weights [N, K], this rank's
    rows of each, by rows or by columns; bias [N] for each, or None. The result has as many dimensions.

    Backward gives this rank's part of the sum over ranks for a_shard, after the largest product, and
    gradients of all tokens for the weights. It reads the gathered rows: they are saved, W times the shard, or
    with save_gathered=False gathered again. `group` is a process group, a DeviceMesh of one dimension or a
    name.

    fp8: round each row of a_shard, and of the weights, to float8_e4m3fn, with a scale that makes its largest
    number 448, and gather and multiply those. Tensors are bf16, and K is a multiple of 16. Backward is in
    bf16, of the tensors as they were given: it gathers again.
    """
    is_one = isinstance(weights, Tensor)
    given = [weights] if isinstance(weights, Tensor) else list(weights)
    biases = [bias] if is_one else [None] * len(given) if bias is None else list(bias)
    if not given or len(biases) != len(given):
        raise ValueError(f"{len(given)} weights and {len(biases)} biases; as many of each, at least one")
    rows, sizes = _as_rows("gather_dim", gather_dim, a_shard)
    group_name = name_of(group)
    keeps = save_gathered and not fp8 and wants_gradient(given)
    products: list[Tensor]
    products, _ = operators.all_gather_matmul(rows, given, group_name, keeps, fp8)
    if bias is not None:
        pairs = zip(products, biases, strict=True)
        products = [product if each is None else product + each for product, each in pairs]
    if len(sizes) > 1:
        sizes[0] *= size_of(group_name)
        products = [_from_rows(product, sizes, gather_dim) for product in products]
    return products[0] if is_one else tuple(products)


def matmul_reduce_scatter(
    a: Tensor,
    weight: Tensor,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    scatter_dim: int = 0,
    fp8: bool = False,
) -> Tensor:
    """Return this rank's part, along `scatter_dim`, of `sum over ranks a @ weight.T`, plus bias.

    a [..., K], K this rank's part of the inner dimension; its size along `scatter_dim` is a multiple of the
    number of ranks. weight [N, K], by rows or by columns; bias [N], equal on all ranks, as its gradient is.
    Backward gathers the gradient once, after the product for `a`. fp8: as in `all_gather_matmul`; the sums
    travel in bf16.
    """
    rows, sizes = _as_rows("scatter_dim", scatter_dim, a)
    group_name = name_of(group)
    ranks, size = size_of(group_name), a.shape[scatter_dim]
    if size % ranks:
        padded = size + -size % ranks
        raise ValueError(
            f"dimension {scatter_dim} of a has {size} entries; pad it to {padded} for {ranks} ranks"
        )
    sums: Tensor = operators.matmul_reduce_scatter([rows], [weight], group_name, fp8)
    if bias is not None:
        sums = sums + sum_gradient(bias, group_name)
    if len(sizes) == 1:
        return sums
    sizes[0] //= ranks
    return _from_rows(sums, sizes, scatter_dim)


def matmul_all_reduce(
    a: Tensor, weight: Tensor, group: Group = None, *, bias: Tensor | None = None
) -> Tensor:
    """Return `sum over ranks a @ weight.T` on all ranks, plus bias: for serving, it has no backward.

    a [..., K], K this rank's part of the inner dimension, as many rows on all ranks; weight [N, K], by rows
    or by columns; bias [N], equal on all ranks. Raises RuntimeError where a gradient is wanted.
    """
    check_no_gradient("matmul_all_reduce", a=a, weight=weight, bias=bias)
    group_name = name_of(group)
    rows = a.reshape(-1, a.shape[-1])
    sums: Tensor = operators.matmul_all_reduce(rows, weight, group_name)
    if bias is not None:
        sums += bias
    return sums.view(*a.shape[:-1], sums.shape[1])


def sum_gradient(tensor: Tensor, group: Group = None) -> Tensor:
    """Return `tensor`, with a gradient that is summed over the group's ranks.

    For a parameter that is equal on all ranks and meets other tokens on each: a norm's weight, for example.
    """
    result: Tensor = _SumGradient.apply(tensor, name_of(group))
    return result


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        started = torch.ops._c10d_functional.all_reduce(grad.contiguous(), "sum", ctx.group_name)
        return torch.ops._c10d_functional.wait_tensor(started), None


def _as_rows(name: str, dim: int, tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Return the tensor as a matrix, `dim` the slowest dimension of its rows; and all sizes but the last.

    Raises ValueError unless dim, an argument of that name, comes before the last.
    """
    last = tensor.dim() - 1
    if not 0 <= dim < last:
        shape = list(tensor.shape)
        raise ValueError(
            f"{name}={dim} of a tensor {shape}; it is 0 to {last - 1}, a dimension before the last"
        )
    if last == 1:
        return tensor, [tensor.shape[0]]
    moved = tensor.movedim(dim, 0)
    return moved.reshape(-1, tensor.shape[-1]), list(moved.shape[:-1])


def _from_rows(rows: Tensor, sizes: list[int], dim: int) -> Tensor:
    """Return the rows in these sizes; the first size is then moved to `dim`. A view."""
    return rows.unflatten(0, sizes).movedim(0, dim)
