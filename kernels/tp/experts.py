"""The weights of all experts: one parameter for each product, and by expert in state dicts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from .layers import distribute

ALIGNED_BYTES = 16  # rows of a grouped product begin at multiples of it


class Experts(nn.Module):
    """The weights of SwiGLUs without bias. A rank holds its part of the hidden features of each.

    gate_up [experts, 2, hidden, features] holds gates and ups, so that one gather serves both; down is
    [experts, features, hidden]. State dicts have the matrices one by one, as `3.gate_proj.weight`, under
    `names` of gate, up and down. They share the parameters' memory, unless FSDP2 splits the experts: then
    they are copies, as large as this rank's part, split along another dimension.
    """

    gate_up: Tensor
    down: Tensor

    def __init__(
        self,
        experts: Sequence[tuple[nn.Linear, nn.Linear, nn.Linear]],
        mesh: DeviceMesh,
        names: tuple[str, str, str],
    ) -> None:
        super().__init__()
        _check_alike(experts)
        gates, ups, downs = ([layer.weight for layer in layers] for layers in zip(*experts, strict=True))
        features, hidden = downs[0].shape
        multiple = ALIGNED_BYTES // downs[0].itemsize
        for name, size in {"features": features, "hidden features of a rank": hidden // mesh.size()}.items():
            if size % multiple:
                needed = f"a multiple of {multiple} is needed, for the weights' gradients"
                raise ValueError(f"{size} {name}; {needed}")
        self._held = {"gate_up": names[:2], "down": names[2:]}
        both = [*itertools.chain(*zip(gates, ups, strict=True))]
        self.register_parameter("gate_up", _one_parameter(both, mesh, Shard(0), (len(experts), 2)))
        self.register_parameter("down", _one_parameter(downs, mesh, Shard(1), (len(experts),)))
        # torch.distributed.checkpoint follows each name of a state dict by attributes.
        place = SimpleNamespace(**dict.fromkeys(names, SimpleNamespace(weight=None)))
        vars(self).update(dict.fromkeys(map(str, range(len(experts))), place))

    def extra_repr(self) -> str:
        number, features, hidden = self.down.shape
        return f"{number} experts, features={features}, hidden={hidden}"

    # ---- state dicts

    def _names(self, parameter_name: str, prefix: str) -> list[str]:
        """Return the names of the matrices of the parameter, in their order."""
        experts = range(len(self.get_parameter(parameter_name)))
        return [f"{prefix}{i}.{name}.weight" for i in experts for name in self._held[parameter_name]]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for parameter_name in self._held:
            parameter = self.get_parameter(parameter_name)
            matrices = _matrices(parameter if keep_vars else parameter.detach())
            destination.update(zip(self._names(parameter_name, prefix), matrices, strict=True))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        missed: list[str] = []
        for parameter_name in self._held:
            parameter, names = self.get_parameter(parameter_name), self._names(parameter_name, prefix)
            # Loading a full state dict, torch.distributed.checkpoint puts the present parameter beside it.
            state_dict.pop(f"{prefix}{parameter_name}", None)
            given = {name: state_dict.pop(name) for name in names if name in state_dict}
            missed += [name for name in names if name not in given]
            own = dict(zip(names, _matrices(parameter.detach()), strict=True))
            wrong = [
                f"size mismatch for {name}: {list(each.shape)} is given, {list(own[name].shape)} is needed."
                for name, each in given.items()
                if each.shape != own[name].shape
            ]
            if wrong:
                error_msgs += wrong
            elif given:
                loaded = _joined([given.get(name, own[name]) for name in names], parameter)
                state_dict[f"{prefix}{parameter_name}"] = loaded
        ignored: list[str] = []  # parameters that nothing was given for: their matrices are what is missing
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, ignored, unexpected_keys, error_msgs
        )
        missing_keys += missed if strict else []


def _check_alike(experts: Sequence[tuple[nn.Linear, nn.Linear, nn.Linear]]) -> None:
    """Raise unless all experts have the sizes and types of the first one: they become one parameter."""
    first = experts[0]
    hidden, features = first[0].weight.shape
    sizes = ((hidden, features), (hidden, features), (features, hidden))
    for number, layers in enumerate(experts):
        if any(layer.bias is not None for layer in layers):
            raise ValueError(f"expert {number} has a bias, which would be lost; layers without are needed")
        for name, layer, size in zip(("gate", "up", "down"), layers, sizes, strict=True):
            if layer.weight.shape != size or layer.weight.dtype != first[0].weight.dtype:
                given = f"{name} of expert {number} is {list(layer.weight.shape)} in {layer.weight.dtype}"
                needed = f"{list(size)} in {first[0].weight.dtype}, as expert 0 has it, is needed"
                raise ValueError(f"{given}; {needed}")


def _one_parameter(
    matrices: Sequence[Tensor], mesh: DeviceMesh, placement: Placement, sizes: tuple[int, ...]
) -> nn.Parameter:
    """Return this rank's part of all matrices, by these leading sizes."""
    with torch.no_grad():
        parts = [distribute(matrix, mesh, placement) for matrix in matrices]
        stacked = torch.stack([part for part in parts if part is not None]).unflatten(0, sizes)
    return nn.Parameter(stacked, any(matrix.requires_grad for matrix in matrices))


def _matrices(parameter: Any) -> tuple[Tensor, ...]:
    """Return the matrices of all experts; every rank holds a part of each."""
    first = parameter.dim() - 2
    of_matrix = _placements_of_matrix(parameter)
    placements = [Shard(each.dim + first) if isinstance(each, Shard) else each for each in of_matrix]
    split: Tensor = parameter.redistribute(placements=placements)
    return split.flatten(0, first - 1).unbind()


def _placements_of_matrix(parameter: DTensor) -> list[Placement]:
    """Return the placements of each matrix; a split of the experts becomes one of an unsplit dimension."""
    first = parameter.dim() - 2
    dims = [each.dim - first if isinstance(each, Shard) else None for each in parameter.placements]
    free = next((dim for dim in (0, 1) if dim not in dims), None)
    placements: list[Placement] = []
    for dim in dims:
        own = free if dim is not None and dim < 0 else dim
        placements.append(Replicate() if own is None else Shard(own))
    return placements


def _joined(matrices: Sequence[Tensor], parameter: Any) -> Tensor:
    """Return the matrices as the parameter holds them; each is whole on every rank, or distributed."""
    mesh, placements = parameter.device_mesh, _placements_of_matrix(parameter)
    parts: list[Tensor] = []
    for matrix in matrices:
        given = matrix.detach()
        if isinstance(given, DTensor) and given.device_mesh == mesh:
            parts.append(given.redistribute(mesh, placements))
            continue
        whole = given.full_tensor() if isinstance(given, DTensor) else given
        parts.append(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    joined: Any = torch.stack(parts).unflatten(0, parameter.shape[:-2])
    return joined.redistribute(mesh, parameter.placements)
