"""What the commands print: tables with rich, errors as one line."""

from __future__ import annotations

import contextlib
import io
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text
from typer.core import TyperGroup

from ..errors import CacheWarning, TuningError
from ..formatting import Table, counted, one_line
from ..reports import tables
from ..reports.history import History
from ..reports.report import SessionReport
from ..tuner.report import TuningReport

PIPE_WIDTH = 1000  # columns when the output is no terminal: a row stays on one line, for grep
GAP = 2  # columns between two of a table
LEAST_TEXT = 16  # columns for long texts; with fewer left, all columns of the table shrink
LONGEST_TEXT = 400  # characters of a text in a table on a terminal: an error of a compiler has thousands


def open_console(*, stderr: bool = False) -> Console:
    """Return the console of standard output, or of stderr.

    Into a pipe on a terminal, such as to `less`, it is as wide as that terminal.
    """
    console, other = Console(highlight=False, stderr=stderr), Console(stderr=True)
    if console.is_terminal:
        return console
    width = other.width if other.is_terminal else PIPE_WIDTH
    return Console(highlight=False, stderr=stderr, width=width)


def print_history(
    console: Console, history: History, shown: Iterable[SessionReport], *, all_candidates: bool = False
) -> None:
    """Print the list of all sessions, then the `shown` ones; of candidates the fastest, or all."""
    most, most_contexts = (None, None) if all_candidates else (tables.MOST_CANDIDATES, tables.MOST_CONTEXTS)
    print_tables(console, tables.sessions_table(history.sessions))
    for name, text in history.skipped.items():
        print_text(console, f"{history.directory / name}: {text}", "yellow")
    for each in shown:
        print_text(console, f"\n{tables.session_heading(each.session)}", "bold")
        print_text(console, tables.verdict(each), "bold")
        print_text(console, tables.session_place(each.session))
        for note in tables.session_notes(each.session):
            print_text(console, note, "yellow")
        print_tables(console, tables.contexts_table(each), *tables.rank_tables(each.session))
        for context in each.contexts[:most_contexts]:
            print_tables(console, *tables.context_tables(context, most))
        if rest := each.contexts[most_contexts or len(each.contexts) :]:
            more = f"candidates of {counted(len(rest), 'more context')}"
            print_text(
                console, f"\nNot listed: {more}. --all-candidates lists all, --kernel NAME some.", "dim"
            )


def print_tables(console: Console, *tables: Table) -> None:
    """Print the tables that have rows."""
    for each in (table for table in tables if table.rows):
        table = replace(each, rows=[tuple(map(one_line, row)) for row in each.rows])
        print_text(console, f"\n{table.title}", "bold")
        header = [name.removeprefix(">") for name in table.columns]
        if table.texts and console.width < PIPE_WIDTH:
            header, rows, widths = _fitted(header, table, console.width)
        else:
            rows, widths = [list(map(Text, row)) for row in table.rows], [None] * len(header)
        rich_table = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
        for name, column, width in zip(table.columns, header, widths, strict=False):
            justify: JustifyMethod = "right" if name.startswith(">") else "left"
            rich_table.add_column(Text(column), justify=justify, overflow="fold", width=width)
        for row in rows:
            rich_table.add_row(*row)  # Text: a key such as `[4096]` is no markup
        console.print(rich_table)
        if table.note:
            print_text(console, table.note, "dim")


def _fitted(
    header: list[str], table: Table, width: int
) -> tuple[list[str], list[list[Text]], list[int | None]]:
    """Return header, rows and widths of a table; its columns of long texts become one column."""
    first = len(header) - table.texts  # of the texts
    words = [max(map(len, name.split())) for name in header[:first]]
    for measured in (str, lambda cell: max(cell.split(), key=len, default="")):
        cells = [max(len(measured(row[place])) for row in table.rows) for place in range(first)]
        widths = list(map(max, words, cells))
        rest = width - sum(widths) - GAP * first
        longest = max(len(cell) for row in table.rows for cell in row[first:])
        if rest >= min(2 * LEAST_TEXT, longest):
            break
    rest = max(rest, LEAST_TEXT)
    rows = [[*map(Text, row[:first]), _stacked(row[first:], rest)] for row in table.rows]
    return [*header[:first], "\n".join(header[first:])], rows, [*widths, rest]


def _stacked(texts: Sequence[str], width: int) -> Text:
    """Return the texts below each other, the first one plain; `name: value` stays on one line."""
    stacked = Text()
    for text, style in zip(texts, ("", *["dim"] * len(texts)), strict=False):
        whole = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}... (the log has all of it)"
        lines = _wrapped(whole, width)
        stacked.append("\n".join(["", *lines] if stacked else lines), style)
    return stacked


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap a text, but never between a name and its value."""
    lines = textwrap.wrap(text.replace(": ", ":\0"), width, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print `text` with control characters escaped; on a terminal, wrapped between words."""
    text = "\n".join(map(one_line, text.split("\n")))
    if console.width < PIPE_WIDTH:
        text = "\n".join("\n".join(_wrapped(line, console.width)) for line in text.split("\n"))
    console.print(Text(text, style), soft_wrap=console.width >= PIPE_WIDTH)


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


def print_ending(program: str, report: TuningReport | None, remark: str) -> None:
    """Print the report of a program on stderr."""
    console = open_console(stderr=True)
    if report is not None and console.is_terminal:
        print_text(console, f"\n{program}: {report.heading}")
        print_tables(console, report.table)
        print_text(console, "\n".join(report.remarks))
    elif report is not None:
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


def echo(text: str, *, err: bool = False) -> None:
    """Print one line with control characters escaped."""
    typer.echo(one_line(text), err=err)


def fail(message: str) -> NoReturn:
    """End the command with exit code 2."""
    echo(message, err=True)
    raise typer.Exit(2)
