"""Finds subclasses of Autotuner whose `run` never calls that of a base class: tuned calls miss them."""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Iterator

from triton.runtime.autotuner import Autotuner

from .live_objects import instances

_WARNED: weakref.WeakSet[type] = weakref.WeakSet()


def warn_of_bypasses() -> None:
    """Warn once of each such class that has kernels with several configs. Walks through all objects."""
    owners = [owner for owner in _subclasses(Autotuner) if owner not in _WARNED and _bypasses(owner)]
    kernels = instances(owners) if owners else []
    for owner in {type(kernel) for kernel in kernels if len(getattr(kernel, "configs", ())) > 1}:
        _WARNED.add(owner)
        warnings.warn(
            f"{owner.__module__}.{owner.__qualname__} overrides Autotuner.run without super().run(): its "
            "kernels are not tuned inside tuned functions. Call super().run(*args, **kwargs) in it, or "
            "decorate the kernels with triton.autotune.",
            UserWarning,
            stacklevel=2,
        )


def _subclasses(owner: type) -> Iterator[type]:
    subclass: type
    for subclass in type.__subclasses__(owner):
        yield subclass
        yield from _subclasses(subclass)


def _bypasses(owner: type) -> bool:
    """Return whether the first `run` of a class, by the names in it, does not lead to the one below."""
    for place, base in enumerate(owner.__mro__):
        run = vars(base).get("run")
        if base is Autotuner or not isinstance(run, types.FunctionType):
            return False
        wrapped = [cell.cell_contents for cell in run.__closure__ or () if cell != types.CellType()]
        codes = [inner.__code__ for inner in (run, *wrapped) if isinstance(inner, types.FunctionType)]
        names = {name for code in codes for name in _names(code)}
        if "super" not in names and names.isdisjoint(each.__name__ for each in owner.__mro__[place + 1 :]):
            return True
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
