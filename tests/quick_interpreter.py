"""Triton's interpreter without work that it does in vain at every step: kernels run in about half the time.

What kernels compute and what is refused stays the same; only tests use this. Programs that tests start as
processes of their own run the interpreter as it is.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Change the interpreter, for good, in this process and those that it forks."""
    interpreter._patch_lang = _PatchOnce(interpreter._patch_lang)
    options = interpreter.interpreter_builder.options
    if not options.debug:  # then it computes whether integers overflow and does not look at the answer
        without = dataclasses.replace(options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = without


class _PatchOnce:
    """Prepares `triton.language` for the interpreter at a launch, and not at each call within it again.

    Triton does so at every call of a device function, though the launch has done it, unless that function
    sees another of its modules. What is done holds until the launch restores what was before.
    """

    def __init__(self, patch: Any) -> None:
        self._patch = patch
        self._here = threading.local()  # another thread's launch may end first

    def __call__(self, fn: Any) -> Any:
        done = self._here.__dict__.setdefault("done", set())
        outermost, modules = not done, _language_modules(fn)
        if modules and modules <= done:
            return interpreter._LangPatchScope()  # nothing to restore
        scope = self._patch(fn)
        done |= modules
        if outermost:
            restore = scope.restore

            def restore_and_forget() -> None:
                done.clear()
                restore()

            scope.restore = restore_and_forget
        return scope


def _language_modules(fn: Any) -> set[str]:
    return {
        value.__name__
        for value in fn.__globals__.values()
        if inspect.ismodule(value) and (value is tl or value is tl.core)
    }
