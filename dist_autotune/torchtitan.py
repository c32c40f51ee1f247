"""Overlapped products and tuned steps for torchtitan: names for its `--override.imports`.

    feed_forward, attention    gather and product, product and scatter of the tensor-parallel blocks overlap
    tuned_steps                each step is one run: a `StepTuner` from `zero_grad` to `step`

The blocks are those of `layers.*`, with tensor and sequence parallelism; parameters and checkpoints are
unchanged. Works with SPMD backends that wrap activations in DTensors, and with spmd_types' plain ones.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import silu

from .kernels.tp import all_gather_matmul, matmul_reduce_scatter
from .kernels.tp.layers import local
from .tuner.step_tuner import StepTuner

SEQUENCE = 1  # the dimension of activations that ranks share


def _like(x: torch.Tensor, part: torch.Tensor, *, shard: int) -> torch.Tensor:
    """Return a rank's part of an activation as `x` is given: a DTensor, or plain."""
    if not isinstance(x, DTensor):
        return part
    return DTensor.from_local(part, x.device_mesh, [Shard(shard)], run_check=False)


try:
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import derive, override
    from torchtitan.distributed.spmd_types import current_spmd_mesh
    from torchtitan.models.common.attention import FusedQKVLinear, GQAttention
    from torchtitan.models.common.decoder_sharding import dense_sequence_parallel_placement
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
except ModuleNotFoundError as error:  # it is asked for by torchtitan alone
    if error.name != "torchtitan":
        raise
else:

    class OverlappedQKVLinear(FusedQKVLinear):
        """Queries, keys and values of all tokens, from this rank's part of them."""

        @dataclass(kw_only=True, slots=True)
        class Config(FusedQKVLinear.Config):
            """As torchtitan's."""

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if (mesh := _tensor_parallel(x)) is None:
                result: tuple[torch.Tensor, ...] = super().forward(x)
                return result
            products = all_gather_matmul(local(x), local(self.wqkv.weight), mesh, gather_dim=SEQUENCE)
            by_group = products.unflatten(-1, (-1, self.r_dim, self.head_dim))
            parts = by_group.split([self.heads_per_kv, 1, 1], dim=-2)
            return tuple(_like(x, part.flatten(2, 3).contiguous(), shard=2) for part in parts)

    class OverlappedRowParallel(Linear):
        """This rank's part of the tokens of a sum over ranks, from its part of the features of all tokens."""

        @dataclass(kw_only=True, slots=True)
        class Config(Linear.Config):
            """As torchtitan's."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if (mesh := _tensor_parallel(input)) is None:
                result: torch.Tensor = super().forward(input)
                return result
            own = matmul_reduce_scatter(local(input), local(self.weight), mesh, scatter_dim=SEQUENCE)
            return _like(input, own, shard=SEQUENCE)

    class OverlappedFeedForward(FeedForward):
        """SwiGLU after one gather of its input, before a scatter of its output."""

        @dataclass(kw_only=True, slots=True)
        class Config(FeedForward.Config):
            """As torchtitan's."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (mesh := _tensor_parallel(x)) is None:
                result: torch.Tensor = super().forward(x)
                return result
            weights = local(self.w1.weight), local(self.w3.weight)
            gate, up = all_gather_matmul(local(x), weights, mesh, gather_dim=SEQUENCE)
            own = matmul_reduce_scatter(silu(gate) * up, local(self.w2.weight), mesh, scatter_dim=SEQUENCE)
            return _like(x, own, shard=SEQUENCE)

    class TunedOptimizers(OptimizersContainer):
        """Optimizers whose `zero_grad` begins a tuned step and whose `step` ends it."""

        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):
            options: dict[str, Any] = field(default_factory=dict)  # of `StepTuner`

        def __init__(self, config: Config, **given: Any) -> None:
            super().__init__(config, **given)
            self.tuner = StepTuner(**{"is_dist": True, "name": "train_step", **config.options})
            self._step = contextlib.ExitStack()

        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            self._step.close()
            self._step.enter_context(self.tuner.step())
            super().zero_grad(*args, **kwargs)

        def step(self, *args: Any, **kwargs: Any) -> None:
            super().step(*args, **kwargs)
            self._step.close()

    @override(
        target=FeedForward.Config, fqns=["*layers.*.feed_forward"], description="overlapped feed-forward"
    )
    def feed_forward(cfg: FeedForward.Config) -> FeedForward.Config:
        _check(cfg, "x", cfg.w1, cfg.w2, cfg.w3)
        return derive(
            cfg, OverlappedFeedForward.Config, sharding_config=None, **_states_only(cfg, "w1", "w2", "w3")
        )

    @override(target=GQAttention.Config, fqns=["*layers.*.attention"], description="overlapped projections")
    def attention(cfg: GQAttention.Config) -> GQAttention.Config:
        if not isinstance(cfg.qkv_linear, FusedQKVLinear.Config):
            raise ValueError(
                "dist_autotune.torchtitan.attention needs fuse_qkv=True: one gather serves q, k and v"
            )
        _check(cfg, "x_BLD", cfg.qkv_linear.wqkv, cfg.wo)
        projections = derive(
            cfg.qkv_linear, OverlappedQKVLinear.Config, **_states_only(cfg.qkv_linear, "wqkv")
        )
        output = derive(_states_only(cfg, "wo")["wo"], OverlappedRowParallel.Config)
        return derive(cfg, type(cfg), sharding_config=None, qkv_linear=projections, wo=output)

    @override(target=OptimizersContainer.Config, exact=True, description="tuned steps")
    def tuned_steps(cfg: OptimizersContainer.Config, **options: Any) -> OptimizersContainer.Config:
        return derive(cfg, TunedOptimizers.Config, options=options)

    def _check(cfg: Any, argument: str, *linears: Linear.Config) -> None:
        """Raise ValueError for a block that cannot be served; of "dist_gemm" torchtitan checks."""
        if any(each.bias for each in linears):
            raise ValueError(
                f"{type(cfg).__qualname__}: products with a bias are not overlapped; choose by fqns="
            )
        if cfg.sharding_config is not None:
            given = (cfg.sharding_config.in_src_shardings or {}).get(argument)
            if given != dense_sequence_parallel_placement():
                raise ValueError("dist_autotune.torchtitan needs --parallelism.enable_sequence_parallel")

    def _states_only(cfg: Any, *names: str) -> dict[str, Any]:
        """Return linears of a block, with their parameters sharded, and nothing redistributed around them."""
        found = {}
        for name in names:
            linear = getattr(cfg, name)
            sharding = linear.sharding_config
            if sharding is not None:
                sharding = replace(sharding, in_src_shardings=None, in_dst_shardings=None)
                sharding = replace(sharding, out_src_shardings=None, out_dst_shardings=None)
            found[name] = replace(linear, sharding_config=sharding)
        return found

    def _tensor_parallel(x: torch.Tensor) -> Any:
        """Return the mesh of the ranks that share a block; None: there is one."""
        if isinstance(x, DTensor):
            return x.device_mesh
        mesh = current_spmd_mesh()
        if mesh is None or "tp" not in (mesh.mesh_dim_names or ()) or mesh["tp"].size() == 1:
            return None
        return mesh["tp"]
