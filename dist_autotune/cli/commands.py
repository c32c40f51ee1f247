"""The command `dist-autotune`: reports from logs, the cache, and the doctor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import settings
from ..reports.history import History, SessionHistory, load_history
from ..reports.tables import history_parts, write_html
from ..tables import text
from ..version import __version__
from . import cache_commands, run, terminal

app = typer.Typer(
    cls=terminal.OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    help="Run a program with tuned kernels; see what was found; check this machine.",
)
app.add_typer(cache_commands.app, name="cache")


app.command("run", context_settings={"allow_interspersed_args": False})(run.prepare)


def main() -> None:
    """Run the command line. The program of `run` starts after it, so its exceptions stay its own."""
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


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dist-autotune {__version__}")
        raise typer.Exit


LogDirectory = Annotated[
    Path | None,
    typer.Argument(help=f"Log directory. Default: {settings.LOG_DIR}, else {settings.DEFAULT_LOG_DIR}."),
]
EverySession = Annotated[bool, typer.Option("--all", help="Take every session, not each function's newest.")]


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that no command needs."""


@app.command()
def report(
    directory: LogDirectory = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the tables, with all candidates, as one HTML page.")
    ] = None,
    kernel: Annotated[str, typer.Option(help="Show only kernels with this in their name.")] = "",
    every: EverySession = False,
    all_candidates: Annotated[
        bool,
        typer.Option("--all-candidates", help="List every candidate, not the 10 fastest of 10 contexts."),
    ] = False,
) -> None:
    """Show the logs: winners, spread over ranks, stragglers, the choice of each rank alone."""
    history = _read(directory)
    shown = _chosen(history, kernel, every)
    if html is None:
        terminal.open_console().print(*history_parts(history, shown, all_candidates=all_candidates), sep="\n")
    else:
        write_html(html, history, shown)
        typer.echo(f"Wrote {html}")


@app.command("doctor")
def examine_machine() -> None:
    """Look at versions, GPUs, symmetric memory, ranks and settings.

    The exit code is 1 if something that is needed does not work.
    """
    from ..doctor import examination, findings  # they import torch, which serves this command alone

    with Console(stderr=True).status("Trying ranks and GPUs ..."):
        seen = examination.examine()
    found = findings.judge(seen)
    console = terminal.open_console()
    console.print(*findings.tables(seen, found))
    console.print(text("\n".join(["", *findings.next_steps(found)]), "bold"))
    if not findings.is_healthy(found):
        raise typer.Exit(1)


def _chosen(history: History, kernel: str, every: bool) -> list[SessionHistory]:
    """Return the chosen sessions, at least one; else end the command and name the kernels there are."""
    chosen = history.sessions if every else history.newest()
    shown = [found for each in chosen if (found := each.of_kernels(kernel)).contexts or not kernel]
    if not shown:
        known = {context.tuned.kernel for each in chosen for context in each.contexts}
        terminal.fail(
            f"No kernel {kernel!r} in these sessions. Tuned were: {', '.join(sorted(known)) or 'none'}"
        )
    return shown


def _read(given: Path | None) -> History:
    """Return the sessions of a log directory; without any, end the command with the next step."""
    directory = given or Path(settings.log_directory())
    advice = "Call a decorated function first, or name the log_dir it writes to: dist-autotune report DIR"
    if not directory.is_dir():
        terminal.fail(f"There is no directory {directory}. {advice}")
    history = load_history(directory)
    if not history.sessions:
        unread = "".join(f"; {name}: {text}" for name, text in history.skipped.items())
        terminal.fail(f"{directory} holds no records in rank-N.jsonl{unread}. {advice}")
    return history
