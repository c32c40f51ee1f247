"""One call of a function that is repeated: each run finds the arguments of the first one."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from ..errors import TuningError
from ..timing.device_errors import is_reported
from .arguments import Arguments

T = TypeVar("T")
Hook = Callable[[Any], Any]


class ReturnedInChild(BaseException):
    """The function has returned in a child that was forked in it: the child leaves the session."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.result = result


class RepeatedCall(Generic[T]):
    """Makes the runs of one call.

    arguments: as the call found them. left: as a settled run of the call has left them, if its result and its
    effects stay. has_run: there was a settled run.
    """

    def __init__(
        self,
        name: str,
        thunk: Callable[[], T],
        arguments: Arguments,
        left: Arguments | None = None,
        *,
        has_run: bool = False,
    ) -> None:
        self._name, self._thunk, self._arguments, self._left = name, thunk, arguments, left
        self.has_run, self._runs = has_run, 1 if has_run else 0
        self._saved, self._pid = SavedTensors(), os.getpid()

    def __call__(self) -> T:
        """Make one run; an exception from it says that it was a repetition. Raises ReturnedInChild."""
        self._arguments.restore()
        self._runs += 1
        try:
            with self._saved:
                result = self._thunk()
        except Exception as error:
            if self._runs > 1 and not (isinstance(error, TuningError) or is_reported(error)):
                note = (
                    f"dist_autotune had run {self._name} again with the same arguments, to tune its kernels: "
                    f"this was run {self._runs} of the call. Name what the first run has consumed or "
                    'changed in preserve=, or decorate the function with mode="online": one run a call.'
                )
                with contextlib.suppress(Exception):  # it takes none
                    error.add_note(note)
            raise
        if os.getpid() != self._pid:
            raise ReturnedInChild(result)
        return result

    def end(self, *, with_first: bool = False) -> None:
        """End with the last run, or the first one: the caller's autograd hooks get its saved tensors."""
        self._saved.pass_on(0 if with_first else -1)

    def end_beside(self) -> None:
        """End with the effects of the settled run."""
        if self._left is not None:
            self._left.restore()


class SavedTensors:
    """In a `with` block, keeps autograd's saved tensors from hooks of the caller, such as `checkpoint`'s.

    They must see one execution: `pass_on` gives them the tensors of the first or the last block, in order.
    """

    def __init__(self) -> None:
        self._outer = saved_tensor_hooks()
        self._saved: list[list[weakref.ref[_Saved]]] = []  # by the first and the last block
        self._hooks: Any = None

    def __enter__(self) -> None:
        if self._outer is None:
            return
        self._saved = [*self._saved[:1], []]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, _unpack)
        self._hooks.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(*exception)
            self._hooks = None

    def _keep(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved[-1].append(weakref.ref(saved))
        return saved

    def pass_on(self, run: int) -> None:
        """Give the hooks the saved tensors of the first block (0) or the last one (-1)."""
        if self._outer is None:
            return
        pack, unpack = self._outer
        for each in self._saved[run]:
            # What is gone counts: a checkpoint compares the number of tensors with that of its recomputation.
            if (saved := each()) is None:
                pack(torch.empty(0))
            else:
                saved.packed, saved.unpack, saved.tensor = pack(saved.tensor), unpack, None


def saved_tensor_hooks() -> tuple[Hook, Hook] | None:
    """Return the caller's hooks for tensors that autograd saves."""
    hooks: tuple[Hook, Hook] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


class _Saved:
    """A saved tensor, or the value that the caller's hook made from it."""

    __slots__ = ("__weakref__", "packed", "tensor", "unpack")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.packed: Any = None
        self.unpack: Hook | None = None


def _unpack(saved: _Saved) -> Any:
    return saved.tensor if saved.unpack is None else saved.unpack(saved.packed)
