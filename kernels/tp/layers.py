"""Tensor-parallel layers made from ordinary ones: each rank holds a part of the parameters.

Between the layers each rank holds its part of the tokens, along one dimension of the activations; inside a
pair of a column-parallel and a row-parallel layer, all tokens and its part of the features. What is to be
minimised is the sum of the ranks' losses.

Parameters are DTensors with the names, the global shapes and the values of the ordinary layers, so state
dicts, optimizers and FSDP2 on another dimension of the mesh take them as they take those of torch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ..tensors import check_no_gradient
from .functions import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, sum_gradient
from .gating import silu_times
from .registry import name_of


def distribute(parameter: Tensor | None, mesh: DeviceMesh, placement: Placement) -> nn.Parameter | None:
    """Return this rank's part of a parameter that is equal on all ranks; nothing is sent."""
    if parameter is None:
        return None
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"a parameter of {list(parameter.shape)} is distributed already: {parameter.placements}"
        )
    if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
        shape, dim = list(parameter.shape), placement.dim
        raise ValueError(f"dimension {dim} of a parameter {shape} is no multiple of {mesh.size()} ranks")
    held = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(held, parameter.requires_grad)


def local(parameter: Tensor | None) -> Any:
    """Return this rank's part of a parameter; its gradient is a DTensor again."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _ParallelLinear(nn.Linear):
    """An `nn.Linear` of which each rank holds a part; its features are those of the whole."""

    def __init__(
        self, linear: nn.Linear, mesh: DeviceMesh, dim: int, of_weight: int, of_bias: Placement, fp8: bool
    ) -> None:
        nn.Module.__init__(self)
        self.fp8 = fp8
        self.group_name = name_of(mesh)
        self.in_features, self.out_features, self.dim = linear.in_features, linear.out_features, dim
        self.register_parameter("weight", distribute(linear.weight, mesh, Shard(of_weight)))
        self.register_parameter("bias", distribute(linear.bias, mesh, of_bias))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"


class ColumnParallelLinear(_ParallelLinear):
    """An `nn.Linear` from this rank's tokens, along `dim`, to its part of the features of all tokens.

    With gather=False from all tokens, which each rank has: for serving, it has no backward. fp8: as in
    `all_gather_matmul`, and not beside gather=False.
    """

    def __init__(
        self,
        linear: nn.Linear,
        mesh: DeviceMesh,
        *,
        dim: int = 0,
        save_gathered: bool = True,
        gather: bool = True,
        fp8: bool = False,
    ) -> None:
        if fp8 and not gather:
            raise ValueError("fp8=True, gather=False: without a gather the product is torch's, in bf16")
        super().__init__(linear, mesh, dim, 0, Shard(0), fp8)
        self.save_gathered, self.gather = save_gathered, gather
        self._together: tuple[ProductsOfOneInput, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.gather:
            weight, bias = local(self.weight), local(self.bias)
            check_no_gradient("ColumnParallelLinear(gather=False)", x=x, weight=weight, bias=bias)
            return nn.functional.linear(x, weight, bias)
        if self._together is None:
            return project(x, [self])[0]
        products, index = self._together
        return products.product(index, x)


def project(x: Tensor, linears: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """Return the products of the tokens with each of the layers, with one gather."""
    first = linears[0]
    return all_gather_matmul(
        x,
        [local(linear.weight) for linear in linears],
        first.group_name,
        bias=[local(linear.bias) for linear in linears],
        gather_dim=first.dim,
        save_gathered=first.save_gathered,
        fp8=first.fp8,
    )


class ProductsOfOneInput:
    """Lets column-parallel layers share a gather in a call of the module that has them.

    The first layer that is called computes the products of all. The others find theirs if they are given the
    same tensor, unchanged, in the same grad mode; products that nobody has read end with the module's call.
    Layers called by themselves, or with an inference tensor, which does not count its changes, gather alone.
    """

    def __init__(self, linears: Sequence[ColumnParallelLinear]) -> None:
        self._linears = list(linears)
        self._is_shared = False  # within a call of the module
        self._input: Tensor | None = None
        self._state: tuple[Any, ...] = ()  # of the input, when the products were made
        self._products: dict[int, Tensor] = {}
        for index, linear in enumerate(linears):
            linear._together = self, index

    def share_in(self, module: nn.Module) -> None:
        """Share in the calls of a module from now on."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def product(self, index: int, x: Tensor) -> Tensor:
        """Return the product of `x` with the layer of that index."""
        state = _state_of(x) if self._is_shared else None
        if state is None:
            return project(x, [self._linears[index]])[0]
        if self._input is not x or self._state != state or index not in self._products:
            self._input, self._state = x, state
            self._products = dict(enumerate(project(x, self._linears)))
        found = self._products.pop(index)
        if not self._products:
            self._input = None
        return found

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        self._is_shared = True

    def _end(self, module: nn.Module, arguments: Any, result: Any) -> None:
        self._is_shared, self._input, self._state, self._products = False, None, (), {}


def _state_of(x: Tensor) -> tuple[Any, ...] | None:
    """Return the state in which products of `x` stay valid; None for a tensor that counts no changes."""
    if torch.compiler.is_compiling():
        from torch._dynamo.comptime import comptime  # loaded by then; importing it takes a second

        comptime(_note_version)
        version = _noted_version()
    elif x.is_inference():
        return None
    else:
        version = x._version
    return version, torch.is_grad_enabled(), x.requires_grad


_NOTED: list[int] = []  # while Dynamo traces: to a graph, `_version` is no number


def _note_version(context: Any) -> None:
    _NOTED[:] = [context.get_local("x").as_fake()._version]


@torch.compiler.assume_constant_result  # of what is traced
def _noted_version() -> int:
    return _NOTED[0]


class RowParallelLinear(_ParallelLinear):
    """An `nn.Linear` from this rank's part of the features of all tokens to its own tokens, along `dim`.

    With all_reduce=True to all tokens, on all ranks: for serving, it has no backward. fp8: as in
    `all_gather_matmul`, and not beside all_reduce=True.
    """

    def __init__(
        self,
        linear: nn.Linear,
        mesh: DeviceMesh,
        *,
        dim: int = 0,
        all_reduce: bool = False,
        fp8: bool = False,
    ) -> None:
        if fp8 and all_reduce:
            raise ValueError("fp8=True, all_reduce=True: products before an all-reduce are in bf16")
        super().__init__(linear, mesh, dim, 1, Replicate(), fp8)
        self.all_reduce = all_reduce

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = local(self.weight), local(self.bias)
        if self.all_reduce:
            return matmul_all_reduce(x, weight, self.group_name, bias=bias)
        return matmul_reduce_scatter(
            x, weight, self.group_name, bias=bias, scatter_dim=self.dim, fp8=self.fp8
        )


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` from a rank's tokens to its tokens: one gather, one scatter.

    names: of the three layers in the state dict. fp8: as in `all_gather_matmul`.
    """

    def __init__(
        self,
        gate: nn.Linear,
        up: nn.Linear,
        down: nn.Linear,
        mesh: DeviceMesh,
        *,
        dim: int = 0,
        save_gathered: bool = True,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self._names = names
        for name, linear in zip(names[:2], (gate, up), strict=True):
            layer = ColumnParallelLinear(linear, mesh, dim=dim, save_gathered=save_gathered, fp8=fp8)
            self.add_module(name, layer)
        self.add_module(names[2], RowParallelLinear(down, mesh, dim=dim, fp8=fp8))

    def forward(self, x: Tensor) -> Tensor:
        layers: list[Any] = [self.get_submodule(name) for name in self._names]
        gate, up, down = layers
        of_gate, of_up = project(x, [gate, up])
        result: Tensor = down(silu_times(of_gate, of_up))
        return result


def sequence_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a copy of a module that works on each token alone, with parameters for a rank's tokens.

    They are equal on all ranks, and so are their gradients: sums over the ranks, in each backward. The
    module's own code sees ordinary tensors. It must have no children.
    """
    kind = type(module)
    if next(module.children(), None) is not None:
        raise ValueError(f"{kind.__name__} has children; name each of them in the plan")
    parallel = copy.copy(module)
    parallel._parameters = {
        name: distribute(parameter, mesh, Replicate()) for name, parameter in module._parameters.items()
    }
    parallel.__class__ = type(kind.__name__, (_SequenceParallel, kind), {"__module__": kind.__module__})
    vars(parallel)["group_name"] = name_of(mesh)
    return parallel


class _SequenceParallel(nn.Module):
    """Mixin that `sequence_parallel` puts before the class of a module."""

    group_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = self._parameters
        summed: Any = {
            name: None if each is None else sum_gradient(local(each), self.group_name)
            for name, each in held.items()
        }
        self._parameters = summed
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters = held
