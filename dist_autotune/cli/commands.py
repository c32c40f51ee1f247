"""The command `dist-autotune`: reports from logs, their replay, the cache, and the doctor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import settings
from ..codec import to_json
from ..logs.history import History, load
from ..options import Options
from ..search.strategies import STRATEGIES
from . import cache_commands, replay, run, terminal
from .html import write_html

app = typer.Typer(
    cls=terminal.OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    help="Reports, cache and doctor of dist_autotune.",
)
app.add_typer(cache_commands.app, name="cache")


app.command("run", context_settings={"allow_interspersed_args": False})(run.prepare)


def main() -> None:
    """Run the command line; a program of `run` after it, as the command line would change what ends it."""
    programs: list[Callable[[], None]] = []
    hook = sys.excepthook  # typer's shows a program's errors in its own way
    with terminal.escaping_characters():
        try:
            app(prog_name="dist-autotune", obj=programs)
        except SystemExit:
            if not programs:
                raise
    sys.excepthook = hook
    for execute in programs:
        execute()


LogDirectory = Annotated[
    Path | None,
    typer.Argument(help=f"Log directory. Default: {settings.LOG_DIR}, else {settings.DEFAULT_LOG_DIR}."),
]
EverySession = Annotated[bool, typer.Option("--all", help="Take every session, not each function's newest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.command()
def report(
    directory: LogDirectory = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained HTML file instead.")] = None,
    every: EverySession = False,
) -> None:
    """Show what the logs tell: winners, spread over ranks, stragglers, what each rank alone would choose."""
    found = _read(directory)
    shown = found.sessions if every else found.newest()
    if html is None:
        terminal.print_history(terminal.open_console(), found, shown)
        return
    try:
        write_html(html, found, shown)
    except ImportError as error:
        terminal.fail(f"The HTML report needs matplotlib ({error}): pip install matplotlib")
    typer.echo(f"Wrote {html}")


@app.command("replay")
def replay_logs(
    directory: LogDirectory = None,
    search: Annotated[
        str | None, typer.Option(help=f"Try this search on the recorded samples: {', '.join(STRATEGIES)}.")
    ] = None,
    n_repeat: Annotated[int | None, typer.Option(min=1, help="Its measured runs per config.")] = None,
    n_warmup: Annotated[int | None, typer.Option(min=0, help="Its unmeasured runs before them.")] = None,
    statistic: Annotated[str | None, typer.Option(help="Over the samples of a rank.")] = None,
    rank_reduce: Annotated[str | None, typer.Option(help="Over ranks: max or mean.")] = None,
    seed: Annotated[int, typer.Option(help="For runs that are drawn again.")] = 0,
    every: EverySession = False,
    as_json: AsJson = False,
) -> None:
    """Recompute every decision of the logged sessions; with options, try another search on their samples.

    The exit code is 1 if something recorded does not follow from what was recorded before it.
    """
    changes = {
        "search": search, "n_repeat": n_repeat, "n_warmup": n_warmup, "statistic": statistic,
        "rank_reduce": rank_reduce,
    }  # fmt: skip
    options = {name: value for name, value in changes.items() if value is not None}
    history = _read(directory)
    verdicts = replay.verify(history.sessions)
    searched = history.sessions if every else history.newest()
    found = replay.what_if(searched, options, seed) if options else []
    if as_json:
        sessions, another = list(map(asdict, verdicts)), list(map(asdict, found))
        data = {"sessions": sessions, "another_search": another, "unreadable": history.skipped}
        typer.echo(to_json(data, indent=True))
    else:
        console = terminal.open_console()
        for name, text in history.skipped.items():
            terminal.print_text(console, f"{name}: {text}", "yellow")
        terminal.print_tables(console, *replay.verdicts_tables(verdicts), replay.what_if_table(found))
    if history.skipped or any(verdict.differences for verdict in verdicts):
        raise typer.Exit(1)


@app.command("doctor")
def examine_machine(as_json: AsJson = False) -> None:
    """Look at versions, GPUs, links, symmetric memory, ranks and settings.

    The exit code is 1 if something that is needed does not work.
    """
    from ..doctor import examination, findings  # they import torch, which serves this command alone

    with Console(stderr=True).status("Trying ranks, GPUs and links ..."):
        seen = examination.examine()
    found = findings.judge(seen)
    if as_json:
        typer.echo(to_json(findings.as_dict(seen, found), indent=True))
    else:
        console = terminal.open_console()
        terminal.print_tables(console, *findings.tables(seen, found))
        terminal.print_text(console, "\n".join(["", *findings.next_steps(found)]), "bold")
    if not findings.is_healthy(found):
        raise typer.Exit(1)


def _read(given: Path | None) -> History:
    """Return the sessions of a log directory; or end with what to do without any."""
    directory = given or Options().resolved_log_dir() or Path(settings.DEFAULT_LOG_DIR)
    advice = "Call a decorated function first, or name the log_dir it writes to: dist-autotune report DIR"
    if not directory.is_dir():
        terminal.fail(f"There is no directory {directory}. {advice}")
    history = load(directory)
    if not history.sessions:
        unread = "".join(f"; {name}: {text}" for name, text in history.skipped.items())
        terminal.fail(f"{directory} holds no records in rank-N.jsonl{unread}. {advice}")
    return history
