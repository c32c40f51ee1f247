"""Output of the commands: on a terminal and into a pipe no wider than COLUMNS; errors as one line."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..errors import CacheWarning, TuningError
from ..formatting import counted, one_line
from ..tables import as_lines, text
from ..tuner.report import Findings, TunedContext, labels_by_reason

UNSETTLED = ("tuning", "unfinished", "partial")  # statuses


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
        show("", *map(text, _total_lines(found)))
    if remark:
        show(text(f"dist_autotune: {remark}", "yellow"))


def _total_lines(found: Sequence[Findings]) -> Iterator[str]:
    """Yield lines: contexts by status, untuned keys with reasons, gains, costs, the place of the report."""
    contexts = [context for each in found for context in each.contexts]
    settled = sum(context.status not in UNSETTLED for context in contexts)
    statuses = Counter(context.status for context in contexts)
    listed = "".join(f", {count} {status}" for status, count in sorted(statuses.items()))
    of = f" of {counted(len(found), 'function')}" if len(found) > 1 else ""
    yield f"In all: {counted(len(contexts), 'context')}{of}, {settled} settled{listed}"
    untuned = [key for each in found for key in each.untuned]
    named = ((TunedContext(kernel, key, None).label, reason) for kernel, key, reason in untuned)
    for labels, reason in labels_by_reason(named):
        yield f"Untuned: {labels}: {reason}"
    for each in found if len(found) > 1 else ():  # of one alone its own report says so
        yield f"Gain of {each.name}: {each.report.gain or each.report.step or 'not known'}"
    yield f"Tuning took {sum(each.report.cost_s + each.report.earlier_s for each in found):.1f} s in all"
    for directory in sorted({each.report.log_dir for each in found if each.report.log_dir}):
        yield f"Report: dist-autotune report {directory}"


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
