"""Copies of the tensors that kernels change in place, put back between the runs of a call.

`restore_value` and `reset_to_zero` of `triton.autotune` name the arguments that a kernel changes. A tensor is
copied before the first launch of the call that names it. Storages are held by weak references. Only tensors
from before the call are put back, none that a run allocated.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter

from ..errors import TuningError
from ..triton_api.interception import fork_safe_lock
from ..triton_api.launch import Launch

# What a tensor without a storage raises when it is asked for it: a sparse one, an uninitialised parameter.
_NO_STORAGE = (RuntimeError, NotImplementedError, ValueError, TypeError)
# Torch's classes of tensors that hold others and no memory of their own: each class lengthens a look by 4 %.
_OF_OTHERS = ("torch._subclasses", "torch.masked", "torch.nested", "torch.sparse", "torch.testing")
OF_OPERATIONS = "dist_autotune.kernels"  # their flags and symmetric memory count calls
# A storage with offset, sizes, strides and type of what a launch was given of it.
Region: TypeAlias = tuple[StorageWeakRef, int, tuple[int, ...], tuple[int, ...], torch.dtype]


_own_memory: list[weakref.ref[torch.Tensor]] = []  # of operations


def leave_unchecked(*tensors: torch.Tensor) -> None:
    """Leave this memory out of checks for work in place: operations count their calls in it."""
    living = (each for each in _own_memory if each() is not None)
    _own_memory[:] = [*living, *map(weakref.ref, tensors)]


class WrittenTensors:
    """Copies of the tensors that launches of one call change, from before the call. Any thread may launch."""

    def __init__(self) -> None:
        # In the order of the launches: values, the stream (None on the CPU), and `kernel.argument`.
        self._copies: dict[Region, tuple[torch.Tensor, Any, str]] = {}
        self._there_before: set[StorageWeakRef] | None = None  # None: nothing is copied
        self.given: dict[Region, str] | None = None  # what kernels are given, with names; None: not recorded
        # The tensors from before the call, with their versions, and whether they had a gradient.
        self._versions: list[tuple[weakref.ref[torch.Tensor], int, bool]] = []
        self._lock = fork_safe_lock()

    def begin_runs(self, result: object = None, *, records: bool = False) -> None:
        """Begin to copy tensors that launches change, unless a run allocated them; copy `result` at once.

        records: keep the arguments of kernels, for `changed`.
        """
        self._there_before, tensors = set(), _tensors()
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                with contextlib.suppress(*_NO_STORAGE):
                    self._there_before.add(StorageWeakRef(tensor.untyped_storage()))
                    if records and not tensor.is_inference():
                        has_gradient = tensor.is_leaf and tensor.grad is not None
                        self._versions.append((weakref.ref(tensor), tensor._version, has_gradient))
        self.given = {} if records else None
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._keep("", tensor)

    def end_call(self) -> None:
        """Let everything go."""
        self._there_before = None
        self._copies.clear()
        self._versions.clear()
        self.given = None

    def keep(self, launch: Launch) -> None:
        """Copy the tensors that a launch changes, once each; raises TuningError without memory for a copy."""
        names = written_arguments(launch.tuner)
        if not names and self.given is None:
            return
        arguments = {**dict(zip(launch.tuner.arg_names, launch.args, strict=False)), **launch.kwargs}
        kernel = launch.tuner.base_fn
        for name, value in arguments.items():
            if not isinstance(value, torch.Tensor):
                value = getattr(value, "base", None)  # of a descriptor
            if isinstance(value, torch.Tensor):
                if name in names:
                    self._keep(f"{kernel.__name__}.{name}", value)
                elif self.given is not None and not kernel.__module__.startswith(OF_OPERATIONS):
                    self._record(f"argument {name} of {kernel.__name__}", value)

    def _record(self, name: str, tensor: torch.Tensor) -> None:
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            region = region_of(tensor)
            if self.given is not None and region is not None and self._was_there(region[0], tensor):
                self.given.setdefault(region, name)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            region = region_of(tensor)
            if region is None or region in self._copies or not self._was_there(region[0], tensor):
                return
            try:
                values = copy_of(tensor)
            except torch.OutOfMemoryError as error:
                raise TuningError(
                    f"{name or 'the result'}: no memory for a copy of its {tensor.nbytes} bytes, to be put "
                    f'back before each further run ({error}). mode="online" repeats nothing.'
                ) from None
            stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
            self._copies[region] = values, stream, name

    def changed(self) -> dict[Region, str]:
        """Return, by name, tensors from before the call that may have been changed since; stop recording.

        Arguments of launches, but for those that kernels declare as changed, and tensors that torch changed.
        """
        found = dict(self.given or {})
        with torch._C.DisableTorchFunctionSubclass():
            for reference, version, had_gradient in self._versions:
                if (tensor := reference()) is None:
                    continue
                with contextlib.suppress(*_NO_STORAGE):
                    if tensor._version != version and (region := region_of(tensor)) is not None:
                        found.setdefault(region, "a tensor written by torch")
                    if tensor.is_leaf and tensor.requires_grad and not had_gradient:
                        gradient = tensor.grad
                        if gradient is not None and (region := region_of(gradient)) is not None:
                            found.setdefault(region, "a gradient")
            own = {
                StorageWeakRef(t.untyped_storage()) for each in [*_own_memory] if (t := each()) is not None
            }
        self.given = None
        self._versions.clear()
        return {region: name for region, name in found.items() if region[0] not in own}

    def _was_there(self, storage: StorageWeakRef, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is none that a run of this call has allocated."""
        return self._there_before is not None and (storage in self._there_before or _is_frozen(tensor))

    def restore(self) -> str:
        """Put back the tensors that still exist; return the names of the arguments, "" if nothing was copied.

        The last copy first: of overlapping parts of a storage, the first copy holds the oldest values.
        """
        for region, (values, stream, _) in reversed(self._copies.items()):
            with torch.inference_mode(False), torch.no_grad(), _ordered_with(stream):
                if (there := tensor_of(region)) is not None:
                    there.copy_(values)
        return ", ".join(dict.fromkeys(name for *_, name in self._copies.values() if name))


def region_of(tensor: torch.Tensor) -> Region | None:
    """Return where a tensor lies; None: nowhere, or it is empty or nested."""
    try:
        if tensor.is_meta or tensor.is_nested:
            return None
        storage = StorageWeakRef(tensor.untyped_storage())
        strides, offset = tuple(tensor.stride()), tensor.storage_offset()
    except _NO_STORAGE:
        return None
    return (storage, int(offset), tuple(tensor.shape), strides, tensor.dtype) if tensor.numel() else None


def tensor_of(region: Region) -> torch.Tensor | None:
    """Return the present elements of a region, each once; None: its memory is gone, or was made smaller.

    A tensor of its own: the user's has a version that autograd compares.
    """
    storage, offset, shape, strides, dtype = region
    alive = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    if alive is None or alive.nbytes() < bytes_needed(offset, shape, strides, dtype):
        return None
    there = torch.empty(0, dtype=dtype, device=alive.device)
    return without_overlap(there.set_(alive, offset, shape, strides))


def bytes_needed(offset: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size of the smallest storage that holds such a tensor."""
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * dtype.itemsize if 0 not in shape else 0


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor as it lies in memory, each element once."""
    with torch.inference_mode(False), torch.no_grad():
        return without_overlap(_as_stored(tensor.detach())).clone()


def written_arguments(tuner: Any) -> tuple[str, ...]:
    """Return the arguments that `triton.autotune` was told the kernel changes."""
    return *getattr(tuner, "reset_to_zero", ()), *getattr(tuner, "restore_value", ())


def _tensors() -> list[torch.Tensor]:
    """Return all tensors that Python knows, and their gradients, which Python may not have seen."""
    with torch._C.DisableTorchFunctionSubclass():
        kinds = _and_subclasses(torch.Tensor)
        found = instances({kind for kind in kinds if not kind.__module__.startswith(_OF_OTHERS)})
        gradients = []
        for tensor in found:
            with contextlib.suppress(*_NO_STORAGE):
                if tensor.is_leaf and tensor.grad is not None:
                    gradients.append(tensor.grad)
        return found + gradients


def instances(kinds: Collection[type]) -> list[Any]:
    """Return the objects whose type is one of `kinds`, but for those that `gc.freeze` has hidden.

    They are found by their references to their class: `gc.get_objects` would also return tuples that other
    threads are building from an iterator, where CPython raises SystemError (bpo-15108).
    """
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]


def _and_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_and_subclasses, type.__subclasses__(kind)))


def _is_frozen(tensor: torch.Tensor) -> bool:
    """Return whether `gc.freeze()` has hidden a tensor from `_tensors`: then it is an old one."""
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
    """Order the block's work on the current stream: after the work of `stream`, before its further work."""
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device):
        current = torch.cuda.current_stream()
        current.wait_stream(stream)
        yield
        stream.wait_stream(current)
