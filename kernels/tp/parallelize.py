"""Which modules of a model are parallel, and how: plans in the manner of torch's `parallelize_module`."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .layers import ColumnParallelLinear, ProductsOfOneInput, RowParallelLinear, sequence_parallel


class Style(Protocol):
    """How one module becomes parallel."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Return what takes the module's place; it may be the module itself, with other children."""


class ColumnParallel:
    """A linear layer from this rank's tokens to its part of the features of all; or several of one input.

    names: the children that are linear layers of one input, which share a gather; none: the module itself is
    one. dim: of the activations, along which ranks share the tokens. save_gathered: see `all_gather_matmul`.
    """

    def __init__(self, *names: str, dim: int = 0, save_gathered: bool = True) -> None:
        self.names, self.dim, self.save_gathered = names, dim, save_gathered

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if not self.names:
            return self._layer(module, mesh)
        layers = [self._layer(module.get_submodule(name), mesh) for name in self.names]
        for name, layer in zip(self.names, layers, strict=True):
            module.set_submodule(name, layer)
        ProductsOfOneInput(layers)
        return module

    def _layer(self, linear: nn.Module, mesh: DeviceMesh) -> ColumnParallelLinear:
        checked = _linear(linear)
        return ColumnParallelLinear(checked, mesh, dim=self.dim, save_gathered=self.save_gathered)


@dataclass(frozen=True)
class RowParallel:
    """A linear layer from this rank's part of the features of all tokens to its own tokens."""

    dim: int = 0

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return RowParallelLinear(_linear(module), mesh, dim=self.dim)


@dataclass(frozen=True)
class SequenceParallel:
    """A module that works on each token alone, such as a norm, an embedding or the head of a model."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return sequence_parallel(module, mesh)


def parallelize(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Style]) -> nn.Module:
    """Make the modules that the plan names parallel over a mesh of one dimension; return the module.

    plan: from names of modules, each part of which may hold the wildcards of a shell, to styles. All ranks
    have the same values in the module, or none (the meta device). Every parameter must be reached: one that
    is not would be trained with the gradient of a rank's tokens alone. Call it before `fully_shard` on the
    other dimension of the mesh.
    """
    for pattern, style in plan.items():
        names = [name for name, _ in module.named_modules() if _matches(name, pattern)]
        if not names:
            raise ValueError(f"the plan names {pattern!r}, and no module has such a name")
        for name in names:
            parallel = style.apply(module.get_submodule(name), mesh)
            if name:
                module.set_submodule(name, parallel)
            else:
                module = parallel
    missed = [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)]
    if missed:
        raise ValueError(
            f"the plan does not reach {len(missed)} parameters: {', '.join(missed[:5])}; SequenceParallel() "
            "is for modules that work on each token alone"
        )
    return module


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _linear(module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{type(module).__name__} cannot be split by rows or columns; an nn.Linear is needed")
    return module
