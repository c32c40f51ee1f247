"""The program that `dist-autotune run` runs."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import sys
import types
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """A Python file, or a module as for `python -m`, and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        return self.target if self.is_module else os.path.basename(self.target)

    def run(self) -> None:
        """Run it as `__main__`, as Python would; its exceptions, SystemExit too, reach the caller.

        The traceback of an uncaught exception begins with the program's own frames.
        """
        sys.argv = [self.target, *self.arguments]
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.target))
        try:
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                _run_file(os.path.abspath(self.target))
        except BaseException as error:
            _hide_callers(error)
            raise


def _run_file(path: str) -> None:
    """Run a file in a module that stays `__main__`; runpy's would be gone when exit handlers run."""
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __loader__=loader, __cached__=None, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _hide_callers(error: BaseException) -> None:
    """Let `sys.excepthook` show only the program's frames in the traceback of `error`."""
    hook, own = sys.excepthook, error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename in (
        __file__,
        runpy.run_path.__code__.co_filename,
    ):
        own = own.tb_next

    def show(kind: type[BaseException], value: BaseException, traceback: types.TracebackType | None) -> None:
        traceback = own if value is error else traceback
        hook(kind, value.with_traceback(traceback), traceback)

    sys.excepthook = show
