"""Putting state back between the runs of one call, so that only the final run leaves its effects."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import InvalidOption


class Snapshot:
    """The random number generators, and the named tensors and `state_dict()` holders, as they are now.

    Of tensors, modules and optimizers, the gradients too.
    """

    def __init__(self, preserved: Sequence[Any]) -> None:
        self._restorers: list[Callable[[], None]] = [_random_state()]
        for item in preserved:
            self._restorers += [_restorer(item), *_gradients(item)]

    def restore(self) -> None:
        """Put everything back. Tensors keep their storage: only their contents are written."""
        for restore in self._restorers:
            restore()


def check_preserved(preserved: Sequence[Any]) -> None:
    """Raise InvalidOption for what cannot be put back."""
    for item in preserved:
        holds_state = all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))
        if not isinstance(item, torch.Tensor) and not holds_state:
            raise InvalidOption(
                f"preserve= holds a {type(item).__module__}.{type(item).__qualname__}: it is neither a "
                "tensor nor does it have state_dict() and load_state_dict()"
            )
        if isinstance(item, torch.Tensor) and _overlaps_itself(item):
            raise InvalidOption(
                f"preserve= holds a tensor of shape {tuple(item.shape)} and strides {item.stride()}: "
                "elements overlap in memory and cannot be restored; preserve the tensor it was expanded from"
            )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _restorer(item: Any) -> Callable[[], None]:
    if not isinstance(item, torch.Tensor):
        state = copy.deepcopy(item.state_dict())
        return lambda: item.load_state_dict(copy.deepcopy(state))
    saved = item.detach().clone()

    def restore() -> None:
        with torch.no_grad():
            item.copy_(saved)

    return restore


def _gradients(item: Any) -> list[Callable[[], None]]:
    """Gradients are in no state_dict, but a run adds to them."""
    owners: Iterable[Any] = ()
    if isinstance(item, torch.Tensor):
        owners = [item]
    elif isinstance(item, torch.nn.Module):
        owners = item.parameters()
    elif isinstance(item, torch.optim.Optimizer):
        owners = [parameter for group in item.param_groups for parameter in group["params"]]
    return [_gradient(owner) for owner in owners if owner.is_leaf and owner.requires_grad]


def _gradient(owner: torch.Tensor) -> Callable[[], None]:
    gradient = owner.grad
    restore = None if gradient is None else _restorer(gradient)

    def put_back() -> None:
        owner.grad = gradient
        if restore is not None:
            restore()

    return put_back


def _random_state() -> Callable[[], None]:
    on_cpu = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    in_python, in_numpy = random.getstate(), np.random.get_state()

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)
        random.setstate(in_python)
        np.random.set_state(in_numpy)

    return restore
