"""Plans that name the parallel modules of a model, in the manner of torch's `parallelize_module`."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .layers import ColumnParallelLinear, ProductsOfOneInput, RowParallelLinear, sequence_parallel


class Style(Protocol):
    """How one module becomes parallel."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, nn.Module]:
        """Return what takes the module's place, under "", or its children's, by name; change nothing."""


class ColumnParallel:
    """A linear layer from this rank's tokens to its part of the features of all; or several of one input.

    names: the children that are linear layers of one input, which share a gather; none: the module itself is
    one. dim: of the activations, along which ranks share the tokens. save_gathered: see `all_gather_matmul`.
    gather=False: each rank has all tokens; without a backward. fp8: see `all_gather_matmul`.
    """

    def __init__(
        self,
        *names: str,
        dim: int = 0,
        save_gathered: bool = True,
        gather: bool = True,
        fp8: bool = False,
    ) -> None:
        self.names = names
        options = {"dim": dim, "save_gathered": save_gathered, "gather": gather, "fp8": fp8}
        self.options: dict[str, Any] = options

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, ColumnParallelLinear]:
        children = {name: _linear(module.get_submodule(name)) for name in self.names or ("",)}
        return {name: ColumnParallelLinear(each, mesh, **self.options) for name, each in children.items()}


@dataclass(frozen=True)
class RowParallel:
    """A linear layer from this rank's part of the features of all tokens to its own tokens.

    all_reduce: to all tokens, on all ranks; without a backward. fp8: see `all_gather_matmul`.
    """

    dim: int = 0
    all_reduce: bool = False
    fp8: bool = False

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, nn.Module]:
        return {"": RowParallelLinear(_linear(module), mesh, **asdict(self))}


@dataclass(frozen=True)
class SequenceParallel:
    """A module that works on each token alone, such as a norm, an embedding or the head of a model."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, nn.Module]:
        return {"": sequence_parallel(module, mesh)}


def parallelize(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Style]) -> nn.Module:
    """Make the modules that the plan names parallel over a mesh of one dimension; return the module.

    plan: from names of modules, each part of which may hold the wildcards of a shell, to styles. All ranks
    have the same values in the module, or none (the meta device). Every parameter must be reached, once: one
    that is not would be trained with the gradient of a rank's tokens alone. What shares a parameter, as an
    embedding and a head, shares it still. An error leaves the module as it was. Call it before `fully_shard`
    on the other dimension of the mesh.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    parallel: dict[str, nn.Module] = {}
    of_one_input: list[tuple[nn.Module, list[ColumnParallelLinear]]] = []
    for pattern, style in plan.items():
        names = [name for name in modules if _matches(name, pattern)]
        if not names:
            raise ValueError(f"the plan names {pattern!r}, and no module has such a name")
        if isinstance(style, type) or not hasattr(style, "apply"):
            raise TypeError(f"the plan has {style!r} for {pattern!r}; it must be a style, SequenceParallel()")
        for name in names:
            replacements = style.apply(modules[name], mesh)
            layers = [each for each in replacements.values() if isinstance(each, ColumnParallelLinear)]
            if isinstance(style, ColumnParallel) and len(layers) > 1:
                of_one_input.append((modules[name], layers))
            for child, replacement in replacements.items():
                place = ".".join(filter(None, (name, child)))
                if place in parallel:
                    raise ValueError(f"the plan reaches {place!r} twice, the second time by {pattern!r}")
                parallel[place] = replacement
    parameters = module.named_parameters(remove_duplicate=False)
    missed = [name for name, _ in parameters if name.rpartition(".")[0] not in parallel]
    if missed:
        raise ValueError(
            f"the plan does not reach {len(missed)} parameters: {', '.join(missed[:5])}; SequenceParallel() "
            "is for modules that work on each token alone"
        )
    _share_again(modules, parallel)
    for name, replacement in parallel.items():
        if name:
            module.set_submodule(name, replacement)
    for owner, layers in of_one_input:
        ProductsOfOneInput(layers).share_in(owner)
    return parallel.get("", module)


def _share_again(modules: Mapping[str, nn.Module], parallel: Mapping[str, nn.Module]) -> None:
    """Let modules that had one parameter, as an embedding and a head, have one again.

    Two would be trained apart, each with the gradient of its own module.
    """
    known: dict[nn.Parameter, tuple[str, DTensor]] = {}
    for name, replacement in parallel.items():
        for kind, held in replacement.named_parameters(recurse=False):
            whole, place = getattr(modules.get(name), kind, None), ".".join(filter(None, (name, kind)))
            if whole is None or not isinstance(held, DTensor):
                continue
            first, shared = known.setdefault(whole, (place, held))
            if shared.placements != held.placements:
                raise ValueError(
                    f"{first!r} and {place!r} are one parameter, and the plan gives them {shared.placements} "
                    f"and {held.placements}; give both modules one style, or each its own parameter"
                )
            setattr(replacement, kind, shared)


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    alike = len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
    return alike and bool(name) == bool(pattern)  # "*" is no name of the whole module


def _linear(module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{type(module).__name__} cannot be split by rows or columns; an nn.Linear is needed")
    return module
