"""Finds out, without calling it in this process, what a config's `pre_hook` makes of a launch's arguments.

The hooks of a context run one after another in a forked child, each on stand-ins of its own, and without a
file or a socket: what they count, log or zero is gone with the child. The child reports what they changed;
this process makes the same changes to copies, and compiles for those and for the tensors themselves.

What a hook raises on stand-ins says nothing about the launch, OutOfResources and its like included: only a
launch's own hook bans a config. A hook that ends well has seen no stand-in differ from the original, so what
the compiler says of the outcome holds, if the hook does the same for the same arguments in any process.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import pickle
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ..formatting import counted
from ..triton_api.launch import Launch
from .compiler_child import CompilerChild

LIMIT_S = 20.0  # for all hooks of a context; they take milliseconds
REASON_CHARACTERS = 200
_POLL_S = 1e-3

Changes: TypeAlias = dict[int, dict[str, Any]]
"""The changed attributes of each argument that has any, by its place in `holders`."""


@dataclass(frozen=True)
class Rehearsal:
    """What the hooks of some configs would do."""

    launches: Mapping[str, Launch] = field(default_factory=dict)  # as the hook leaves them, by digest
    left_out: Mapping[str, str] = field(default_factory=dict)  # why that is not known, by digest

    @property
    def remark(self) -> str:
        if not self.left_out:
            return ""
        why = next(iter(self.left_out.values()))
        candidates = counted(len(self.left_out), "candidate")
        return f"{candidates} left to the first launch, as pre_hook could not be rehearsed: {why}"


def rehearse(launch: Launch, configs: Mapping[str, Any], limit_s: float) -> Rehearsal:
    """Find out what the hooks of `configs` do to a launch, within `limit_s`.

    The tensors of `Rehearsal.launches` are those of the launch; nothing that is the caller's is changed.
    """
    if not configs:
        return Rehearsal()
    if limit_s <= 0:
        return Rehearsal(left_out=dict.fromkeys(configs, "no child may be started"))

    def work() -> str:
        return json.dumps({digest: _rehearse_one(launch, config) for digest, config in configs.items()})

    try:
        child = CompilerChild(work, min(limit_s, LIMIT_S), is_cut_off=True)
    except OSError as error:
        return Rehearsal(left_out=dict.fromkeys(configs, f"no child ({error.strerror})"))
    try:
        while (ending := child.poll()) is None:
            time.sleep(_POLL_S)
    finally:
        child.close()
    if not ending.result:
        return Rehearsal(left_out=dict.fromkeys(configs, ending.reason or "the hook told nothing"))
    reports: dict[str, tuple[str, str]] = json.loads(ending.result)
    changes = {digest: base64.b64decode(pickled) for digest, (pickled, _) in reports.items() if pickled}
    return Rehearsal(
        launches={digest: with_changes(launch, pickle.loads(each)) for digest, each in changes.items()},
        left_out={digest: reason for digest, (pickled, reason) in reports.items() if not pickled},
    )


# ---- in the child


def _rehearse_one(launch: Launch, config: Any) -> tuple[str, str]:
    try:
        stand_ins = StandIns(launch)
        config.pre_hook(stand_ins.launch.hook_arguments(config))
        pickled = stand_ins.changes()
        pickle.loads(pickled)  # what fails here would fail in the rank
    except BaseException as error:  # SystemExit too: the next hook is to have its turn
        return "", f"{type(error).__name__}: {error}".partition("\n")[0][:REASON_CHARACTERS]
    return base64.b64encode(pickled).decode(), ""


class NotReproducible(RuntimeError):
    """A `pre_hook` did something whose effect on the launch stand-ins do not show."""


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
                raise NotReproducible(f"{getattr(func, '__name__', func)} was called with a tensor")
            return _marked(result, args[0]._device, None)
        return result


def _marked(facts: torch.Tensor, device: torch.device, address: int | None) -> StandIn:
    stand_in = facts.as_subclass(StandIn)
    stand_in._device, stand_in._address = device, address
    return stand_in


def _address_of(stand_in: StandIn) -> int:
    if stand_in._address is None:
        raise NotReproducible("it reads the address of a computed tensor")
    return stand_in._address


def _refuse(stand_in: StandIn) -> Any:
    raise NotReproducible("it reads a tensor's memory")


# Not overridden in the class: what torch itself asks of a stand-in is answered for its meta tensor.
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


class StandIns:
    """Stand-ins of the arguments of one launch, and what became of them."""

    def __init__(self, launch: Launch) -> None:
        leaves = _leaves((*launch.args, *launch.kwargs.values()))
        self._tensors = {id(leaf): StandIn.of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self._facts = {key: _facts(tensor) for key, tensor in self._tensors.items()}
        self._copies = {id(holder): _copied(holder) for holder in holders(launch)}
        self._before = [
            {name: list(value) if isinstance(value, list) else value for name, value in vars(made).items()}
            for made in self._copies.values()
        ]
        self.launch = _exchanged(launch, {**self._tensors, **self._copies})

    def changes(self) -> bytes:
        """Return, pickled, the `Changes` of the holders; raises NotReproducible where there is more."""
        if any(_facts(tensor) != self._facts[key] for key, tensor in self._tensors.items()):
            raise NotReproducible("a tensor was given another shape")
        found: Changes = {}
        for place, (before, made) in enumerate(zip(self._before, self._copies.values(), strict=True)):
            if before.keys() - vars(made).keys():
                raise NotReproducible("an attribute of an argument was deleted")
            changed = {n: v for n, v in vars(made).items() if n not in before or not _same(before[n], v)}
            if changed:
                found[place] = changed
        file = io.BytesIO()
        _Pickler(file).dump(found)
        return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise NotReproducible("an argument was given another tensor")
        return NotImplemented


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _copied(holder: Any) -> Any:
    made = copy.copy(holder)
    if made is not holder:  # of a kind that has no copies, such as an enumeration
        for name, value in vars(made).items():
            if isinstance(value, torch.Tensor):
                vars(made)[name] = StandIn.of(value)
            elif isinstance(value, list):
                vars(made)[name] = list(value)
    return made


def _same(before: Any, now: Any) -> bool:
    if before is now or isinstance(now, torch.Tensor):
        return before is now
    return type(before) is type(now) and bool(before == now)


# ---- arguments of a launch


def holders(launch: Launch) -> list[Any]:
    """Return the distinct arguments whose attributes a hook may set, in the order of the launch."""
    leaves = _leaves((*launch.args, *launch.kwargs.values()))
    return list({id(leaf): leaf for leaf in leaves if _has_attributes(leaf)}.values())


def with_changes(launch: Launch, changes: Changes) -> Launch:
    """Return the launch with the changes made to copies."""
    old, new = holders(launch), {}
    for place, attributes in changes.items():
        new[id(old[place])] = made = copy.copy(old[place])
        vars(made).update(attributes)
    return _exchanged(launch, new)


def _exchanged(launch: Launch, new: Mapping[int, Any]) -> Launch:
    """Return the launch with the objects in it exchanged for `new` ones, given by the id of the old."""

    def exchange(value: Any) -> Any:
        if isinstance(value, tuple):
            parts = map(exchange, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return new.get(id(value), value)

    kwargs = {name: exchange(value) for name, value in launch.kwargs.items()}
    return Launch(launch.tuner, exchange(launch.args), kwargs)


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
