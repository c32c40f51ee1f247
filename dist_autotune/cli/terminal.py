"""Output of the commands: on a terminal and into a pipe no wider than COLUMNS; errors as one line."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..errors import CacheWarning, TuningError
from ..formatting import one_line
from ..reports.totals import total_lines
from ..tables import as_lines, text
from ..tuner.report import Findings


def open_console(*, stderr: bool = False) -> Console:
    return Console(highlight=False, stderr=stderr)


class OneLineErrors(TyperGroup):
    """Turns errors and cache warnings of the package and the system into one line each on stderr."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CacheWarning)
            try:
                return super().invoke(ctx)
            except (TuningError, OSError) as error:
                fail(str(error))
            finally:
                for warning in caught:
                    echo(str(warning.message), err=True)


def print_ending(found: Sequence[Findings], remark: str) -> None:
    """Print the reports of a program's functions on stderr, then totals; a pipe gets whole lines."""
    console = open_console(stderr=True)
    show = functools.partial(console.print, sep="\n", soft_wrap=True)
    for report in (each.report for each in found):
        show(text(f"\n{report.function}: {report.heading}"))
        if console.is_terminal:
            console.print(report.table)
        else:
            show(*map(text, as_lines(report.table)))
        if report.remarks:
            show(*map(text, report.remarks))
    if found:
        show("", *map(text, total_lines(found)))
    if remark:
        show(text(f"dist_autotune: {remark}", "yellow"))


@contextlib.contextmanager
def escaping_characters() -> Iterator[None]:
    """Write characters of keys that the output's encoding lacks as escapes."""
    streams = [each for each in (sys.stdout, sys.stderr) if isinstance(each, io.TextIOWrapper)]
    before = [each.errors for each in streams]
    try:
        for stream in streams:
            stream.reconfigure(errors="backslashreplace")
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            stream.reconfigure(errors=errors)


def echo(text: str, *, err: bool = False) -> None:
    """Print one line with control characters escaped."""
    typer.echo(one_line(text), err=err)


def fail(message: str) -> NoReturn:
    """End the command with exit code 2."""
    echo(message, err=True)
    raise typer.Exit(2)
