"""Finds subclasses of Autotuner whose `run` never calls that of a base class: tuned calls miss them."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Iterator
from typing import Any

from triton.runtime.autotuner import Autotuner

from .live_objects import instances

_WARNED: set[str] = set()


def warn_of_bypasses() -> None:
    """Warn once of each such class that has kernels with several configs. Walks through all objects."""
    for owner in filter(_bypasses, _subclasses(Autotuner)):
        name = f"{owner.__module__}.{owner.__qualname__}"
        if name not in _WARNED and any(len(kernel.configs) > 1 for kernel in instances([owner])):
            _WARNED.add(name)
            warnings.warn(
                f"{name} overrides Autotuner.run without super().run(): its kernels are not tuned inside "
                "tuned functions. Call super().run(*args, **kwargs) in it, or decorate the kernels with "
                "triton.autotune.",
                UserWarning,
                stacklevel=2,
            )


def _subclasses(owner: type) -> Iterator[type]:
    subclass: type
    for subclass in type.__subclasses__(owner):
        yield subclass
        yield from _subclasses(subclass)


def _bypasses(owner: type) -> bool:
    """Return whether a class has a `run` that names no base class, nor `super`."""
    run: Any = inspect.unwrap(vars(owner).get("run", Autotuner))
    names = {"super", *(base.__name__ for base in owner.__mro__[1:])}
    return isinstance(run, types.FunctionType) and names.isdisjoint(run.__code__.co_names)
