"""Puts state back between the runs of one call, so that only the final run leaves its effects.

State is found from the objects in `preserve=`: tensors, generators, containers, and the attributes of
modules, optimizers and other objects with a `state_dict`. Each tensor is copied and put back in place: the
same object, memory and dtype, including state that a `state_dict` leaves out or converts.
"""

from __future__ import annotations

import enum
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import MemberDescriptorType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import InvalidOption
from ..launch.written_tensors import bytes_needed, without_overlap

_Restore: TypeAlias = Callable[[], None]
_PLAIN = (str, bytes, int, float, complex, type(None), enum.Enum, torch.dtype, torch.device)
_CONTAINERS = (dict, list, tuple, set, deque)
_GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
)
_LIBRARIES = ("torch", "triton", "numpy", "dist_autotune")
_MISSING = object()


class Snapshot:
    """A copy of random states, and of the state that named objects keep, with gradients."""

    def __init__(self, preserved: Sequence[Any]) -> None:
        self._restorers = [_random_state()]
        seen: dict[int, Any] = {}  # with the objects: the id of one that has gone would be given again
        pending = [*preserved]
        while pending:
            if id(item := pending.pop()) not in seen:
                seen[id(item)] = item
                restorers, held = _opened(item)
                self._restorers += restorers
                pending += [each for each in held if not isinstance(each, _PLAIN)]

    def restore(self) -> None:
        """Put everything back. Tensors keep their storage: only their contents are written."""
        for restore in self._restorers:
            restore()


def check_preserved(preserved: Sequence[Any]) -> None:
    """Raise InvalidOption for an object whose state cannot be put back."""
    for item in preserved:
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            if any(size > 1 and not step for size, step in zip(item.shape, item.stride(), strict=True)):
                raise InvalidOption(
                    f"preserve= holds a tensor of shape {tuple(item.shape)} and strides {item.stride()}: "
                    "elements overlap and cannot be restored; preserve the tensor that it was expanded from"
                )
        elif not (isinstance(item, torch.Tensor) or _is_generator(item) or _is_holder(item)):
            raise InvalidOption(
                f"preserve= holds {_kind(item)}: it is neither a tensor, nor a generator of random numbers, "
                "nor an object with state_dict() or with attributes that hold tensors"
            )


def check_outputs(outputs: Sequence[Any]) -> None:
    """Raise InvalidOption for an object without tensors to compare."""
    for item in outputs:
        if not isinstance(item, torch.Tensor) and not callable(getattr(item, "state_dict", None)):
            raise InvalidOption(f"outputs= holds {_kind(item)}: it is no tensor and has no state_dict()")


def _kind(item: Any) -> str:
    return f"a {type(item).__module__}.{type(item).__qualname__}"


# -- what belongs to the state -----------------------------------------------------------------------------


def _opened(item: Any) -> tuple[list[_Restore], list[Any]]:
    """Return functions that put an object's own state back, and the objects that it keeps."""
    if isinstance(item, torch.Tensor):
        attributes = getattr(item, "__dict__", {})  # such as `main_grad`
        gradient = item.grad if item.is_leaf and item.requires_grad else None
        restorers = [_tensor(item), _gradient(item, gradient), _bindings(attributes, _is_held)]
        return restorers, [gradient, *attributes.values()]
    if isinstance(item, np.ndarray):
        return [_array(item)] if item.flags.writeable else [], []
    if _is_generator(item):
        return [_generator(item)], []
    if isinstance(item, dict):
        return [_bindings(item, _is_state)], [*item, *item.values()]
    if isinstance(item, _CONTAINERS):
        return [] if isinstance(item, tuple) else [_items(item)], [*item]
    if _is_holder(item):
        # A library's module counts calls beside state in C++, as DistributedDataParallel does.
        of_library = isinstance(item, torch.nn.Module) and _is_of_library(item)
        belongs, kept = _is_held if of_library else _is_state, _attributes(item)
        restorers = [_bindings(each, belongs) for each in kept]
        if of_library and hasattr(item, "training"):
            restorers.append(functools.partial(setattr, item, "training", item.training))
        return restorers, [value for each in kept for value in each.values()]
    return [], []


def _is_state(value: Any) -> bool:
    """Return whether a value is state, and not an object beside it, such as an operation."""
    return isinstance(value, _PLAIN) or _is_held(value)


def _is_held(value: Any) -> bool:
    """Return whether a value is state that can change in place."""
    kinds = torch.Tensor, np.ndarray, *_CONTAINERS
    return isinstance(value, kinds) or _is_generator(value) or _is_holder(value)


def _is_generator(value: Any) -> bool:
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)


def _is_holder(value: Any) -> bool:
    """Return whether attributes are state: there is a `state_dict`, or a user's object holds tensors."""
    if isinstance(value, type) or not (kept := _attributes(value)):
        return False
    if callable(getattr(value, "state_dict", None)):
        return True
    if _is_of_library(value):
        return False
    values = [value for attributes in kept for value in attributes.values()]
    values += [each for value in values if isinstance(value, (list, tuple, set, deque)) for each in value]
    values += [each for value in values if isinstance(value, dict) for each in value.values()]
    return any(isinstance(each, torch.Tensor) or _is_generator(each) for each in values)


class _Slots(MutableMapping[str, Any]):
    """The attributes that an object keeps in `__slots__`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        members = {name: each for kind in type(owner).__mro__[::-1] for name, each in vars(kind).items()}
        self._members = {n: each for n, each in members.items() if isinstance(each, MemberDescriptorType)}

    def __getitem__(self, name: str) -> Any:
        try:
            return self._members[name].__get__(self._owner)
        except AttributeError:  # it is not bound
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._members[name].__set__(self._owner, value)

    def __delitem__(self, name: str) -> None:
        self._members[name].__delete__(self._owner)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._members if hasattr(self._owner, name)])

    def __len__(self) -> int:
        return len([*self])


def _attributes(value: Any) -> list[MutableMapping[str, Any]]:
    """Return the holders of an object's attributes: its `__dict__`, its slots, both or none."""
    attributes = getattr(value, "__dict__", None)
    kept: list[MutableMapping[str, Any]] = [attributes] if isinstance(attributes, dict) else []
    has_slots = any(vars(kind).get("__slots__") for kind in type(value).__mro__)
    return [*kept, _Slots(value)] if has_slots else kept


def _is_of_library(value: Any) -> bool:
    return str(type(value).__module__).partition(".")[0] in _LIBRARIES


# -- how each kind is put back -----------------------------------------------------------------------------


def _bindings(live: MutableMapping[Any, Any], belongs: Callable[[Any], bool]) -> _Restore:
    """Put back the bindings of names. An object that is no state and was made by a run stays."""
    known, saved = {*live}, {name: value for name, value in live.items() if belongs(value)}

    def restore() -> None:
        for name in [name for name, value in live.items() if name not in known and belongs(value)]:
            del live[name]
        for name, value in saved.items():
            now = live.get(name, _MISSING)
            if now is not value and (now is _MISSING or value is not None or belongs(now)):
                live[name] = value

    return restore


def _items(live: Any) -> _Restore:
    saved = [*live]

    def restore() -> None:
        now = [*live]
        if len(now) != len(saved) or any(one is not other for one, other in zip(now, saved, strict=True)):
            live.clear()
            (live.update if isinstance(live, set) else live.extend)(saved)

    return restore


def _array(live: np.ndarray[Any, Any]) -> _Restore:
    saved = live.copy()

    def restore() -> None:
        live[...] = saved

    return restore


def _tensor(item: torch.Tensor) -> _Restore:
    if is_lazy(item):
        raise InvalidOption(
            "preserve= holds a module with parameters that are not initialized and cannot be put back: call "
            "it once before the function is tuned"
        )
    # `.data` has a version of its own: autograd compares that of the item with what a graph has kept. Of
    # other layouts it has memory of its own too, once it is written.
    is_plain = item.layout is torch.strided and not is_traceable_wrapper_subclass(item)
    memory = item.data if item.layout is torch.strided else item
    if is_plain and not _has_memory(memory):  # sharded: its owner frees and fills it
        return lambda: None
    saved = without_overlap(memory.detach()).clone()

    def restore() -> None:
        with torch.inference_mode(item.is_inference()), torch.no_grad():
            if is_plain:
                if not _has_memory(memory):
                    memory.untyped_storage().resize_(_bytes_needed(memory))
                if not _is_same_memory(item, memory):  # a run has resized it, or bound it to other memory
                    item.data = memory
            without_overlap(memory).copy_(saved)

    return restore


def _bytes_needed(tensor: torch.Tensor) -> int:
    return bytes_needed(int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= _bytes_needed(tensor)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    layouts = [(each.shape, each.stride(), each.dtype, each.data_ptr()) for each in (one, other)]
    return layouts[0] == layouts[1]


def _gradient(owner: torch.Tensor, gradient: torch.Tensor | None) -> _Restore:
    def restore() -> None:
        if owner.is_leaf and owner.grad is not gradient:
            owner.grad = gradient

    return restore


def _generator(live: Any) -> _Restore:
    if isinstance(live, random.Random):
        state = live.getstate()
        return lambda: live.setstate(state)
    if isinstance(live, np.random.Generator):
        live = live.bit_generator
    if isinstance(live, np.random.BitGenerator):
        numbers = live.state

        def restore() -> None:
            live.state = numbers

        return restore
    saved = live.get_state()
    return lambda: live.set_state(saved)


def _random_state() -> _Restore:
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
