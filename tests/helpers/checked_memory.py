"""Triton's interpreter with bounds: a kernel that reads or writes beside the tensors of its launch fails.

The interpreter takes any address: a wrong one damages the process, which dies later and elsewhere, or never.
Here each address that is not masked must lie in a tensor of the launch, between its first and last element;
what a table of addresses leads to is in its `points_to`. What kernels compute stays the same.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor


class OutOfBounds(IndexError):
    """A kernel would have used memory that it was not given; the message names the nearest tensor."""


class Bounds:
    """The bytes that a launch may use: of each of its tensors."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        found = [(*extent_of(tensor), name) for name, tensor in tensors_of(arguments)]
        self._tensors = sorted(found)
        self._begins, self._ends = [], []
        for begin, end, _name in self._tensors:  # those that overlap or touch are one room
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def check(self, doing: str, addresses: np.ndarray, mask: np.ndarray | None, size: int) -> None:
        """Raise OutOfBounds unless `size` bytes from each address on, where the mask is set, may be used."""
        if self._hold(*_ends(addresses), size):
            return
        real = addresses.reshape(-1)
        if mask is not None:
            real = real[np.asarray(mask).reshape(-1).astype(bool)]
        if not real.size or self._hold(*_ends(real), size):
            return
        for address in real.tolist():
            if not self._hold(address, address, size):
                raise OutOfBounds(f"{doing} {size} bytes {self._place(address)}")

    def _hold(self, first: int, last: int, size: int) -> bool:
        room = bisect_right(self._begins, first) - 1
        return room >= 0 and last + size <= self._ends[room]

    def _place(self, address: int) -> str:
        if not self._tensors:
            return "in a launch without tensors"
        begin, end, name = min(self._tensors, key=lambda each: max(each[0] - address, address - each[1], 0))
        return f"at byte {address - begin} of {name}, which has {end - begin}"


def _ends(addresses: np.ndarray) -> tuple[int, int]:
    """Return the lowest and the highest address."""
    if addresses.size == 1:  # most are: flags, which are polled
        return (only := addresses.item()), only
    return addresses.min().item(), addresses.max().item()


def tensors_of(arguments: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the name and the tensor of each argument that has memory; of a tuple, those of its members."""
    for name, value in arguments.items():
        if isinstance(value, TensorDescriptor):
            yield name, value.base
        elif isinstance(value, tuple):
            yield from tensors_of({f"{name}[{place}]": member for place, member in enumerate(value)})
        elif isinstance(value, torch.Tensor):
            yield name, value
            yield from tensors_of({f"what {name} points to": getattr(value, "points_to", ())})


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the one behind its last."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def install() -> None:
    """Check all launches from now on, in this process and those that it forks."""
    here = threading.local()  # autograd launches from threads of its own
    launch, builder = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    swap, modify = builder.create_atomic_cas, builder.create_atomic_rmw

    def checked_launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(here, "bounds", None)
        here.bounds = Bounds(dict(zip(executor.arg_names, args, strict=False)) | kwargs)
        try:
            return launch(executor, *args, **kwargs)
        finally:
            here.bounds = before

    def checked_load(self: Any, ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        here.bounds.check("reads", ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8)
        return load(self, ptrs, mask, *args, **kwargs)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        here.bounds.check("writes", ptrs.data, mask.data, value.data.itemsize)
        return store(self, ptrs, value, mask, *args, **kwargs)

    def checked_swap(self: Any, ptr: Any, cmp: Any, val: Any, *args: Any) -> Any:
        here.bounds.check("swaps", ptr.data, None, val.data.itemsize)
        return swap(self, ptr, cmp, val, *args)

    def checked_modify(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *args: Any) -> Any:
        here.bounds.check("modifies", ptr.data, mask.data, val.data.itemsize)
        return modify(self, op, ptr, val, mask, *args)

    interpreter.GridExecutor.__call__ = checked_launch
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_cas, builder.create_atomic_rmw = checked_swap, checked_modify
