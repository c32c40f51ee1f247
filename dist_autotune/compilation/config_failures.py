"""Tells failures of a config, which another config may not have, from errors of the user's."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from ..formatting import escaped

_COMPILER_FAILURE = re.compile(
    r"PassManager::run failed|failed to translate module|LLVM ERROR|ptxas|out of resource", re.I
)
_OUT_OF_MEMORY = re.compile(r"out of memory", re.I)


def config_failure(error: BaseException, grid: Any = None, hook: Any = None) -> str | None:
    """Return why `error` means "this config does not work here", or None: it is the user's error.

    What `grid` raised, the grid function of the launch, is the user's. So is running out of memory inside
    `hook`, the config's own; a compiler's failure there is the config's.
    """
    users: Sequence[Any] = ()
    if not isinstance(error, (OutOfResources, PTXASError, CompilationError)):
        if is_out_of_memory(error):
            users = grid, hook
        elif type(error) is RuntimeError and _COMPILER_FAILURE.search(str(error)):
            users = (grid,)
        else:
            return None
    codes = {_code_of(function) for function in users} - {None}
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        return None
    lines = [line for line in str(error).splitlines() if line.strip()]
    return escaped(f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": "))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory had run out, which tells more of the moment than of the config."""
    text = str(error) if type(error) is RuntimeError else ""
    return isinstance(error, torch.OutOfMemoryError) or bool(_OUT_OF_MEMORY.search(text))


def _code_of(function: Any) -> Any:
    """Return the code that a call of `function` runs, through partials and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    if callable(function) and not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)
