"""The report of a log directory as one HTML file that needs nothing beside it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from ..formatting import Table
from ..logs.history import ContextHistory, History, SessionHistory
from ..logs.reader import describe_skipped
from . import tables

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
h1 { font-size: 1.5rem }
h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #ccd; padding-top: 1rem }
h3 { font-size: 1rem; margin-bottom: .3rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse } th { color: #667; font-weight: 500 }
th, td { padding: .2rem .9rem .2rem 0; text-align: left; white-space: nowrap; border-bottom: 1px solid #eef }
.figure { text-align: right; font-variant-numeric: tabular-nums }
.note { color: #667; margin: .3rem 0 } .warning { color: #944; font-weight: 600 }
svg { max-width: 100%; height: auto }
"""


def write_html(path: Path, history: History, shown: Iterable[SessionHistory]) -> None:
    """Write the list of all sessions and the `shown` ones in full; ImportError without matplotlib."""
    title = f"dist_autotune: {history.directory}"
    parts = [
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>",
        _table(tables.sessions_table(history.sessions)),
        *(_warning(f"{name}: {describe_skipped(reasons)}") for name, reasons in history.skipped.items()),
        *(_session(session) for session in shown),
        "</body></html>\n",
    ]
    path.write_text("\n".join(parts), encoding="utf-8")


def _session(session: SessionHistory) -> str:
    parts = [f"<h2>{escape(tables.session_heading(session))}</h2>"]
    parts += map(_warning, tables.session_notes(session))
    parts += map(_table, tables.session_tables(session))
    for context in session.contexts:
        parts += map(_table, tables.context_tables(context))
        if context.convergence:
            parts.append(_convergence_plot(session, context))
    return "\n".join(parts)


def _table(table: Table) -> str:
    classes = [" class='figure'" if column.is_figure else "" for column in table.columns]

    def row(tag: str, cells: Iterable[str]) -> str:
        pairs = zip(classes, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{c}>{escape(cell)}</{tag}>" for c, cell in pairs) + "</tr>"

    rows = [row("th", (column.name for column in table.columns)), *(row("td", cells) for cells in table.rows)]
    body = "\n".join(rows)
    note = f"<p class='note'>{escape(table.note)}</p>" if table.note else ""
    return f"<h3>{escape(table.title)}</h3>\n<div class='scroll'><table>{body}</table></div>{note}"


def _warning(text: str) -> str:
    return f"<p class='warning'>{escape(text)}</p>"


def _convergence_plot(session: SessionHistory, context: ContextHistory) -> str:
    """Return an SVG of the best agreed time after each run."""
    import matplotlib  # only needed for this report
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    svg = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dist_autotune"}):
        figure = Figure(figsize=(7, 2.6), layout="constrained")
        axes = figure.add_subplot()
        runs, best_ms = list(context.convergence), list(context.convergence.values())
        axes.step(runs, best_ms, where="post", marker="o", markersize=3)
        axes.set_xlabel("run")
        axes.set_ylabel("best agreed ms" + (" (wall clock)" if session.is_wall_clock else ""))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(context.label, fontsize=9, loc="left", parse_math=False)
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    plot = svg.getvalue()[svg.getvalue().index("<svg") :]  # without the XML prolog: it is part of a page
    # Ids must be unique in the document: two sessions may have the same context.
    prefix = re.sub(r"[^A-Za-z0-9-]", "-", f"{session.name}-{context.records[0].context}-")
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", plot)
