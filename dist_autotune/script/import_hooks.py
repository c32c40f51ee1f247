"""Acts on modules as soon as a program has imported them."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHooks(importlib.abc.MetaPathFinder):
    """In a `with` block, calls each function with the module of its name once that has been imported.

    So nothing is imported earlier than by the program, which may still set the variables that torch and
    Triton read when they are imported.
    """

    def __init__(self, callbacks: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._callbacks = dict(callbacks)
        self._searched: set[str] = set()  # modules whose spec is being found

    def __enter__(self) -> None:
        for name in self._callbacks.keys() & sys.modules.keys():
            self._callbacks.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(ValueError):  # the program may have replaced all finders
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that other finders give; its loader calls the function with the module."""
        if name not in self._callbacks or name in self._searched:
            return None
        self._searched.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searched.discard(name)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = execute  # type: ignore[method-assign]
                execute(module)
                if module.__name__ == name and name in self._callbacks:  # an archive has one loader for all
                    self._callbacks.pop(name)(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
