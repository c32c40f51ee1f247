"""Tensor-parallel layers without overlap: a collective, then products, or a product, then a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed._functional_collectives  # it registers torch.ops._c10d_functional
from torch import Tensor

from benchmarks.common.ranks import ON_GPU
from dist_autotune.kernels.persistent_gemm import persistent_matmul
from dist_autotune.kernels.tp.registry import size_of

PLAIN = "NCCL + cuBLAS" if ON_GPU else "gloo + torch"
OWN_GEMM = "NCCL + own GEMM" if ON_GPU else "gloo + own GEMM"
Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # of rows [m, K] and a weight [N, K]
_ops = torch.ops._c10d_functional


class _Gather(torch.autograd.Function):
    """Rows [m, K] of all ranks; backward scatters their sums."""

    @staticmethod
    def forward(ctx, rows: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _ops.wait_tensor(_ops.all_gather_into_tensor(rows.contiguous(), ranks, group))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        summed = _ops.reduce_scatter_tensor(grad.contiguous(), "sum", ctx.ranks, ctx.group)
        return _ops.wait_tensor(summed), None, None


class _Scatter(torch.autograd.Function):
    """This rank's rows of the sum over all ranks; backward gathers."""

    @staticmethod
    def forward(ctx, rows: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(rows.contiguous(), "sum", ranks, group))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        gathered = _ops.all_gather_into_tensor(grad.contiguous(), ctx.ranks, ctx.group)
        return _ops.wait_tensor(gathered), None, None


class _OwnProduct(torch.autograd.Function):
    """`rows @ weight.T` by `persistent_matmul`, and so are both gradients."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return persistent_matmul(rows, weight.T)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        return persistent_matmul(grad, weight), persistent_matmul(grad.T, rows)


def torch_product(rows: Tensor, weight: Tensor) -> Tensor:
    return rows @ weight.T


def own_product(rows: Tensor, weight: Tensor) -> Tensor:
    return _OwnProduct.apply(rows, weight)


def gather_and_multiply(
    x: Tensor,
    weights: list[Tensor],
    group: str,
    *,
    gather_dim: int,
    bias: None = None,
    save_gathered: bool = True,
    fp8: bool = False,
    product: Product = torch_product,
) -> tuple[Tensor, ...]:
    """Return what `tp.all_gather_matmul` returns for layers without bias; the gathered rows are saved."""
    moved = x.movedim(gather_dim, 0)
    rows = _Gather.apply(moved.reshape(-1, x.shape[-1]), group, size_of(group))
    sizes = (-1, *moved.shape[1:-1])
    return tuple(product(rows, weight).unflatten(0, sizes).movedim(0, gather_dim) for weight in weights)


def multiply_and_scatter(
    x: Tensor,
    weight: Tensor,
    group: str,
    *,
    scatter_dim: int,
    bias: None = None,
    fp8: bool = False,
    product: Product = torch_product,
) -> Tensor:
    """Return what `tp.matmul_reduce_scatter` returns for layers without bias."""
    moved = x.movedim(scatter_dim, 0)
    rows = _Scatter.apply(product(moved.reshape(-1, x.shape[-1]), weight), group, size_of(group))
    return rows.unflatten(0, (-1, *moved.shape[1:-1])).movedim(0, scatter_dim)
