"""A mixture of experts from a rank's tokens to its tokens, each rank with its part of every expert."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from . import experts as _registered  # noqa: F401
from .functions import sum_gradient
from .layers import distribute, local
from .registry import name_of

ALIGNED_BYTES = 16  # rows of a grouped product begin at multiples of it


class MoE(nn.Module):
    """Routes each token to `topk` of the experts, SwiGLUs without bias, and weights what they return.

    router: a linear layer from features to experts. experts: gate, up and down of each. Gates and ups lie in
    one parameter, gate_up [experts, 2, hidden, features], so that one gather serves both; down is [experts,
    features, hidden]. Probabilities of the chosen experts are scaled to a sum of 1. All ranks have equally
    many tokens. What is to be minimised is the sum of the ranks' losses.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor

    def __init__(
        self,
        router: nn.Linear,
        experts: Sequence[tuple[nn.Linear, nn.Linear, nn.Linear]],
        mesh: DeviceMesh,
        *,
        topk: int,
    ) -> None:
        super().__init__()
        if router.out_features != len(experts) or not 1 <= topk <= len(experts):
            given = f"a router of {router.out_features} experts, {len(experts)} experts and topk={topk}"
            raise ValueError(f"{given}: as many of each, and topk of 1 to that many")
        if any(layer.bias is not None for layer in (router, *itertools.chain(*experts))):
            raise ValueError("router or an expert has a bias, which would be lost; layers without are needed")
        self.group_name, self.topk = name_of(mesh), topk
        gate_up = torch.stack([torch.stack([gate.weight, up.weight]) for gate, up, _ in experts])
        down = torch.stack([layer.weight for *_, layer in experts])
        sizes = {"features": down.shape[1], "hidden features of a rank": down.shape[2] // mesh.size()}
        multiple = ALIGNED_BYTES // down.itemsize
        for name, size in sizes.items():
            if size % multiple:
                needed = f"a multiple of {multiple} is needed, for the weights' gradients"
                raise ValueError(f"{size} {name}; {needed}")
        self.register_parameter("router", distribute(router.weight, mesh, Replicate()))
        self.register_parameter("gate_up", distribute(gate_up, mesh, Shard(2)))
        self.register_parameter("down", distribute(down, mesh, Shard(2)))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        router = sum_gradient(local(self.router), self.group_name)
        chances, ids = nn.functional.linear(tokens, router).float().softmax(-1).topk(self.topk)
        weights = chances / chances.sum(-1, keepdim=True)
        gate_up = local(self.gate_up).flatten(1, 2)
        hidden = torch.ops.dist_autotune.all_gather_moe(tokens, gate_up, ids, self.group_name)
        gate, up = hidden.chunk(2, -1)
        result = torch.ops.dist_autotune.moe_reduce_scatter(
            nn.functional.silu(gate) * up, local(self.down), ids, weights, self.group_name
        )
        return result.view(x.shape)
