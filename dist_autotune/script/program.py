"""The program that `dist-autotune run` runs."""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True)
class Program:
    """A script, or a module as for `python -m`, and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        return self.target if self.is_module else os.path.basename(self.target)

    def run(self) -> None:
        """Run it as `__main__`, as Python would. What it raises, SystemExit too, is the caller's.

        A traceback of what nobody catches begins with the program's own frames.
        """
        sys.argv = [self.target, *self.arguments]
        if not sys.flags.safe_path:
            directory = os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.target))
            sys.path[0] = directory
        try:
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.target, run_name="__main__")
        except BaseException as error:
            _hide_callers(error)
            raise


def _hide_callers(error: BaseException) -> None:
    """Let `sys.excepthook` show of `error` what the program's frames add to the traceback."""
    hook, own = sys.excepthook, _own_part(error.__traceback__)

    def show(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        hook(kind, value.with_traceback(own if value is error else traceback), own)

    sys.excepthook = show


def _own_part(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback below the frames of runpy, which called the program."""
    runner = runpy.run_path.__code__.co_filename
    while traceback is not None and traceback.tb_frame.f_code.co_filename != runner:
        traceback = traceback.tb_next
    while traceback is not None and traceback.tb_frame.f_code.co_filename == runner:
        traceback = traceback.tb_next
    return traceback
