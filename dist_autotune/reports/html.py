"""The report of a log directory as one HTML page that needs nothing beside it; its style is `report.css`.

The page has the tables of the text report, and a bar for each candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ..formatting import Table, config_label, format_ms, one_line
from ..regular_files import require_directory_of
from ..tuner.report import TunedContext
from . import tables
from .history import CandidateHistory, ContextHistory, History, is_time
from .report import SessionReport

MOST_OPEN = 3  # contexts, and rows of a table, that are shown unfolded

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


def element(name: str, *children: str, **attributes: str | None) -> Html:
    """Return an HTML element; `class_="dim"` is its class, attributes that are None are left out."""
    inside = "".join(each if isinstance(each, Html) else escape(one_line(each)) for each in children)
    given = {key.rstrip("_"): value for key, value in attributes.items() if value is not None}
    said = "".join(f' {key}="{escape(value)}"' for key, value in given.items())
    return Html(f"<{name}{said}>{inside}</{name}>")


def write_html(path: Path, history: History, shown: Sequence[SessionReport]) -> None:
    """Write the list of all sessions and the `shown` ones in full."""
    require_directory_of(path)
    title = f"dist_autotune: {history.directory}"
    body = [element("h1", title)]
    for name, text in history.skipped.items():
        body.append(element("p", f"{name}: {text}", class_="note"))
    body += [element("section", *_session(each)) for each in shown]
    body.append(_folded(tables.sessions_table(history.sessions)))
    style = files(__package__).joinpath("report.css").read_text("utf-8")
    page = PAGE.format(title=escape(title), style=style, body="\n".join(body))
    path.write_bytes(page.encode("utf-8", "xmlcharrefreplace"))


def _session(shown: SessionReport) -> Iterator[Html]:
    session = shown.session
    yield element("h2", session.opened.thunk)
    yield element("p", tables.verdict(shown), class_="verdict")
    heading = tables.session_heading(session).removeprefix(f"{session.opened.thunk}: ")
    started = session.opened.started_at[:16].replace("T", " ")
    yield element("p", f"{tables.session_place(session)}. {heading}, started {started} UTC", class_="dim")
    for note in tables.session_notes(session):
        yield element("p", note, class_="note")
    if shown.contexts:
        yield _table(tables.contexts_table(shown))
    for place, (tuned, context) in enumerate(zip(shown.report.contexts, shown.contexts, strict=True)):
        yield element("details", *_context(tuned, context), open="" if place < MOST_OPEN else None)
    yield from (_folded(table) for table in tables.rank_tables(session) if table.rows)


def _context(tuned: TunedContext, context: ContextHistory) -> Iterator[Html]:
    winner = f"{format_ms(tuned.ms)} ms, {config_label(tuned.config_text or '-')}"
    yield element("summary", element("b", tuned.label), element("span", winner))
    fastest = tables.listed(context, tables.MOST_CANDIDATES)
    yield _candidates(context, fastest)
    if rest := [each for each in tables.in_order(context.candidates) if each not in fastest]:
        summary = element("summary", f"{len(rest)} more")
        yield element("details", summary, _candidates(context, rest))
    yield from (_table(table) for table in tables.tables_of_ranks_alone(context))


def _candidates(context: ContextHistory, shown: Sequence[CandidateHistory]) -> Html:
    best_ms = tables.in_order(context.candidates)[0].agreed_ms if shown else None
    bars = [_bar(each, best_ms, is_winner=each is context.winner) for each in shown]
    return _table(tables.candidates_table(context, shown), bars)


def _bar(candidate: CandidateHistory, best_ms: float | None, *, is_winner: bool) -> Html:
    """Return a cell with a candidate's speed as a bar, as long as the cell for the fastest one."""
    speed = 0.0
    if is_time(best_ms) and is_time(candidate.agreed_ms):
        speed = min(best_ms / candidate.agreed_ms, 1.0)
    bar = element("i", style=f"width:{100 * speed:.1f}%", class_="won" if is_winner else None)
    of_ranks = ", ".join(f"rank {rank}: {format_ms(ms)} ms" for rank, ms in sorted(candidate.rank_ms.items()))
    return element("td", bar, class_="bar", title=of_ranks or None)


def _folded(table: Table) -> Html:
    """Return a table that is open while it is short."""
    summary = element("summary", f"{table.title} ({len(table.rows)})")
    return element("details", summary, _table(table), open="" if len(table.rows) <= MOST_OPEN else None)


def _table(table: Table, bars: Iterable[Html] = ()) -> Html:
    """Return a table and its note; bars: the first cell of each row."""
    texts = len(table.columns) - table.texts  # the place of the first column of long texts
    kinds = [
        "figure" if name.startswith(">") else "text" if place >= texts else None
        for place, name in enumerate(table.columns)
    ]

    def cells(tag: str, row: Sequence[str]) -> list[Html]:
        return [element(tag, cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)]

    lines = [cells("td", row) for row in table.rows]
    header = cells("th", [name.removeprefix(">") for name in table.columns])
    if bars:
        lines = [[bar, *line] for bar, line in zip(bars, lines, strict=True)]
        header = [element("th", "speed"), *header]
    rows = element("table", *(element("tr", *line) for line in (header, *lines)))
    note = element("p", table.note, class_="dim") if table.note else ""
    return Html(element("div", rows, class_="scroll") + note)
