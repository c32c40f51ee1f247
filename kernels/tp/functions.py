"""Tensor-parallel products with gradients, over any number of dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from ..tensors import check_no_gradient
from . import operators
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
    """Return `all_gather(a_shard) @ weight.T + bias`; for several weights a tuple, behind one gather.

    a_shard [..., K], gathered along `gather_dim`, equal in shape on all ranks; weights [N, K], this rank's
    rows of each, by rows or by columns; bias [N] for each, or None. The result has as many dimensions.

    Backward gives this rank's part of the sum over ranks for a_shard, behind the largest product, and
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
    products = _gathered_products(rows, given, group_name, save_gathered, fp8)
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
    Backward gathers the gradient once, behind the product for `a`. fp8: as in `all_gather_matmul`; the sums
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
    sums = _scattered_sums(rows, weight, group_name, fp8)
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
    if _is_traced(rows, weight):
        sums: Tensor = torch.ops.dist_autotune.matmul_all_reduce(rows, weight, group_name)
    else:
        sums = operators.multiply_and_all_reduce(rows, weight, group_name)
    if bias is not None:
        sums += bias
    return sums.view(*a.shape[:-1], sums.shape[1])


def sum_gradient(tensor: Tensor, group: Group = None) -> Tensor:
    """Return `tensor`, with a gradient that is summed over the group's ranks.

    For a parameter that is equal on all ranks and meets other tokens on each: a norm's weight, for example.
    """
    result: Tensor = _SumGradient.apply(tensor, name_of(group))
    return result


# ---- one product, eager or traced


def _gathered_products(
    rows: Tensor, weights: list[Tensor], group_name: str, save_gathered: bool, fp8: bool
) -> Sequence[Tensor]:
    if _is_traced(rows, *weights):
        keeps = save_gathered and not fp8 and _wants_gradient(*weights)
        traced: list[Tensor]
        traced, _ = torch.ops.dist_autotune.all_gather_matmul(rows, weights, group_name, keeps, fp8)
        return traced
    if _wants_gradient(rows, *weights):
        call = group_name, save_gathered and not fp8, fp8
        products: tuple[Tensor, ...] = _apply(_GatheredProducts, call, rows, *weights)
        return products
    return operators.gather_and_multiply(rows, weights, group_name, False, fp8)[0]


def _scattered_sums(rows: Tensor, weight: Tensor, group_name: str, fp8: bool) -> Tensor:
    if _is_traced(rows, weight):
        sums: Tensor = torch.ops.dist_autotune.matmul_reduce_scatter([rows], [weight], group_name, fp8)
    elif _wants_gradient(rows, weight):
        sums = _apply(_ScatteredSums, (group_name, fp8), rows, weight)
    else:
        sums = operators.multiply_and_scatter([rows], [weight], group_name, fp8)
    return sums


def _is_traced(*tensors: Tensor) -> bool:
    """Return whether somebody must see an operator: a compiler, a dispatch mode, a subclass of tensors."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return not _PLAIN.issuperset(map(type, tensors))


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def _wants_gradient(*tensors: Tensor) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:  # no generator: microseconds in each call
            if tensor.requires_grad:
                return True
    return False


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return `function.apply(*args)`; beside torch.func alone it need look at each argument."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]  # it is made in C


class _GatheredProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[str, bool, bool], rows: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group_name, may_keep, fp8 = call
        ctx.is_gathered = may_keep and any(ctx.needs_input_grad[2:])
        found = operators.gather_and_multiply(rows, weights, ctx.group_name, ctx.is_gathered, fp8)
        products, gathered = found
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows if gathered is None else gathered, *weights)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, for_rows, *for_weights = ctx.needs_input_grad
        scatter = operators.multiply_and_scatter
        of_rows, of_weights = operators.gradients_of_gather(ctx, grads, for_rows, for_weights, scatter)
        return None, of_rows, *of_weights


class _ScatteredSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[str, bool], rows: Tensor, weight: Tensor) -> Tensor:
        ctx.group_name, fp8 = call
        ctx.save_for_backward(rows, weight)
        return operators.multiply_and_scatter([rows], [weight], ctx.group_name, fp8)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operators.check_first_order()
        rows, weight = ctx.saved_tensors
        _, for_rows, for_weight = ctx.needs_input_grad
        of_rows, of_weight = operators.gather_and_multiply_backward(
            grads[0], [rows], [weight], ctx.group_name, [for_rows], [for_weight]
        )
        return None, of_rows[0] if for_rows else None, of_weight[0] if for_weight else None


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
