"""Gathers and scatters of FSDP2 in communicators with limits, tuned with the kernels of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..exchange.collective import all_gather, reduce_scatter
from .collective_groups import CollectiveGroups


def limit_sharding(model: nn.Module, limits: CollectiveGroups) -> None:
    """Let the gathers and scatters of a model under `fully_shard` take limits, all of a step the same one.

    So one communicator serves them in turn, as the group's own would. limits: of the ranks that share the
    parameters. Call it after `fully_shard`; close `limits` when the model is no longer trained.

    Raises ValueError if no module of the model is under `fully_shard`; so does a step whose parameters are
    shared by other ranks.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError("limit_sharding: no module of the model is under fully_shard; call that first")
    for module in sharded:
        module.set_custom_all_gather(_Gather(limits))  # type: ignore[arg-type]  # its base is not public
        module.set_custom_reduce_scatter(_Scatter(limits))  # type: ignore[arg-type]


class _Collective:
    """A collective of FSDP2, in the group of the limit."""

    def __init__(self, limits: CollectiveGroups) -> None:
        self._limits = limits

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _limited(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        ranks, limited = map(dist.get_process_group_ranks, (group, self._limits.whole))
        if ranks != limited:
            raise ValueError(
                f"{self._limits.name}: parameters are shared by ranks {ranks}, the limits are of {limited}"
            )
        return self._limits.group()


class _Gather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        return all_gather(output_tensor, input_tensor, group=self._limited(group), async_op=async_op)


class _Scatter(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        group = self._limited(group)
        return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
