"""The command `dist-autotune`: reports from logs, the cache, and the doctor."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from . import history, html_report, settings, terminal
from .analysis import History
from .cache import DiskCache, Entry
from .errors import CacheWarning, TuningError
from .serialize import to_json
from .tables import Table, columns
from .text import counted, format_ms

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Reports, cache and doctor of dist_autotune."
)
cache_app = typer.Typer(no_args_is_help=True, help="The winners that are kept on disk.")
app.add_typer(cache_app, name="cache")


def main() -> None:
    """Run the command line."""
    app(prog_name="dist-autotune")


@app.command()
def report(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help=f"Log directory. Default: {settings.LOG_DIR}, else {settings.log_directory_default}."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained HTML file instead.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show every session, not the newest of each function.")
    ] = False,
) -> None:
    """Show what the logs tell: winners, spread over ranks, stragglers, what each rank alone would choose."""
    with _one_line_errors():
        if directory is None:
            directory = settings.Options().resolved_log_dir() or Path(settings.log_directory_default)
        found = _load(directory)
        shown = found.sessions if every else found.newest()
        if html is None:
            terminal.print_history(terminal.open_console(), found, shown)
            return
        try:
            html_report.write_html(html, found, shown)
        except ImportError as error:
            _fail(f"The HTML report needs matplotlib ({error}): pip install matplotlib")
        typer.echo(f"Wrote {html}")


@app.command("doctor")
def examine_machine(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Look at versions, GPUs, links, symmetric memory, ranks and settings.

    The exit code is 1 if something that is needed does not work.
    """
    from . import doctor, doctor_tables, examination  # they and what they import serve this command alone

    with _one_line_errors():
        with terminal.busy("Trying ranks, GPUs and links"):
            seen = examination.examine()
        findings = doctor.judge(seen)
        if as_json:
            typer.echo(to_json(doctor.as_dict(seen, findings), indent=True))
        else:
            console = terminal.open_console()
            for table in doctor_tables.doctor_tables(seen, findings):
                terminal.print_table(console, table)
            terminal.print_text(console, "")
            for line in doctor_tables.next_steps(findings):
                terminal.print_text(console, line, "bold")
        if not doctor.is_healthy(findings):
            raise typer.Exit(1)


@cache_app.command("list")
def list_entries() -> None:
    """List the winners: one row per kernel, key and machine."""
    with _one_line_errors():
        cache = _open_cache()
        entries = list(cache.entries())
        if not entries:
            typer.echo(f"No entries in {cache.directory}. A tuned function stores its winners there.")
            return
        names = columns("digest", "kernel", "key", "winner", ">ms", "device", ">ranks", "created (UTC)")
        rows = tuple(_row(entry) for entry in entries)
        terminal.print_table(
            terminal.open_console(), Table(f"{_entries(len(rows))} in {cache.directory}", names, rows)
        )


@cache_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A kernel's name, or the first digits of a digest.")],
) -> None:
    """Print the entries of a kernel, or of a digest, as JSON."""
    with _one_line_errors():
        cache = _open_cache()
        found = [
            each for each in cache.entries() if each.key.kernel == name or each.key.digest.startswith(name)
        ]
        if not found:
            _fail(
                f"No entry of {name!r} in {cache.directory}: `dist-autotune cache list` shows what there is."
            )
        for entry in found:
            typer.echo(f"{cache.directory}/{entry.key.file_name}", err=True)  # the output stays pure JSON
            typer.echo(to_json(entry.as_dict(), indent=True))


@cache_app.command()
def clear(yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Delete all entries."""
    with _one_line_errors():
        cache = _open_cache()
        if not yes:
            typer.confirm(f"Delete all entries in {cache.directory}?", abort=True)
        typer.echo(f"Deleted {_entries(cache.clear())} in {cache.directory}")


@cache_app.command("export")
def export_entries(path: Annotated[Path, typer.Argument(help="The file to write.")]) -> None:
    """Write all entries to one file, for another machine of the same kind."""
    with _one_line_errors():
        cache = _open_cache()
        count = cache.export(path)
        typer.echo(f"Exported {_entries(count)} of {cache.directory} to {path}")


@cache_app.command("import")
def import_entries(path: Annotated[Path, typer.Argument(help="A file that `cache export` wrote.")]) -> None:
    """Store the entries of an exported file; they replace others of the same key."""
    with _one_line_errors():
        cache = _open_cache()
        try:
            count = cache.import_(path)
        except ValueError as error:
            _fail(f"{path}: {error}. Give a file that `dist-autotune cache export` wrote.")
        typer.echo(f"Imported {_entries(count)} into {cache.directory}")


def _load(directory: Path) -> History:
    """Return the history of `directory`, or end with what to do when there is none."""
    advice = "Call a decorated function first, or name the log_dir it writes to: dist-autotune report DIR"
    if not directory.is_dir():
        _fail(f"There is no directory {directory}. {advice}")
    found = history.load(directory)
    if not found.sessions:
        lines = sum(reasons.total() for reasons in found.skipped.values())
        what = f"only {counted(lines, 'line')} that cannot be read" if lines else "no records (rank-N.jsonl)"
        _fail(f"{directory} holds {what}. {advice}")
    return found


def _open_cache() -> DiskCache:
    return DiskCache(settings.cache_directory())


def _entries(count: int) -> str:
    return counted(count, "entry", "entries")


def _row(entry: Entry) -> tuple[str, ...]:
    key = entry.key
    machine = key.device, str(key.world_size), entry.created_at
    return (key.digest[:8], key.kernel, key.key, entry.config, format_ms(entry.ms), *machine)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn errors and cache warnings of the package and the system into one line each on stderr."""

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        try:
            yield
        except (TuningError, OSError) as error:
            _fail(str(error))
        finally:
            for warning in caught:
                typer.echo(str(warning.message), err=True)


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)
