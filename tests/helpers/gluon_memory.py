"""Registers, shared and global memory, and mbarriers, for `gluon_model`.

The CTAs of a program allocate the same. A buffer and an mbarrier are one CTA's, and know those at the same
place in the others, where a load that several CTAs receive writes and counts, too.

What a task writes to global memory through tensors of pointers (`Pointers`) others may read once it has been
published: behind a barrier of the writer's warps, by an atomic operation with release semantics, which the
reader has followed by one with acquire semantics.
"""

from __future__ import annotations

import types
from collections.abc import Sequence

import numpy as np
from gluon_machine import Cta, machine, now


class Layout:
    """Of registers or shared memory: which side of a tensor the CTAs of a program halve, see `Block`."""

    def __init__(self, cga_layout: Sequence[Sequence[int]] = ()) -> None:
        self.halved = [tuple(sides) for sides in cga_layout]  # by each bit of a CTA's rank

    def parts(self, dimensions: int) -> list[int]:
        """Return among how many CTAs each side is divided."""
        assert 2 ** len(self.halved) == len(now().cta.program.ctas), "a layout for more or for fewer CTAs"
        sides = [2 ** sum(sides) for sides in zip(*self.halved, strict=True)]
        return [1] * (dimensions - len(sides)) + sides

    def share(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of what each CTA has."""
        return [size // parts for size, parts in zip(shape, self.parts(len(shape)), strict=True)]

    def first(self, shape: Sequence[int]) -> list[int]:
        """Return where that of the CTA begins whose turn it is."""
        parts = self.parts(len(shape))
        return [now().cta.rank * size // p if p > 1 else 0 for size, p in zip(shape, parts, strict=True)]


class Barrier:
    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.everywhere = [self]  # those at the same place in all CTAs
        self.count = self.pending = self.bytes = self.phase = 0

    def must_be_ready(self) -> None:
        assert self.count, "an mbarrier is used before it is initialised"
        self.cta.must_be_there()

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


class BarrierLayout(Layout):
    @property
    def of_both(self) -> bool:
        """Whether there is only CTA 0's, for all."""
        return (0,) in self.halved


class Barriers:
    def __init__(self, count: int, layout: BarrierLayout) -> None:
        ctas = now().cta.program.ctas
        assert 2 ** len(layout.halved) == len(ctas), "a layout for more or for fewer CTAs"
        self.all = [[Barrier(cta) for cta in ctas] for _ in range(count)]
        if layout.of_both:
            self.all = [[barriers[0]] * len(ctas) for barriers in self.all]
        for barriers in self.all:
            for barrier in barriers:
                barrier.everywhere = barriers

    def index(self, i: int) -> Barrier:
        return self.all[i][now().cta.rank]


class Buffer:
    """A view of a CTA's shared memory. `memory` names what it is a view of, for the proxy fences."""

    dtype = None

    def __init__(self, everywhere: np.ndarray, rank: int, slice_of: Buffer | None = None) -> None:
        self.everywhere = everywhere  # the same view in each CTA
        self.rank, self.slice_of = rank, slice_of

    @property
    def array(self) -> np.ndarray:
        return self.everywhere[self.rank]

    def in_cta(self, rank: int) -> Buffer:
        """Return what is at the same place in another CTA."""
        return Buffer(self.everywhere, rank, self.slice_of and self.slice_of.in_cta(rank))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def memory(self) -> int:
        return self.slice_of.memory if self.slice_of else self.array.__array_interface__["data"][0]

    def index(self, i: int) -> Buffer:
        return Buffer(self.everywhere[:, i], self.rank)

    def slice(self, start: int, length: int, dim: int) -> Buffer:
        assert start + length <= self.shape[dim], "a slice reaches beyond its buffer"
        of_all = (slice(None),) * (1 + dim)
        return Buffer(self.everywhere[(*of_all, slice(start, start + length))], self.rank, self)

    def permute(self, order: tuple[int, ...]) -> Buffer:
        return Buffer(self.everywhere.transpose((0, *(1 + side for side in order))), self.rank)

    def store(self, tensor: Tensor) -> None:
        tensor.must_be_complete()
        assert self.array.shape == tensor.array.shape
        self.array[...] = tensor.array
        now().unfenced.add(self.memory)

    def load(self, layout: object = None) -> Tensor:
        now().unfenced.add(self.memory)
        return Tensor(self.array.copy())

    def reinterpret(self, dtype: object, shape: list[int], layout: Layout) -> Buffer:
        ctas, shape = len(self.everywhere), layout.share(shape)
        flat = self.everywhere.reshape(ctas, -1)[:, : int(np.prod(shape))]
        return Buffer(flat.reshape(ctas, *shape), self.rank)


class TensorMemory(Buffer):
    """Of a program's only CTA."""

    def slice(self, start: int, length: int) -> TensorMemory:  # type: ignore[override]
        return TensorMemory(self.everywhere[:, :, start : start + length], 0)

    def index(self, i: int) -> TensorMemory:
        return TensorMemory(self.everywhere[:, i], 0)


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

    def __add__(self, other: Tensor | int) -> Tensor:
        return Tensor(self.array + (other.array if isinstance(other, Tensor) else other))

    def __mul__(self, factor: int) -> Tensor:
        return Tensor(self.array * factor)


class Descriptor:
    """A host tensor and the shape of what one TMA operation moves, in all CTAs of a program together."""

    dtype = None

    def __init__(self, array: np.ndarray, block: list[int], cga_layout: Sequence[Sequence[int]] = ()) -> None:
        self.array, self.writes = array, np.zeros(array.shape, dtype=int)
        self.block_type = types.SimpleNamespace(shape=block, nbytes=2 * int(np.prod(block)))
        self.shape, self.layout = array.shape, Layout(cga_layout)

    def start_of(self, coord: list[int]) -> list[int]:
        """Return where that part of a block begins which the CTA has whose turn it is."""
        first = self.layout.first(self.block_type.shape)
        return [at + further for at, further in zip(coord, first, strict=True)]

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
    """Into a flat array of integers."""

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

    def get(self) -> Tensor:
        known = self.published[self.offsets] <= now().acquired_at
        assert known.all(), "what others have written is read before it is known to be there"
        return Tensor(self.array[self.offsets])

    def set(self, value: Tensor) -> None:
        value.must_be_complete()
        self.array[self.offsets] = value.array
        self.published[self.offsets] = np.inf
        now().written.append((self.published, self.offsets))
        now().pause()


class Scalar(int):
    """A number that a kernel has read; wide enough never to wrap around."""

    def to(self, dtype: object) -> Scalar:
        return self

    def __ne__(self, other: object) -> Scalar:
        return Scalar(int(self) != other)

    __hash__ = int.__hash__
