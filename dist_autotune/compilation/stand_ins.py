"""Copies of a launch's arguments that a config's `pre_hook` may change, and what it has changed.

A tensor is stood in for by its facts. Any other argument with attributes, a tensor descriptor above all, is
stood in for by a copy of itself; what the hook sets there is all that a launch could see of it, as the
dictionary that holds the arguments is made for the hook alone.
"""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

# The changed attributes of each argument that has any, by its place in `holders`.
Changes = dict[int, dict[str, Any]]


class NotTold(RuntimeError):
    """A `pre_hook` did something whose effect on the launch cannot be told from stand-ins."""


class StandIn(torch.Tensor):
    """A tensor without memory: shape, strides, dtype, device and address are the original's.

    Writing to it does nothing. Reading from it raises, so nothing can depend on what the original holds.
    """

    _device: torch.device
    _address: int | None  # None: of what was computed from another one

    @staticmethod
    def of(tensor: torch.Tensor) -> StandIn:
        """Return a stand-in; raises what torch raises for a tensor without strides or address."""
        facts = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return _marked(facts, tensor.device, tensor.data_ptr())

    @classmethod
    def __torch_function__(
        cls, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor and result.device.type == "meta":
            if not isinstance(args[0], StandIn):
                raise NotTold(f"{getattr(func, '__name__', func)} was called with a tensor")
            return _marked(result, args[0]._device, None)
        return result


def _marked(facts: torch.Tensor, device: torch.device, address: int | None) -> StandIn:
    stand_in = facts.as_subclass(StandIn)
    stand_in._device, stand_in._address = device, address
    return stand_in


def _address_of(stand_in: StandIn) -> int:
    if stand_in._address is None:
        raise NotTold("the address of what was computed from a tensor was asked for")
    return stand_in._address


def _refuse(stand_in: StandIn) -> Any:
    raise NotTold("the memory of a tensor was asked for")


_ANSWERS: dict[Any, Callable[[StandIn], Any]] = {
    torch.Tensor.device.__get__: lambda tensor: tensor._device,
    torch.Tensor.is_cuda.__get__: lambda tensor: tensor._device.type == "cuda",  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda tensor: tensor._device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: lambda tensor: False,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda tensor: -1 if tensor._device.index is None else tensor._device.index,
    torch.Tensor.data_ptr: _address_of,
    torch.Tensor.storage_offset: _refuse,
    torch.Tensor.untyped_storage: _refuse,
}


def holders(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the distinct arguments whose attributes a hook may set, in the order of the launch."""
    found = {id(value): value for value in _leaves((*args, *kwargs.values())) if _has_attributes(value)}
    return list(found.values())


def exchanged(value: Any, new: Mapping[int, Any]) -> Any:
    """Return `value` with the objects in it exchanged for new ones, which are given by the id of the old."""
    if isinstance(value, tuple):
        parts = [exchanged(part, new) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return new.get(id(value), value)


def with_changes(old: list[Any], changes: Changes) -> dict[int, Any]:
    """Return copies of those of the holders `old` that have changes, made, by the id of the old one."""
    copies = {}
    for place, attributes in changes.items():
        copies[id(old[place])] = made = copy.copy(old[place])
        vars(made).update(attributes)
    return copies


class StandIns:
    """Stand-ins of the arguments of one launch, and what became of them."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves = list(_leaves((*args, *kwargs.values())))
        self._tensors = {id(leaf): StandIn.of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self._facts = {key: _facts(tensor) for key, tensor in self._tensors.items()}
        self._copies = {id(holder): _copied(holder) for holder in holders(args, kwargs)}
        self._before = {key: _snapshot(made) for key, made in self._copies.items()}
        new = {**self._tensors, **self._copies}
        self.args: tuple[Any, ...] = exchanged(args, new)
        self.kwargs = {name: exchanged(value, new) for name, value in kwargs.items()}

    def changes(self) -> bytes:
        """Return, pickled, the `Changes` of the holders; raises NotTold where they do not tell all."""
        if any(_facts(tensor) != self._facts[key] for key, tensor in self._tensors.items()):
            raise NotTold("a tensor was given another shape")
        found: Changes = {}
        for place, (key, made) in enumerate(self._copies.items()):
            before, now = self._before[key], vars(made)
            if before.keys() - now.keys():
                raise NotTold("an attribute of an argument was deleted")
            changed = {n: v for n, v in now.items() if n not in before or not _same(before[n], v)}
            if changed:
                found[place] = changed
        return _pickled(found)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _leaves(value)
        else:
            yield value


def _has_attributes(value: Any) -> bool:
    if callable(value) or isinstance(value, (torch.Tensor, types.ModuleType)):
        return False
    # The end of a copy must not be the end of what the original owns.
    return hasattr(value, "__dict__") and not hasattr(value, "__del__")


def _copied(holder: Any) -> Any:
    made = copy.copy(holder)
    if made is not holder:  # of a kind that has no copies, such as an enumeration
        for name, value in vars(made).items():
            if isinstance(value, torch.Tensor):
                vars(made)[name] = StandIn.of(value)
            elif isinstance(value, list):
                vars(made)[name] = list(value)
    return made


def _snapshot(made: Any) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in vars(made).items()}


def _same(before: Any, now: Any) -> bool:
    if before is now or isinstance(now, torch.Tensor):
        return before is now
    return type(before) is type(now) and bool(before == now)


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise NotTold("an argument was given another tensor")
        return NotImplemented


def _pickled(found: Changes) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(found)
    return file.getvalue()
