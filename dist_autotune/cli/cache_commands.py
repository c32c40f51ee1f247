"""The commands `dist-autotune cache ...`: the winners on disk, and the crash guards beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import settings
from ..codec import to_json
from ..formatting import Table, counted, format_ms
from ..storage.crash_guard import remove_abandoned
from ..storage.winners import Winners
from . import terminal

app = typer.Typer(no_args_is_help=True, help="The winners that are kept on disk.")


@app.command("list")
def list_entries() -> None:
    """List the winners: one row per kernel, key and machine."""
    cache = _open_cache()
    names = ("digest", "kernel", "key", "winner", ">ms", "device", ">ranks", "created (UTC)")
    rows = []
    for entry in cache.entries():
        key, winner = entry.key, (entry.config, format_ms(entry.ms))
        machine = key.device, str(key.world_size), entry.created_at
        rows.append((key.digest[:8], key.kernel, key.key, *winner, *machine))
    if rows:
        table = Table(f"{_entries(len(rows))} in {cache.directory}", names, rows)
        terminal.print_tables(terminal.open_console(), table)
    else:
        typer.echo(f"No entries in {cache.directory}. A tuned function stores its winners there.")


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(help="The name of a kernel or a file, or the first digits of a digest.")
    ],
) -> None:
    """Print the entries of a kernel, or of a digest, as JSON."""
    cache = _open_cache()
    found = [
        entry
        for entry in cache.entries()
        if name in (entry.key.kernel, entry.key.file_name) or entry.key.digest.startswith(name)
    ]
    if not found:
        terminal.fail(f"No entry of {name!r} in {cache.directory}: `dist-autotune cache list` lists all.")
    for entry in found:
        typer.echo(f"{cache.directory}/{entry.key.file_name}", err=True)  # the output stays pure JSON
        typer.echo(to_json(entry.as_dict(), indent=True))


@app.command()
def clear(yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Delete all entries, and the crash guards of processes that are gone."""
    cache = _open_cache()
    if not yes:
        typer.confirm(f"Delete all entries in {cache.directory}?", abort=True)
    assert cache.directory is not None
    count = remove_abandoned(cache.directory)
    guards = f" and {counted(count, 'crash guard')}" if count else ""
    typer.echo(f"Deleted {_entries(cache.clear())}{guards} in {cache.directory}")


@app.command("export")
def export_entries(path: Annotated[Path, typer.Argument(help="The file to write.")]) -> None:
    """Write all entries to one file, for another machine of the same kind."""
    cache = _open_cache()
    typer.echo(f"Exported {_entries(cache.export(path))} of {cache.directory} to {path}")


@app.command("import")
def import_entries(path: Annotated[Path, typer.Argument(help="A file that `cache export` wrote.")]) -> None:
    """Store the entries of an exported file; they replace others of the same key."""
    cache = _open_cache()
    try:
        typer.echo(f"Imported {_entries(cache.import_(path))} into {cache.directory}")
    except ValueError as error:
        terminal.fail(f"{path}: {error}. Give a file that `dist-autotune cache export` wrote.")


def _open_cache() -> Winners:
    directory = settings.cache_directory()
    return Winners(directory) if directory is not None else terminal.fail(f"No cache: {settings.NO_HOME}.")


def _entries(count: int) -> str:
    return counted(count, "entry", "entries")
