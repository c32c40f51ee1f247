"""The calls of an `ExpertParallel` with gradients; all ranks run their backward passes, which are exchanges.

They may be compiled, in one graph, and checkpointed. There is no second derivative.
"""

from __future__ import annotations

from torch import Tensor

from .launches import Dispatched
from .operation import ExpertParallel
from .operators import ep_combine, ep_dispatch, ep_dispatch_matmul, ep_matmul, ep_matmul_combine


def dispatch(op: ExpertParallel, x: Tensor, topk_ids: Tensor, *, fp8: bool = False) -> Dispatched:
    """Return `op.dispatch(x, topk_ids, fp8=fp8)`, whose rows have a gradient; that never travels in fp8."""
    topk_ids = topk_ids.contiguous()
    rows, offsets, sources, places = ep_dispatch(x, topk_ids, op.name, fp8)
    return Dispatched(rows, offsets, sources, places, topk_ids)


def combine(op: ExpertParallel, rows: Tensor, d: Dispatched, topk_weights: Tensor) -> Tensor:
    """Return `op.combine(rows, d, topk_weights)`, with gradients for rows and weights."""
    where = (d.offsets, d.sources, d.places, d.topk_ids)
    sums: Tensor = ep_combine(rows, topk_weights, *where, op.name)
    return sums


def dispatch_matmul(op: ExpertParallel, x: Tensor, weight: Tensor, topk_ids: Tensor) -> Dispatched:
    """Return `op.dispatch_matmul(x, weight, topk_ids)`, with gradients for tokens and matrices.

    The backward pass dispatches the tokens once more: none are kept.
    """
    topk_ids = topk_ids.contiguous()
    rows, offsets, sources, places = ep_dispatch_matmul(x, weight, topk_ids, op.name)
    return Dispatched(rows, offsets, sources, places, topk_ids)


def matmul_combine(
    op: ExpertParallel, rows: Tensor, weight: Tensor, d: Dispatched, topk_weights: Tensor
) -> Tensor:
    """Return `op.matmul_combine(rows, weight, d, topk_weights)`, with gradients for all three.

    The backward pass computes the products once more: none are kept.
    """
    where = (d.offsets, d.sources, d.places, d.topk_ids)
    sums: Tensor = ep_matmul_combine(rows, weight, topk_weights, *where, op.name)
    return sums


def matmul(op: ExpertParallel, rows: Tensor, weight: Tensor, d: Dispatched) -> Tensor:
    """Return `op.matmul(rows, weight, d)`, with gradients for both; it meets no peer."""
    products: Tensor = ep_matmul(rows, weight, d.offsets, d.sources, d.topk_ids, op.name)
    return products
