"""A mixture of experts: each rank passes its own tokens, and holds its part of every expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from . import expert_operators
from .experts import Experts
from .layers import local, sequence_parallel
from .registry import name_of

Route: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]

MOST_CHOICES = 16  # of a token, in the operations that layers share


class MoE(nn.Module):
    """Routes each token to `topk` of the experts, SwiGLUs without bias, and adds up their weighted results.

    router: a linear layer from features to experts; it computes in its own type, which may be float32.
    experts: gate, up and down of each. The weights of a token's experts are their probabilities among all
    experts, with normalize=True scaled to a sum of 1. `route` replaces both: from the router's logits
    [tokens, experts] to weights and expert ids [tokens, topk], where -1 drops a choice.

    names: of the router and of the layers of an expert. Its state dict is that of modules with these names:
    `gate.weight`, `experts.3.gate_proj.weight`, ...; its parameters are the router's, `experts.gate_up` and
    `experts.down`. All ranks have equally many tokens. What is to be minimised is the sum of their losses.
    """

    experts: Experts

    def __init__(
        self,
        router: nn.Linear,
        experts: Sequence[tuple[nn.Linear, nn.Linear, nn.Linear]],
        mesh: DeviceMesh,
        *,
        topk: int,
        normalize: bool = True,
        route: Route | None = None,
        names: tuple[str, str, str, str] = ("gate", "gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        most = min(len(experts), MOST_CHOICES)
        if router.out_features != len(experts) or not 1 <= topk <= most:
            given = f"a router of {router.out_features} experts, {len(experts)} experts and topk={topk}"
            raise ValueError(f"{given}: as many of each, and topk of 1 to {most}")
        self.group_name, self.topk, self.normalize = name_of(mesh), topk, normalize
        self._route = route
        self._router_name, *of_expert = names
        gate, up, down = of_expert
        self.add_module(self._router_name, sequence_parallel(router, mesh))
        self.experts = Experts(experts, mesh, (gate, up, down))

    def extra_repr(self) -> str:
        return f"topk={self.topk}"

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        router: Any = self.get_submodule(self._router_name)
        route = self._route or self._take_most_probable
        weights, ids = route(router(tokens.to(router.weight.dtype)))
        needed = [len(tokens), self.topk]
        if not list(weights.shape) == list(ids.shape) == needed:
            given = f"weights {list(weights.shape)} and ids {list(ids.shape)}"
            raise ValueError(f"route returned {given}; both must be [tokens, topk] = {needed}")
        gate_up, down = (local(each) for each in (self.experts.gate_up, self.experts.down))
        hidden, routing = expert_operators.all_gather_moe(
            tokens, gate_up.flatten(1, 2), ids, weights, self.group_name
        )
        gate, up = hidden.chunk(2, -1)
        result = expert_operators.moe_reduce_scatter(
            nn.functional.silu(gate) * up, down, routing, weights, self.topk, self.group_name
        )
        return result.view(x.shape)

    def _take_most_probable(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        chances, ids = logits.float().softmax(-1).topk(self.topk)
        return (chances / chances.sum(-1, keepdim=True) if self.normalize else chances), ids
