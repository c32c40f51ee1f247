"""Exchanges over experts by others whose hosts wait for no counts: torch's by NVSHMEM, and torchtitan's."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.ranks import ON_GPU, Unsupported

Experts = Callable[[Tensor, Tensor], Tensor]  # rows by expert, and where each expert's end -> their results
TORCH, TORCHTITAN = "torch, all_to_all_vdev_2d", "torchtitan, minimal_async_ep"
TORCHTITAN_API = "torchtitan.distributed.minimal_async_ep"


def _chosen(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the order of choices by expert, and how many each expert has."""
    flat = ids.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    return flat.argsort(stable=True), counts.scatter_add_(0, flat, torch.ones_like(flat))


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def layer_by_nvshmem(
    x: Tensor, ids: Tensor, weights: Tensor, experts: int, compute: Experts
) -> Callable[[], Tensor]:
    """Return the layer by torch.ops.symm_mem.all_to_all_vdev_2d and its reverse; collective."""
    if not ON_GPU:
        raise Unsupported("torch's symmetric memory needs GPUs")
    import torch.distributed._symmetric_memory as symm_mem

    if symm_mem.get_backend(x.device) != "NVSHMEM":
        raise Unsupported("set TORCH_SYMMMEM=NVSHMEM, where torch is built with it")
    group, world = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    (tokens, hidden), topk, own = x.shape, ids.shape[1], experts // world

    def allocate(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        made = symm_mem.empty(*shape, dtype=dtype, device=x.device)
        symm_mem.rendezvous(made, group.group_name)
        return made

    sent, returned = (allocate(tokens * topk, hidden, dtype=x.dtype) for _ in range(2))
    rows, results = (allocate(world * tokens * min(topk, own), hidden, dtype=x.dtype) for _ in range(2))
    splits, arrived, back = allocate(experts), allocate(2, experts), allocate(2, experts)

    def layer() -> Tensor:
        order, counts = _chosen(ids, experts)
        splits.copy_(counts)
        sent.copy_(x[order // topk])
        torch.ops.symm_mem.all_to_all_vdev_2d(sent, rows, splits, arrived, group.group_name)
        results.copy_(compute(rows, _ends(arrived[0].view(own, world).sum(1))))
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(results, returned, arrived, back, group.group_name)
        choices = torch.empty_like(returned)
        choices[order] = returned
        return torch.einsum("tkh,tk->th", choices.view(tokens, topk, hidden), weights.to(x.dtype))

    return layer


def layer_by_torchtitan(
    x: Tensor, ids: Tensor, weights: Tensor, experts: int, compute: Experts
) -> Callable[[], Tensor]:
    """Return the layer by torchtitan's exchange; it has one buffer in a process, so runs at one shape."""
    if not ON_GPU or importlib.util.find_spec("torchtitan") is None:
        raise Unsupported("torchtitan is not installed" if ON_GPU else "torchtitan's exchange needs GPUs")
    api: Any = importlib.import_module(TORCHTITAN_API)
    world, (tokens, hidden), topk = dist.get_world_size(), x.shape, ids.shape[1]
    own = experts // world
    try:
        api.init_buffer(dist.group.WORLD, hidden, tokens, own, topk, x.dtype, x.device)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    capacity = world * tokens * min(topk, own)

    def layer() -> Tensor:
        _, counts = _chosen(ids, experts)
        rows, *to_experts, of_experts, of_tokens, arrived = api.dispatch_op(x, ids, counts, capacity, world)
        orders = of_tokens, of_experts
        results = compute(rows, _ends(arrived))
        sums, _ = api.combine_op(results, *to_experts, *orders, weights.flatten(), tokens, topk)
        return sums

    return layer
