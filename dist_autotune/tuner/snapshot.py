"""Putting state back between the runs of one call, so that only the final run leaves its effects."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ..errors import InvalidOption
from ..launch.written_tensors import without_overlap


class Snapshot:
    """A copy of random states, and of named tensors and `state_dict()` holders with their gradients."""

    def __init__(self, preserved: Sequence[Any]) -> None:
        self._restorers: list[Callable[[], None]] = [_random_state()]
        for item in preserved:
            self._restorers += [_restorer(item), *_gradients(item)]

    def restore(self) -> None:
        """Put everything back. Tensors keep their storage: only their contents are written."""
        for restore in self._restorers:
            restore()


def check_preserved(preserved: Sequence[Any]) -> None:
    """Raise InvalidOption for an object whose state cannot be put back."""
    _check_kinds("preserve", preserved, "state_dict", "load_state_dict")
    for item in preserved:
        is_strided = isinstance(item, torch.Tensor) and item.layout is torch.strided
        steps = zip(item.shape, item.stride(), strict=True) if is_strided else ()
        if any(size > 1 and not step for size, step in steps):
            raise InvalidOption(
                f"preserve= holds a tensor of shape {tuple(item.shape)} and strides {item.stride()}: "
                "elements overlap in memory and cannot be restored; preserve the tensor it was expanded from"
            )


def check_outputs(outputs: Sequence[Any]) -> None:
    """Raise InvalidOption for an object without tensors to compare."""
    _check_kinds("outputs", outputs, "state_dict")


def _check_kinds(option: str, items: Sequence[Any], *methods: str) -> None:
    for item in items:
        if not isinstance(item, torch.Tensor) and not all(callable(getattr(item, m, None)) for m in methods):
            raise InvalidOption(
                f"{option}= holds a {type(item).__module__}.{type(item).__qualname__}: it is neither a "
                f"tensor nor does it have {' and '.join(f'{method}()' for method in methods)}"
            )


def _restorer(item: Any) -> Callable[[], None]:
    if not isinstance(item, torch.Tensor):
        state = item.state_dict()
        if any(map(is_lazy, tree_leaves(state))):
            raise InvalidOption(
                f"preserve= holds a {type(item).__qualname__} with parameters that are not initialized and "
                "cannot be put back: call it once before the function is tuned"
            )
        saved_state = copy.deepcopy(state)
        return lambda: _load(item, saved_state)
    saved, shape = without_overlap(item.detach()).clone(), item.shape

    def restore() -> None:
        if item.shape != shape:
            raise InvalidOption(
                f"preserve= holds a tensor of shape {tuple(shape)}, and a run made it {tuple(item.shape)}: "
                "give the object that holds it and has a state_dict(), or let runs keep its shape"
            )
        # `.data` has a version of its own: autograd compares that of the item with what a graph has kept.
        # Of other layouts it has memory of its own too, once it is written.
        into = item.data if item.layout is torch.strided else item
        with torch.inference_mode(item.is_inference()), torch.no_grad():
            without_overlap(into).copy_(saved)

    return restore


def _load(item: Any, saved_state: Any) -> None:
    live = item.state_dict()
    tensors = [leaf for leaf in tree_leaves(live) if isinstance(leaf, torch.Tensor)]
    of_inference = any(tensor.is_inference() for tensor in tensors)
    with contextlib.ExitStack() as versions:  # as above: what a run has changed has other ones already
        for tensor in tensors:
            if not tensor.is_inference():
                versions.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
        loaded = _written_into(live, saved_state)
        with torch.inference_mode() if of_inference else contextlib.nullcontext():
            item.load_state_dict(loaded)


@torch.no_grad()
def _written_into(live: Any, saved: Any) -> Any:
    """Return the saved state to load, written into the tensors of the `live` state where they fit.

    Optimizers keep and change what they load, so the saved copy itself is never loaded; and a second copy is
    made only where a tensor does not fit.
    """
    if isinstance(saved, torch.Tensor):
        if not _fits(live, saved):
            return saved.clone()
        live.copy_(saved)
        return live
    if type(saved) in (dict, OrderedDict):
        known = live if isinstance(live, dict) else {}
        loaded = copy.copy(saved)  # with the versions of a module
        loaded.update((key, _written_into(known.get(key), value)) for key, value in saved.items())
        return loaded
    if type(saved) in (list, tuple):
        items = live if isinstance(live, (list, tuple)) and len(live) == len(saved) else [None] * len(saved)
        return type(saved)(map(_written_into, items, saved))
    return copy.deepcopy(saved)


def _fits(live: Any, saved: torch.Tensor) -> bool:
    """Return whether the saved values can be written into a tensor whose elements do not overlap."""
    return (
        type(live) is type(saved)
        and (live.shape, live.dtype, live.device) == (saved.shape, saved.dtype, saved.device)
        and live.layout is saved.layout is torch.strided
        and all(stride or size <= 1 for size, stride in zip(live.shape, live.stride(), strict=True))
    )


def _gradients(item: Any) -> list[Callable[[], None]]:
    """Gradients are in no state_dict, but a run adds to them."""
    owners: Iterable[Any] = [item] if isinstance(item, torch.Tensor) else ()
    if isinstance(item, torch.nn.Module):
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
