"""The commands `dist-autotune cache ...`: the winners on disk, and the crash guards beside them."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import asdict

from .. import settings
from ..codec import to_json
from ..formatting import config_label, counted, format_ms
from ..storage import bundle
from ..storage.crash_guard import remove_abandoned
from ..storage.stock_files import stock_files
from ..storage.winners import Entry, Winners
from ..tables import stacked, table
from . import terminal

app = typer.Typer(no_args_is_help=True, help="The winners that are kept on disk.")


Kernels = Annotated[
    list[str] | None, typer.Option("--kernel", help="Only kernels with this in their name; may be repeated.")
]
Device = Annotated[str, typer.Option("--device", help="Only those of this device: a part of its name.")]


def _chosen(cache: Winners, kernels: list[str] | None, device: str) -> list[Entry]:
    return [
        entry
        for entry in cache.entries()
        if device in entry.key.device and (not kernels or any(part in entry.key.kernel for part in kernels))
    ]


@app.command("list")
def list_entries(kernels: Kernels = None, device: Device = "") -> None:
    """List the winners: one row per kernel, key and machine."""
    cache = _open_cache()
    entries = _chosen(cache, kernels, device)
    if entries:
        devices = {each.key.device for each in entries}
        names = ("digest", ">ms", "device", ">ranks", "created (UTC)", "kernel and winner")
        rows = [
            (
                each.key.digest[:8],
                format_ms(each.ms),
                each.key.device if len(devices) > 1 else "-",
                str(each.key.world_size),
                each.created_at[:16].replace("T", " "),
                stacked(each.title, config_label(each.config)),
            )
            for each in entries
        ]
        title = f"{_entries(len(entries))} for {', '.join(sorted(devices))} in {cache.directory}"
        terminal.open_console().print(table(title, names, rows, optional=("device",)))
    elif kernels or device:
        terminal.echo(f"No such entries in {cache.directory}: `dist-autotune cache list` lists all.")
    else:
        terminal.echo(f"No entries in {cache.directory}. A tuned function stores its winners there.")


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A part of a kernel's name, the name of a file, or the first digits of a digest."
        ),
    ],
) -> None:
    """Print entries as JSON, of each the winner first."""
    cache = _open_cache()
    found = [
        entry
        for entry in cache.entries()
        if name in entry.key.kernel or name == entry.key.file_name or entry.key.digest.startswith(name)
    ]
    if not found:
        terminal.fail(f"No entry of {name!r} in {cache.directory}: `dist-autotune cache list` lists all.")
    for entry in found:
        terminal.echo(f"{cache.directory}/{entry.key.file_name}", err=True)  # the output stays pure JSON
        fields = asdict(entry)
        first = {name: fields.pop(name) for name in ("config", "ms")}
        typer.echo(to_json({**first, **fields}, indent=True))


@app.command()
def clear(
    kernels: Kernels = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete entries: the chosen ones, or all, damaged ones too, and the crash guards of ended processes."""
    cache = _open_cache()
    assert cache.directory is not None
    chosen = _chosen(cache, kernels, "") if kernels else None
    if not yes and chosen != []:
        what = "all entries" if chosen is None else _entries(len(chosen))
        typer.confirm(f"Delete {what} in {cache.directory}?", abort=True)
    if chosen is None:
        guards, count = remove_abandoned(cache.directory), cache.clear()
    else:
        guards, count = 0, cache.remove(chosen)
    also = f" and {counted(guards, 'crash guard')}" if guards else ""
    terminal.echo(f"Deleted {_entries(count)}{also} in {cache.directory}")


class Format(enum.StrEnum):
    """The files that `cache export` can write."""

    bundle = "bundle"
    triton = "triton"


@app.command("export")
def export_entries(
    path: Annotated[Path, typer.Argument(help="The file to write; for stock Triton a directory.")],
    format_name: Annotated[Format, typer.Option("--format", help="What is to be written.")] = Format.bundle,
    kernels: Kernels = None,
    device: Device = "",
    replace: Annotated[bool, typer.Option("--replace", help="Write over files that are there.")] = False,
) -> None:
    """Write winners with their evidence to a bundle, or as the files of stock Triton."""
    cache = _open_cache()
    entries = _chosen(cache, kernels, device)
    if not entries:
        terminal.fail(f"No such entries in {cache.directory}: `dist-autotune cache list` lists all.")
    if format_name is Format.triton:
        _export_files(path, entries, replaces=replace)
        return
    try:
        bundle.write(path, entries, replaces=replace)
    except ValueError as error:
        terminal.fail(f"{error}. Choose kernels by --kernel.")
    terminal.echo(f"Exported {_entries(len(entries))} of {cache.directory} to {path}")


def _export_files(path: Path, entries: list[Entry], *, replaces: bool) -> None:
    """Write the files of stock Triton into a directory; name the entries left out."""
    devices = sorted({entry.key.device for entry in entries})
    if len(devices) > 1:
        terminal.fail(f"The entries are of several devices, {', '.join(devices)}: choose one by --device.")
    contents, left_out = stock_files(entries)
    for entry, reason in left_out:
        terminal.echo(f"Left out {entry.title}: {reason}", err=True)
    if not contents:
        terminal.fail("Nothing can be written as --format triton.")
    there = [str(path / name) for name in contents if (path / name).exists()]
    if there and not replaces:
        terminal.fail(f"{there[0]} is there already, {len(there)} in all: --replace writes over them.")
    for name, content in contents.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        bundle.write_whole(path / name, content, replaces=True)
    written = f"{counted(len(contents), 'file')} for {_entries(len(contents))}"
    terminal.echo(
        f"Wrote {written} to {path}. Set TRITON_CACHE_DIR={path}, or copy its folders into Triton's cache."
    )


@app.command("import")
def import_entries(
    path: Annotated[Path, typer.Argument(help="A bundle that `cache export` wrote.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Where results differ, take those of the bundle.")
    ] = False,
) -> None:
    """Add the entries of a bundle to the cache; where results differ, those of the cache stay."""
    from ..storage.scope import Device  # it imports torch, which serves this command alone

    cache = _open_cache()
    try:
        entries = bundle.read(path)
    except FileNotFoundError:
        terminal.fail(f"There is no file {path}: `dist-autotune cache export FILE` writes one.")
    except ValueError as error:
        terminal.fail(f"{path}: {error}. Give a file that `dist-autotune cache export` wrote.")
    added, conflicts = bundle.merge(cache, entries, replaces=replace)
    same = len(entries) - added - len(conflicts)
    counts = f"{added} new, {same} as there, {len(conflicts)} with another winner"
    terminal.echo(f"Imported into {cache.directory}: {counts}")
    for entry in conflicts:
        config = config_label(entry.config)
        done = f"took {config}" if replace else f"kept the cache's; --replace takes {config}"
        terminal.echo(f"{entry.title}: {done}")
    here = Device.current()
    others = [e for e in entries if (e.key.device, e.key.capability) != (here.name, here.capability)]
    if others:
        devices = ", ".join(sorted({f"{each.key.device} {each.key.capability}" for each in others}))
        count = f"{len(others)} of {_entries(len(entries))}"
        terminal.echo(f"{count} not for this machine, which has {here.text}, but for {devices}", err=True)


def _open_cache() -> Winners:
    directory = settings.cache_directory()
    return Winners(directory) if directory is not None else terminal.fail(f"No cache: {settings.NO_HOME}.")


def _entries(count: int) -> str:
    return counted(count, "entry", "entries")
