"""Copies of the tensors that kernels change in place, put back between the runs of a call.

A kernel says what it changes: `restore_value` and `reset_to_zero` of `triton.autotune` name the arguments. A
tensor is copied before the first launch of the call that names it. Storages are held by weak references. Only
tensors from before the call are put back; what a run allocates belongs to that run.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter

from ..errors import TuningError
from ..triton_api.interception import fork_safe_lock
from ..triton_api.launch import Launch
from ..triton_api.live_objects import instances

# What a tensor without a storage raises when it is asked for it: a sparse one, an uninitialised parameter.
_NO_STORAGE = (RuntimeError, NotImplementedError, ValueError, TypeError)
# A storage with offset, sizes, strides and type of what a launch was given of it.
_Region: TypeAlias = tuple[StorageWeakRef, int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Copy:
    values: torch.Tensor
    stream: Any  # of the launch; None on the CPU


class WrittenTensors:
    """Copies of the tensors that launches of one call change, from before the call. Any thread may launch."""

    def __init__(self) -> None:
        self._copies: dict[_Region, _Copy] = {}  # in the order of the first launches
        self._there_before: set[StorageWeakRef] | None = None  # None: nothing is copied
        self._names: dict[str, None] = {}  # `kernel.argument` of the copies, in order
        self._lock = fork_safe_lock()

    def begin_runs(self, result: object = None) -> None:
        """From now on copy what launches change, unless a run has allocated it; copy `result` at once."""
        self._there_before = _storages()
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._keep("", tensor)

    def end_call(self) -> None:
        """Let everything go."""
        self._there_before = None
        self._copies.clear()
        self._names.clear()

    def keep(self, launch: Launch) -> None:
        """Copy what a launch changes, unless there is a copy; raises TuningError where no memory is left."""
        arguments = {**dict(zip(launch.tuner.arg_names, launch.args, strict=False)), **launch.kwargs}
        for name in written_arguments(launch.tuner):
            value = arguments.get(name)
            if not isinstance(value, torch.Tensor):
                value = getattr(value, "base", None)  # of a descriptor
            if isinstance(value, torch.Tensor):
                self._keep(f"{launch.tuner.base_fn.__name__}.{name}", value)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            try:
                storage = StorageWeakRef(tensor.untyped_storage())
                strides, offset = tuple(tensor.stride()), tensor.storage_offset()
            except _NO_STORAGE:
                return
            region = storage, int(offset), tuple(tensor.shape), strides, tensor.dtype
            if region in self._copies or not tensor.numel() or not self._was_there(storage, tensor):
                return
            try:
                with torch.inference_mode(False), torch.no_grad():
                    values = without_overlap(_as_stored(tensor.detach())).clone()
            except torch.OutOfMemoryError as error:
                raise TuningError(
                    f"{name or 'the result'}: no memory for a copy of its {tensor.nbytes} bytes, to be put "
                    f'back before each further run ({error}). mode="online" repeats nothing.'
                ) from None
            stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
            self._copies[region] = _Copy(values, stream)
            if name:
                self._names[name] = None

    def _was_there(self, storage: StorageWeakRef, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is none that a run of this call has allocated."""
        return self._there_before is not None and (storage in self._there_before or _is_frozen(tensor))

    def restore(self) -> str:
        """Put back the tensors that still exist; return the names of the arguments, "" if nothing was copied.

        The last copy first: of overlapping parts of a storage, the first one holds what was there before.
        """
        for (storage, offset, shape, strides, dtype), copy in reversed(self._copies.items()):
            alive = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            if alive is None or alive.nbytes() < (last + 1) * dtype.itemsize:  # it may have been made smaller
                continue
            with torch.inference_mode(False), torch.no_grad(), _ordered_with(copy.stream):
                # A tensor of its own: the user's has a version that autograd compares.
                there = torch.empty(0, dtype=dtype, device=alive.device)
                without_overlap(there.set_(alive, offset, shape, strides)).copy_(copy.values)
        return ", ".join(self._names)


def written_arguments(tuner: Any) -> tuple[str, ...]:
    """Return the arguments that `triton.autotune` was told the kernel changes."""
    return *getattr(tuner, "reset_to_zero", ()), *getattr(tuner, "restore_value", ())


def _storages() -> set[StorageWeakRef]:
    """Return the storages of all tensors that Python knows, and of their gradients."""
    found: set[StorageWeakRef] = set()
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in instances(_and_subclasses(torch.Tensor)):
            with contextlib.suppress(*_NO_STORAGE):
                found.add(StorageWeakRef(tensor.untyped_storage()))
                if tensor.is_leaf and tensor.grad is not None:  # autograd's: Python may not have seen it
                    found.add(StorageWeakRef(tensor.grad.untyped_storage()))
    return found


def _and_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_and_subclasses, type.__subclasses__(kind)))


def _is_frozen(tensor: torch.Tensor) -> bool:
    """Return whether `gc.freeze()` has hidden a tensor from `_storages`: then it is an old one."""
    if not gc.get_freeze_count():
        return False
    base = tensor if tensor._base is None else tensor._base
    return not any(each is base for each in instances({type(base)}))


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it lies in memory: the base of a conjugate or negative view."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def without_overlap(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with each element of an expanded tensor once; other layouts have none twice."""
    if tensor.layout is not torch.strided:
        return tensor
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


@contextlib.contextmanager
def _ordered_with(stream: Any) -> Any:
    """Order the block's work on the current stream: behind the work of `stream`, before its further work."""
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device):
        current = torch.cuda.current_stream()
        current.wait_stream(stream)
        yield
        stream.wait_stream(current)
