"""What the commands print: tables with rich, errors as one line."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text
from typer.core import TyperGroup

from ..errors import CacheWarning, TuningError
from ..formatting import Table
from ..logs.history import History, SessionHistory
from . import tables

PIPE_WIDTH = 1000  # columns when the output is no terminal: a row stays on one line, for grep


def open_console() -> Console:
    """Return the console of standard output."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_history(console: Console, history: History, shown: Iterable[SessionHistory]) -> None:
    """Print the list of all sessions, then the `shown` ones in full."""
    print_tables(console, tables.sessions_table(history.sessions))
    for name, text in history.skipped.items():
        print_text(console, f"{history.directory / name}: {text}", "yellow")
    for session in shown:
        print_text(console, f"\n{tables.session_heading(session)}", "bold")
        for note in tables.session_notes(session):
            print_text(console, note, "yellow")
        print_tables(console, *tables.session_tables(session))
        for context in session.contexts:
            print_tables(console, *tables.context_tables(context))


def print_tables(console: Console, *tables: Table) -> None:
    """Print the tables that have rows."""
    for table in (each for each in tables if each.rows):
        print_text(console, f"\n{table.title}", "bold")
        rich_table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in table.columns:
            justify: JustifyMethod = "right" if name.startswith(">") else "left"
            rich_table.add_column(Text(name.removeprefix(">")), justify=justify, overflow="fold")
        for row in table.rows:
            rich_table.add_row(*map(Text, row))  # Text: a key such as `[4096]` is no markup
        console.print(rich_table)
        if table.note:
            print_text(console, table.note, "dim")


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print `text` as it stands, long lines unbroken."""
    console.print(Text(text, style), soft_wrap=True)


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
                    typer.echo(str(warning.message), err=True)


def print_ending(program: str, report: object | None, remark: str) -> None:
    """Print on stderr what was found while a program ran."""
    console = Console(stderr=True, highlight=False)
    if report is not None:
        print_text(console, f"\n{program}: {report}")
    if remark:
        print_text(console, f"dist_autotune: {remark}", "yellow")


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


def fail(message: str) -> NoReturn:
    """End the command with exit code 2."""
    typer.echo(message, err=True)
    raise typer.Exit(2)
