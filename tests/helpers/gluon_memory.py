"""Registers, shared and global memory, and mbarriers, for `gluon_model`.

What peers have written to global memory a task may read through tensors of pointers (`Pointers`) once it was
published, and the task has acquired since.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
from gluon_machine import machine, now


class BarrierLayout:
    """Of shared memory for mbarriers."""


class Barrier:
    def __init__(self) -> None:
        self.program = now().program
        self.count = self.pending = self.bytes = self.phase = 0
        self.told: dict[int, int] = {}  # what those who arrived had acquired
        self.acquired_at = -1  # the last acquire that an arrival hands on

    def must_be_ready(self) -> None:
        assert self.count, "an mbarrier is used before it is initialised"
        machine().must_be_running(self.program)

    def arrive(self, count: int) -> None:
        self.must_be_ready()
        assert count <= self.pending, "an arrival too many for this phase"
        self.pending -= count
        self._complete()

    def transfer(self, nbytes: int) -> None:
        self.must_be_ready()
        self.bytes += nbytes
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, i: int) -> Barrier:
        return self.all[i]


class Buffer:
    """A view of shared memory. `memory` names what it is a view of, for the proxy fences."""

    dtype = None

    def __init__(self, array: np.ndarray, slice_of: Buffer | None = None) -> None:
        self.array, self.slice_of = array, slice_of

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def memory(self) -> int:
        return self.slice_of.memory if self.slice_of else self.array.__array_interface__["data"][0]

    def index(self, i: int) -> Buffer:
        return Buffer(self.array[i])

    def slice(self, start: int, length: int, dim: int) -> Buffer:
        assert start + length <= self.shape[dim], "a slice reaches beyond its buffer"
        return Buffer(self.array[(*(slice(None),) * dim, slice(start, start + length))], self)

    def permute(self, order: tuple[int, ...]) -> Buffer:
        return Buffer(self.array.transpose(order))

    def store(self, tensor: Tensor) -> None:
        tensor.must_be_complete()
        assert self.array.shape == tensor.array.shape
        self.array[...] = tensor.array
        now().unfenced.add(self.memory)

    def load(self, layout: object = None) -> Tensor:
        now().unfenced.add(self.memory)
        return Tensor(self.array.copy())

    def reinterpret(self, dtype: object, shape: list[int], layout: object) -> Buffer:
        return Buffer(self.array.reshape(-1)[: int(np.prod(shape))].reshape(shape))


class TensorMemory(Buffer):
    def slice(self, start: int, length: int) -> TensorMemory:  # type: ignore[override]
        return TensorMemory(self.array[:, start : start + length])

    def index(self, i: int) -> TensorMemory:
        return TensorMemory(self.array[i])


class Tensor:
    """Registers. An accumulator of wgmma is one that must not be touched while products are in flight."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.in_flight = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def type(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(layout=None)

    def must_be_complete(self) -> None:
        assert self.in_flight == 0, "an accumulator is read while products are in flight"

    def to(self, dtype: object) -> Tensor:
        self.must_be_complete()
        return Tensor(self.array.copy())

    def reshape(self, shape: tuple[int, ...]) -> Tensor:
        self.must_be_complete()
        return Tensor(self.array.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return Tensor(self.array.transpose(order))

    def join(self, other: Tensor) -> Tensor:
        self.must_be_complete()
        other.must_be_complete()
        return Tensor(np.stack([self.array, other.array], axis=-1))

    def split(self) -> tuple[Tensor, Tensor]:
        return Tensor(self.array[..., 0]), Tensor(self.array[..., 1])

    def __getitem__(self, index: tuple[slice | None, ...]) -> Tensor:
        return Tensor(self.array[index])

    def __add__(self, other: Tensor | float) -> Tensor:
        return Tensor(self.array + _array(other))

    def __mul__(self, factor: Tensor | float) -> Tensor:
        return Tensor(self.array * _array(factor))

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Tensor) -> Tensor:
        return Tensor(self.array / other.array)

    def __neg__(self) -> Tensor:
        return Tensor(-self.array)

    def __abs__(self) -> Tensor:
        return Tensor(abs(self.array))

    def __lt__(self, other: Tensor | float) -> Tensor:
        return Tensor(self.array < _array(other))


def _array(value: Tensor | float) -> np.ndarray | float:
    return value.array if isinstance(value, Tensor) else value


def where(condition: Tensor | bool, a: Any, b: Any) -> Any:
    if not any(isinstance(value, Tensor) for value in (condition, a, b)):
        return a if condition else b
    for value in (a, b):
        if isinstance(value, Tensor):
            value.must_be_complete()
    return Tensor(np.where(_array(condition), _array(a), _array(b)))


class Descriptor:
    """A host tensor and the shape of what one TMA operation moves, of elements of so many bytes."""

    dtype = layout = None

    def __init__(self, array: np.ndarray, block: list[int], itemsize: int = 2) -> None:
        self.array, self.writes = array, np.zeros(array.shape, dtype=int)
        self.block_type = types.SimpleNamespace(shape=block, nbytes=itemsize * int(np.prod(block)))
        self.shape = array.shape

    def _inside(self, coord: list[int], shape: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return where a block of that shape lies in the tensor, and which part of the block that is."""
        pairs = list(zip(coord, shape, self.array.shape, strict=True))
        ends = [max(at, min(at + size, limit)) for at, size, limit in pairs]
        place = tuple(slice(at, end) for (at, _, _), end in zip(pairs, ends, strict=True))
        part = tuple(slice(0, end - at) for (at, _, _), end in zip(pairs, ends, strict=True))
        return place, part

    def may_load(self, coord: list[int]) -> None:
        """Raise if the block must not be loaded just now, by the task whose turn it is."""

    def read(self, coord: list[int], block: np.ndarray) -> None:
        """Fill the block with what begins there."""
        block[...] = 0
        place, part = self._inside(coord, block.shape)
        block[part] = self.array[place]

    def write(self, coord: list[int], block: np.ndarray) -> None:
        place, part = self._inside(coord, block.shape)
        self.array[place] = block[part]
        self.writes[place] += 1


class Pointer:
    """Into a flat array."""

    dtype = types.SimpleNamespace(element_ty=None)

    def __init__(self, array: np.ndarray, offset: int = 0) -> None:
        self.array, self.offset = array, offset

    def __add__(self, step: int | Tensor) -> Pointer | Pointers:
        if isinstance(step, Tensor):
            return Pointers(self.array, self.offset + step.array)
        return Pointer(self.array, self.offset + step)

    @property
    def address(self) -> int:
        return self.array.__array_interface__["data"][0] + self.offset * self.array.itemsize

    def get(self) -> Scalar:
        return Scalar(self.array[self.offset])

    def set(self, value: int) -> None:
        self.array[self.offset] = value


class Pointers:
    """A tensor of them, to what several tasks share."""

    def __init__(self, array: np.ndarray, offsets: np.ndarray) -> None:
        self.array, self.offsets = array, offsets
        clocks = machine().published
        self.published = clocks.setdefault(id(array), np.full(array.shape, -1.0))

    def get(self, mask: Tensor | None = None, other: float = 0) -> Tensor:
        inside = np.full(self.offsets.shape, True) if mask is None else mask.array
        offsets = np.where(inside, self.offsets, 0)
        known = self.published[offsets] <= now().acquired_at
        assert known.all(), "what others have written is read before it is known to be there"
        return Tensor(np.where(inside, self.array[offsets], other))

    def set(self, tensor: Tensor, mask: Tensor) -> None:
        inside = np.broadcast_to(mask.array, self.offsets.shape)
        places, values = self.offsets[inside], tensor.array[inside]
        now().plain_stores.append(lambda: self.array.__setitem__(places, values))


class Scalar(int):
    """A number that a kernel has read; wide enough never to wrap around."""

    def to(self, dtype: object) -> Scalar:
        return self

    def __ne__(self, other: object) -> Scalar:
        return Scalar(int(self) != other)

    __hash__ = int.__hash__
