"""Runs a config's `pre_hook` in a child process, to learn for which arguments the config is compiled.

The hooks of a context run one after another in one forked child, each on its own copies and stubs of the
arguments, without a file or a socket: their effects end with the child. The child returns the arguments
pickled, with references to the tensors, and this process compiles for those. An exception of a hook on stubs,
OutOfResources included, bans nothing: only the hook of a real launch does.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Mapping
from typing import Any

import torch

from ..formatting import described
from ..triton_api.launch import Launch
from .child import Child
from .workers import Work

LIMIT_S = 20.0  # for all hooks of a context; they take milliseconds
REASON_CHARACTERS = 200


def rehearse(launch: Launch, configs: Mapping[str, Any], limit_s: float) -> dict[str, Launch | str]:
    """Return, by config, the launch as its hook leaves it, or why that is not known within `limit_s`.

    These launches have the tensors of the given one; nothing of the caller's is changed.
    """
    if not configs:
        return {}
    kept: list[Any] = []
    try:
        if limit_s <= 0:
            raise NotReproducible("no child may be started")
        pickled = pickle_arguments(launch, kept, adds=True)
        rehearsal = lambda: {  # noqa: E731
            each: rehearse_one(launch, pickled, kept, config) for each, config in configs.items()
        }
        ending = Child(Work(pieces=[rehearsal], limit_s=min(limit_s, LIMIT_S), is_cut_off=True)).wait()
    except Exception as error:  # of an argument that cannot be pickled, or of the fork
        return dict.fromkeys(configs, _text_of(error))
    outcomes: dict[str, bytes | str]
    outcomes = ending.result or dict.fromkeys(configs, ending.reason or "the hook told nothing")
    return {
        digest: outcome if isinstance(outcome, str) else unpickled(launch, outcome, kept)
        for digest, outcome in outcomes.items()
    }


def rehearse_one(launch: Launch, pickled: bytes, kept: list[Any], config: Any) -> bytes | str:
    """Return copies of the arguments after the hook, pickled; or why they are unknown."""
    try:
        stubs = [TensorStub.of(each) if isinstance(each, torch.Tensor) else each for each in kept]
        before = _facts_of_tensors(stubs)
        copied = unpickled(launch, pickled, stubs)
        config.pre_hook(copied.hook_arguments(config))
        if _facts_of_tensors(stubs) != before:
            raise NotReproducible("a tensor was given another shape")
        outcome = pickle_arguments(copied, stubs, adds=False)
        unpickled(launch, outcome, stubs)  # a failure here would be one in the rank
        return outcome
    except BaseException as error:  # SystemExit too: the next hook is to have its turn
        return _text_of(error)


def _facts_of_tensors(kept: list[Any]) -> list[tuple[Any, ...]]:
    return [(each.shape, each.stride(), each.dtype) for each in kept if isinstance(each, torch.Tensor)]


def _text_of(error: BaseException) -> str:
    return described(error).partition("\n")[0][:REASON_CHARACTERS]


class NotReproducible(RuntimeError):
    """A `pre_hook` depends on something that stubs do not have, such as the elements of a tensor."""


# What torch calls for facts that a meta tensor does not have.
_OF_MEMORY = (torch.Tensor.storage_offset, torch.Tensor.untyped_storage)
_OF_PLACE = (
    torch.Tensor.device.__get__,
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    torch.Tensor.get_device,
    torch.Tensor.data_ptr,
)


class TensorStub(torch.Tensor):
    """A tensor without memory: shape, strides, dtype, device and address are the original's.

    Writing to it does nothing. Reading from it raises, so nothing can depend on what the original holds.
    """

    _place: dict[Any, Any]  # missing in what torch computes from stubs

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorStub:
        """Return a stub; raises torch's error for a tensor without strides or address."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        stub = meta.as_subclass(TensorStub)
        stub._place = {fact: fact(tensor) for fact in _OF_PLACE}
        return stub

    @classmethod
    def __torch_function__(
        cls, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OF_PLACE and hasattr(args[0], "_place"):
            return args[0]._place[func]
        if func in _OF_PLACE or func in _OF_MEMORY:
            raise NotReproducible(f"it reads {func.__name__} of a tensor without memory")
        return super().__torch_function__(func, kinds, args, kwargs or {})  # type: ignore[no-untyped-call]


# ---- arguments of a launch

_COPIED = (type(None), bool, int, float, str, tuple, list, dict, set)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, kept: list[Any], *, adds: bool) -> None:
        super().__init__(file)
        self._kept, self._adds = kept, adds
        self._places = {id(each): place for place, each in enumerate(kept)}

    def persistent_id(self, value: Any) -> int | None:
        if (place := self._places.get(id(value))) is not None:
            return place
        if self._adds and not isinstance(value, _COPIED) and not _has_attributes(value):
            self._kept.append(value)
            return self._places.setdefault(id(value), len(self._places))
        if isinstance(value, torch.Tensor):
            raise NotReproducible("an argument was given another tensor")
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, place: int) -> Any:
        return self._kept[place]


def pickle_arguments(launch: Launch, kept: list[Any], *, adds: bool) -> bytes:
    """Return the arguments pickled; objects in `kept` are pickled as references.

    adds: first add to `kept` the objects that must not be copied, such as tensors and functions.
    """
    file = io.BytesIO()
    _Pickler(file, kept, adds=adds).dump((launch.args, launch.kwargs))
    return file.getvalue()


def unpickled(launch: Launch, arguments: bytes, kept: list[Any]) -> Launch:
    """Return the launch with the pickled arguments."""
    return Launch(launch.tuner, *_Unpickler(io.BytesIO(arguments), kept).load())


def _has_attributes(value: Any) -> bool:
    if callable(value) or isinstance(value, (torch.Tensor, types.ModuleType)):
        return False
    # The end of a copy must not be the end of what the original owns.
    return hasattr(value, "__dict__") and not hasattr(value, "__del__")
