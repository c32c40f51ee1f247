"""The report of a log directory as one HTML page that needs nothing beside it; its style is `report.css`.

It holds the tables that a terminal shows, with all candidates; long ones are folded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ..formatting import Table, one_line
from . import tables
from .history import History
from .report import SessionReport

MOST_OPEN = 3  # contexts that are shown unfolded
LONG = 20  # rows of a table, from which on it is folded

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


class Html(str):
    """Text that is HTML already; any other text is escaped where it enters an element."""


def element(name: str, *children: str, **attributes: object) -> Html:
    """Return an HTML element; `class_="dim"` is its class, attributes that are None are left out."""
    inside = "".join(each if isinstance(each, Html) else escape(one_line(each)) for each in children)
    given = {key.rstrip("_"): value for key, value in attributes.items() if value is not None}
    said = "".join(f' {key}="{escape(str(value))}"' for key, value in given.items())
    return Html(f"<{name}{said}>{inside}</{name}>")


def write_html(path: Path, history: History, shown: Sequence[SessionReport]) -> None:
    """Write the `shown` sessions in full, and the list of all."""
    title = f"dist_autotune: {history.directory}"
    body = [element("h1", title)]
    body += [element("p", f"{name}: {text}", class_="note") for name, text in history.skipped.items()]
    body += [element("section", *_session(each)) for each in shown]
    body.append(_details("Sessions", _table(tables.sessions_table(history.sessions)), is_open=False))
    style = files(__package__).joinpath("report.css").read_text("utf-8")
    page = PAGE.format(title=escape(title), style=style, body="\n".join(body))
    path.write_bytes(page.encode("utf-8", "xmlcharrefreplace"))


def _session(shown: SessionReport) -> Iterator[Html]:
    session = shown.session
    yield element("h2", session.opened.thunk)
    yield element("p", tables.verdict(shown), class_="verdict")
    for fact in (tables.session_heading(session), tables.session_place(session)):
        yield element("p", fact, class_="dim")
    for note in tables.session_notes(session):
        yield element("p", note, class_="note")
    for table in (tables.contexts_table(shown), *tables.rank_tables(session)):
        if table.rows:
            yield element("h3", table.title)
            yield _table(table)
    for place, context in enumerate(shown.contexts):
        content = [_folded(table) for table in tables.context_tables(context)]
        yield _details(context.label, *content, is_open=place < MOST_OPEN)


def _folded(table: Table) -> Html:
    """Return a table below its title, which hides it where it is long."""
    if len(table.rows) >= LONG:
        return _details(table.title, _table(table), is_open=False)
    return Html(element("h3", table.title) + _table(table))


def _details(title: str, *content: Html, is_open: bool) -> Html:
    return element("details", element("summary", title), *content, open="" if is_open else None)


def _table(table: Table) -> Html:
    kinds = ["figure" if name.startswith(">") else None for name in table.columns]
    names = [name.removeprefix(">") for name in table.columns]
    lines = [[element(tag, cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)]
             for tag, row in (("th", names), *(("td", row) for row in table.rows))]  # fmt: skip
    rows = element("table", *(element("tr", *line) for line in lines))
    note = [element("p", table.note, class_="dim")] if table.note else []
    return Html(element("div", rows, class_="scroll") + "".join(note))
