"""torch's collectives, and its fused operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from benchmarks.common.ranks import ON_GPU, Unsupported

# Old names warn in torch 2.13, whose new ones 2.11 does not have.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def fused_by_torch(name: str) -> tuple[Callable[..., Any], str]:
    """Return an operation of torch's symmetric memory, and the name of the group of all ranks."""
    if not ON_GPU:
        raise Unsupported("torch's symmetric memory needs GPUs")
    import torch.distributed._symmetric_memory  # registers the operation

    group = dist.group.WORLD
    assert group is not None
    return getattr(torch.ops.symm_mem, name), group.group_name
