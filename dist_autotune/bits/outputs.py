"""Finds what a function has put out, in its result and in what is named, and hashes it without waiting."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..search.messages import Bits
from ..timing.clock import Clock
from .tensor_hash import hash_tensor

PLAIN = (str, bytes, int, float, complex, type(None))


class OutputDigests:
    """Digests of all outputs of one run. They are taken when this is made, on the current streams."""

    def __init__(self, result: Any, named: Sequence[Any]) -> None:
        found = [("the result", result)]
        for number, item in enumerate(named):
            found += _of_named(f"item {number} of preserve= and outputs=", item)
        leaves = [leaf for path, value in found for leaf in _leaves(path, value, ())]
        self._described = [(path, _description(value)) for path, value in leaves]
        self._hashes = [hash_tensor(value) if _has_bits(value) else None for _, value in leaves]
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
    """The outputs of this rank's runs in one session; `named` are those beside the result."""

    def __init__(self, clock: Clock, named: Sequence[Any], rank: int) -> None:
        self._clock, self._named, self._rank = clock, named, rank
        self._result: Any = None
        self._digests: OutputDigests | None = None  # of the run under way
        self._mark: Any = None  # of the clock, behind them
        self._first: dict[str, str] | None = None  # digests of the session's first run, by path

    def take_result(self, result: Any) -> None:
        """Keep what the function returned until its run has been timed."""
        self._result = result

    def hash_result(self) -> None:
        """Hash the outputs of the run, on their devices; forget the result."""
        self._digests, self._result = OutputDigests(self._result, self._named), None
        self._mark = self._clock.start()
        self._clock.stop(self._mark)

    def report_run(self) -> Bits:
        """Return what the run put out; waits for it."""
        assert self._digests is not None
        self._clock.read_ms(self._mark)  # polls: a device that is stuck is an error in time
        digests, tensors = self._digests.read(), self._digests.tensors
        self.abandon_run()
        first = self._first = self._first or digests
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
    """Yield a tensor, or what a holder's state_dict() has; with gradients, which are in none."""
    if isinstance(item, torch.Tensor):
        yield name, item
        yield f"{name}.grad", item.grad if item.is_leaf else None
        return
    yield name, item.state_dict()
    if isinstance(item, torch.nn.Module):
        yield f"{name}.grad", {key: parameter.grad for key, parameter in item.named_parameters()}


def _leaves(path: str, value: Any, within: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield tensors, arrays and plain values with their paths; what other objects hold is not seen."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        value = list(value.unbind())
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, *PLAIN)):
        to_local: Any = getattr(value, "to_local", None)  # of a DTensor
        yield path, value if to_local is None else to_local()
        return
    if id(value) in within:
        return
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"[{index}]", item) for index, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    for step, item in items:
        yield from _leaves(path + step, item, (*within, id(value)))


def _has_bits(value: Any) -> bool:
    """Return whether a value is a tensor with memory: tracers pass on some that have none."""
    return isinstance(value, torch.Tensor) and not (value.is_meta or hasattr(value, "fake_mode"))


def _description(value: Any) -> str:
    """Return what a tensor's hash leaves out, or all that there is of another value."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} {value.shape} {digest_of(value.tobytes().hex())}"
    return f"{type(value).__name__} {value.hex() if isinstance(value, float) else value!r}"
