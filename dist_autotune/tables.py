"""Tables for people, laid out by rich; their texts come from programs and logs, so a terminal obeys none."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .formatting import one_line

UNWRAPPED = 100_000  # columns: each row stays on its line
LONGEST = 400  # characters of a cell: an error of a compiler has thousands


def text(lines: str, style: str = "") -> Text:
    """Return text with its control characters escaped, except for line ends."""
    return Text("\n".join(map(one_line, lines.split("\n"))), style)


def stacked(first: str, second: str) -> Text:
    """Return one cell of two texts, the second one below."""
    return Text("\n").join([_cell(first), Text(one_line(second), "dim")])


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    note: str = "",
    *,
    optional: Collection[str] = (),
    explained: Mapping[str, str] = MappingProxyType({}),
) -> Group:
    """Return a table with its title and its note; nothing where it has no rows.

    A column whose name begins with `>` holds figures. optional: columns that are left out if all are `-`.
    explained: the note on each shown column.
    """
    if not rows:
        return Group()
    laid_out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    shown = [
        place for place, name in enumerate(columns)
        if name not in optional or any(row[place] != "-" for row in rows)
    ]  # fmt: skip
    for name in (columns[place] for place in shown):
        if name.startswith(">"):
            laid_out.add_column(re.sub(" (?!%)", "\n", name[1:]), justify="right", overflow="fold")
        else:
            laid_out.add_column(name, overflow="fold")
    note = " ".join(filter(None, [*(explained.get(columns[place], "") for place in shown), note]))
    for row in rows:
        laid_out.add_row(*(_cell(row[place]) for place in shown))
    parts: list[RenderableType] = [text(f"\n{title}", "bold")] if title else []
    return Group(*parts, laid_out, *([text(note, "dim")] if note else []))


def as_lines(*parts: RenderableType) -> list[str]:
    """Return the printed lines of the parts, none wrapped."""
    console = Console(file=io.StringIO(), width=UNWRAPPED, color_system=None)
    with console.capture() as captured:
        console.print(*parts)
    return [line.rstrip() for line in captured.get().splitlines()]


def _cell(value: str | Text) -> Text:
    if isinstance(value, Text):
        return value
    line = one_line(value)
    return Text(line if len(line) <= LONGEST else f"{line[:LONGEST]}... (the log has all of it)")
