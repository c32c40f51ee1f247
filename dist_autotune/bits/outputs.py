"""Finds a function's outputs, in its result and in named tensors, and hashes them without waiting."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..search.messages import Bits
from ..timing.clock import Clock
from .tensor_hash import hash_tensor

PLAIN = (str, bytes, bytearray, int, float, complex, type(None))
LISTED = 6  # objects that a remark names
WITHOUT_BITS = "fake_mode", "get_mask", "cls_to_become"  # attributes of fake, masked and lazy tensors


class OutputDigests:
    """Digests of all outputs of one run. They are taken when this is made, on the current streams."""

    def __init__(self, result: Any, named: Sequence[Any]) -> None:
        found = [("the result", result)]
        for number, item in enumerate(named):
            found += _of_named(f"item {number} of preserve= and outputs=", item)
        every = [leaf for path, value in found for leaf in _leaves(path, value, ())]
        leaves = [(path, value) for path, value in every if _is_compared(value)]
        unseen = [(path, type(value)) for path, value in every if not _is_compared(value)]
        self.unseen = [f"{path} (a {kind.__module__}.{kind.__qualname__})" for path, kind in unseen]
        self._described = [(path, _description(value)) for path, value in leaves]
        self._hashes = [hash_tensor(each) if isinstance(each, torch.Tensor) else None for _, each in leaves]
        arrays = sum(isinstance(value, np.ndarray) for _, value in leaves)
        self.tensors = arrays + sum(each is not None for each in self._hashes)

    def read(self) -> dict[str, str]:
        """Return each output's digest by its path; waits for the devices, once for each."""
        words: dict[int, list[int]] = {}  # by place
        for device in {each.device for each in self._hashes if each is not None}:
            places = [i for i, each in enumerate(self._hashes) if each is not None and each.device == device]
            read = torch.stack([each for each in self._hashes if each is not None and each.device == device])
            words.update(zip(places, read.tolist(), strict=True))
        return {
            path: digest_of(f"{described} {words.get(place, '')}")
            for place, (path, described) in enumerate(self._described)
        }


class OutputComparison:
    """The outputs of this rank's runs in one session; `named`: outputs beside the result.

    Outputs are compared with those of the first of the compared runs in a row. The session's first run only
    tells whether there are any.
    """

    def __init__(self, clock: Clock, named: Sequence[Any], rank: int) -> None:
        self._clock, self._named, self._rank = clock, named, rank
        self._result: Any = None
        self._digests: OutputDigests | None = None  # of the run under way
        self._mark: Any = None  # of the clock, after them
        self._first: dict[str, str] | None = None  # digests to compare with, by path
        self._has_reported = False
        self.remark = ""  # for the log, on the last run

    def take_result(self, result: Any) -> None:
        """Keep the function's result until its run has been timed."""
        self._result = result

    def end_run(self, *, is_compared: bool) -> None:
        """Hash the outputs of the run, on their devices, if it is compared; forget the result."""
        if not is_compared:
            self.abandon_run()
            self._first = None
            return
        self._digests, self._result = OutputDigests(self._result, self._named), None
        self._mark = self._clock.start()
        self._clock.stop(self._mark)

    def report_run(self) -> Bits | None:
        """Return the digest of the run's outputs, if it is compared; waits for the device."""
        self.remark = ""
        if self._digests is None:
            return None
        self._clock.read_ms(self._mark)  # polls: a device that is stuck is an error in time
        digests, tensors, unseen = self._digests.read(), self._digests.tensors, self._digests.unseen
        self.abandon_run()
        if unseen and not self._has_reported:
            self.remark = _remark(unseen)
        first = self._first or digests
        self._first, self._has_reported = first if self._has_reported else None, True
        changed = [path for path in {**first, **digests} if digests.get(path) != first.get(path)]
        differs = (self._rank, changed[0]) if changed else None
        return Bits(digest_of(f"rank {self._rank} {digests}"), tensors, differs)

    def abandon_run(self) -> None:
        """Drop the run under way."""
        self._result, self._digests, self._mark = None, None, None


def digest_of(text: str) -> str:
    """Return 32 hexadecimal digits that stand for `text`."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _of_named(name: str, item: Any) -> Iterator[tuple[str, Any]]:
    """Yield a tensor or a holder's state_dict(), each with its gradients: no state_dict() holds them."""
    if isinstance(item, torch.Tensor):
        yield name, item
        yield f"{name}.grad", item.grad if item.is_leaf else None
        return
    yield name, item.state_dict() if hasattr(item, "state_dict") else getattr(item, "__dict__", None)
    if isinstance(item, torch.nn.Module):
        yield f"{name}.grad", {key: parameter.grad for key, parameter in item.named_parameters()}


def _leaves(path: str, value: Any, within: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield tensors, arrays, plain values and opaque objects, each with its path."""
    parts: list[tuple[str, Any]] | None = None
    if not isinstance(value, torch.Tensor):
        parts = _parts_of_object(value)
    else:
        if hasattr(value, "trigger_wait"):  # of a collective under way
            value = value.trigger_wait()
        if hasattr(value, "__tensor_flatten__"):  # a tensor that wraps others, as a DTensor its own part
            parts = [(f".{name}", getattr(value, name)) for name in value.__tensor_flatten__()[0]]
    if parts is None:
        yield path, value
    elif id(value) not in within:
        for step, item in parts:
            yield from _leaves(path + step, item, (*within, id(value)))


def _parts_of_object(value: Any) -> list[tuple[str, Any]] | None:
    """Return the items of a container; None: the value is no container."""
    if isinstance(value, Mapping):
        return [
            (f"[{key!r}]" if isinstance(key, PLAIN) else f"[key {number}]", item)
            for number, (key, item) in enumerate(value.items())
        ]
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return None


def _is_compared(value: Any) -> bool:
    """Return whether a value's bits can be read; tracers pass on tensors that have none."""
    if isinstance(value, torch.Tensor):
        return not (value.is_nested or value.is_meta or any(hasattr(value, each) for each in WITHOUT_BITS))
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return isinstance(value, (np.generic, *PLAIN))


def _remark(unseen: Sequence[str]) -> str:
    more = f" and {len(unseen) - LISTED} more" if len(unseen) > LISTED else ""
    return f"bits are not compared of {', '.join(unseen[:LISTED])}{more}: nobody looks into such objects"


def _description(value: Any) -> str:
    """Return dtype and shape of a tensor, which its hash leaves out; of another value its bits or text."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} {value.shape} {digest_of(value.tobytes().hex())}"
    bits = np.asarray(value).tobytes().hex() if isinstance(value, (float, complex)) else repr(value)
    return f"{type(value).__name__} {bits}"
