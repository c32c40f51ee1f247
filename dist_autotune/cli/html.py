"""The report of a log directory as one HTML file that needs nothing beside it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..logs.history import ContextHistory, History, SessionHistory
from . import terminal

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dist_autotune</title><style>
{stylesheet}
body {{ color: {foreground}; background: {background}; margin: 2rem }}
pre {{ font: 14px/1.45 ui-monospace, monospace; overflow-x: auto }} svg {{ display: block; max-width: 100% }}
</style></head><body><pre>{code}</pre>
"""


def write_html(path: Path, history: History, shown: Sequence[SessionHistory]) -> None:
    """Write the list of all sessions and the `shown` ones in full; ImportError without matplotlib."""
    console = Console(record=True, file=io.StringIO(), highlight=False, width=terminal.PIPE_WIDTH)
    terminal.print_text(console, f"dist_autotune: {history.directory}", "bold")
    terminal.print_history(console, history, shown)
    plots = [_plot(session, each) for session in shown for each in session.contexts if each.convergence]
    path.write_text("\n".join([console.export_html(code_format=PAGE), *plots, "</body></html>\n"]), "utf-8")


def _plot(session: SessionHistory, context: ContextHistory) -> str:
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
        axes.set_title(f"{session.opened.session}  {context.label}", fontsize=9, loc="left", parse_math=False)
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    plot = svg.getvalue()[svg.getvalue().index("<svg") :]  # without the XML prolog: it is part of a page
    # Ids must be unique in the document: two sessions may have the same context.
    prefix = re.sub(r"[^A-Za-z0-9-]", "-", f"{session.opened.session}-{context.records[0].context}-")
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", plot)
