"""The commands `dist-autotune cache ...`: the winners on disk, and the crash guards beside them."""

from __future__ import annotations

import enum
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from .. import settings
from ..codec import to_builtins, to_json
from ..formatting import config_label, counted, format_ms
from ..storage import bundle, other_formats
from ..storage.crash_guard import remove_abandoned
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
        if _is_named(entry.key.kernel, kernels) and device in entry.key.device
    ]


def _is_named(kernel: str, parts: list[str] | None) -> bool:
    return not parts or any(part in kernel for part in parts)


@app.command("list")
def list_entries(
    kernels: Kernels = None,
    device: Device = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """List the winners: one row per kernel, key and machine."""
    cache = _open_cache()
    entries = _chosen(cache, kernels, device)
    if as_json:
        listed = [{"digest": each.key.digest, **to_builtins(each)} for each in entries]
        typer.echo(to_json({"directory": str(cache.directory), "entries": listed}, indent=True))
    elif entries:
        title = f"{_entries(len(entries))} in {cache.directory}"
        terminal.open_console().print(_table(title, entries))
    elif kernels or device:
        terminal.echo(f"No such entries in {cache.directory}: `dist-autotune cache list` lists all.")
    else:
        terminal.echo(f"No entries in {cache.directory}. A tuned function stores its winners there.")


def _table(title: str, entries: list[Entry]) -> Group:
    """Return one row per entry."""
    names = ("digest", ">ms", "device", ">ranks", "created (UTC)", "kernel and winner")
    rows = []
    for entry in entries:
        key, created = entry.key, entry.created_at[:16].replace("T", " ")
        figures = key.digest[:8], format_ms(entry.ms), key.device, str(key.world_size), created
        rows.append((*figures, stacked(entry.title, config_label(entry.config))))
    return table(title, names, rows)


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
        terminal.echo(f"{cache.directory}/{entry.key.file_name}", err=True)  # the output stays pure JSON
        typer.echo(to_json(entry, indent=True))


@app.command()
def clear(yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Delete all entries, and the crash guards of processes that are gone."""
    cache = _open_cache()
    if not yes:
        typer.confirm(f"Delete all entries in {cache.directory}?", abort=True)
    assert cache.directory is not None
    count = remove_abandoned(cache.directory)
    guards = f" and {counted(count, 'crash guard')}" if count else ""
    terminal.echo(f"Deleted {_entries(cache.clear())}{guards} in {cache.directory}")


class Format(enum.StrEnum):
    """The files that `cache export` can write."""

    bundle = "bundle"
    triton = "triton"
    fla = "fla"
    vllm = "vllm"


HOW_TO_USE = {
    "triton": "Set TRITON_CACHE_DIR={path}, or copy its folders into Triton's cache.",
    "fla": "Set FLA_CONFIG_DIR={path} and FLA_CACHE_MODE=strict.",
    "vllm": "Set VLLM_TUNED_CONFIG_FOLDER={path}; for SGLang copy the files to its configs of this Triton.",
}


@app.command("export")
def export_entries(
    path: Annotated[Path, typer.Argument(help="The file to write; for other tools a directory.")],
    format_name: Annotated[Format, typer.Option("--format", help="What is to be written.")] = Format.bundle,
    kernels: Kernels = None,
    device: Device = "",
    replace: Annotated[bool, typer.Option("--replace", help="Write over files that are there.")] = False,
) -> None:
    """Write winners with their evidence to a bundle, or as files of other tools."""
    cache = _open_cache()
    entries = _chosen(cache, kernels, device)
    if not entries:
        terminal.fail(f"No such entries in {cache.directory}: `dist-autotune cache list` lists all.")
    if format_name is Format.bundle:
        try:
            bundle.write(path, entries, replaces=replace)
        except ValueError as error:
            terminal.fail(f"{error}. Choose kernels by --kernel.")
        terminal.echo(f"Exported {_entries(len(entries))} of {cache.directory} to {path}")
    else:
        _export_files(path, entries, format_name.value, replaces=replace)


def _export_files(path: Path, entries: list[Entry], format_name: str, *, replaces: bool) -> None:
    """Write the files of another tool into a directory; name the entries left out."""
    devices = sorted({entry.key.device for entry in entries})
    if len(devices) > 1:
        terminal.fail(f"The entries are of several devices, {', '.join(devices)}: choose one by --device.")
    files = other_formats.files_of(entries, format_name)
    for entry, reason in files.left_out:
        terminal.echo(f"Left out {entry.title}: {reason}", err=True)
    texts = {path / name: text for name, text in files.texts().items()}
    if not texts:
        terminal.fail(f"Nothing can be written as --format {format_name}.")
    there = [str(file) for file in texts if file.exists()]
    if there and not replaces:
        terminal.fail(f"{there[0]} is there already, {len(there)} in all: --replace writes over them.")
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        bundle.write_whole(file, text, replaces=True)
    written = f"{counted(len(texts), 'file')} for {_entries(files.written)}"
    terminal.echo(f"Wrote {written} to {path}. {HOW_TO_USE[format_name].format(path=path)}")


@app.command("import")
def import_entries(
    path: Annotated[Path, typer.Argument(help="A bundle that `cache export` wrote.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Where results differ, take those of the bundle.")
    ] = False,
    any_hardware: Annotated[
        bool, typer.Option("--any-hardware", help="Store entries for other devices than this machine's, too.")
    ] = False,
) -> None:
    """Add the entries of a bundle to the cache; where results differ, those of the cache stay."""
    from ..storage.device import Device  # it imports torch, which serves this command alone

    cache = _open_cache()
    try:
        entries = bundle.read(path)
    except ValueError as error:
        terminal.fail(f"{path}: {error}. Give a file that `dist-autotune cache export` wrote.")
    here = Device.current()
    hardware = _hardware(here.name, here.capability)
    others = Counter(_hardware(entry.key.device, entry.key.capability) for entry in entries)
    del others[hardware]
    if others and not any_hardware:
        count = f"{others.total()} of {_entries(len(entries))}"
        text = f"{path}: {count} not for this machine, which has {hardware}, but for "
        text += f"{', '.join(sorted(others))}. --any-hardware stores them, too."
        if others.total() == len(entries):
            terminal.fail(text)
        terminal.echo(text, err=True)
        entries = [e for e in entries if _hardware(e.key.device, e.key.capability) == hardware]
    _report_import(cache, bundle.merge(cache, entries, replaces=replace), replaces=replace)
    _report_old(entries, here.driver)


def _report_import(cache: Winners, merged: bundle.ImportResult, *, replaces: bool) -> None:
    """Print how many entries were added, and for each conflict which one was kept."""
    differing = f"{len(merged.conflicts)} with another winner"
    terminal.echo(f"Imported into {cache.directory}: {merged.added} new, {merged.same} as there, {differing}")
    for old, new in merged.conflicts:
        kept, other = (new, old) if replaces else (old, new)
        advice = "" if replaces else "; --replace takes that of the bundle"
        terminal.echo(f"{old.title}: kept {_winner(kept)}, not {_winner(other)}{advice}")
    if merged.missing:
        terminal.fail(f"{_entries(merged.missing)} could not be stored.")


def _report_old(entries: list[Entry], driver: str) -> None:
    """Say how many entries are of another Triton or driver: sessions here race their best again."""
    import triton

    versions = Counter((entry.key.triton_version, entry.key.driver) for entry in entries)
    here = triton.__version__, driver
    for there, count in versions.items():
        if there != here:
            names = [f"Triton {version}, driver {of or 'unknown'}" for version, of in (there, here)]
            terminal.echo(
                f"{_entries(count)} tuned with {names[0]}; here are {names[1]}: the three best of each are "
                "raced again, and strict refuses its key until then",
                err=True,
            )


def _hardware(device: str, capability: str) -> str:
    return f"{device} {capability}".strip()


def _winner(entry: Entry) -> str:
    facts = [f"{format_ms(entry.ms)} ms", entry.created_at or "undated"]
    return f"{config_label(entry.config)} ({', '.join(facts)})"


def _open_cache() -> Winners:
    directory = settings.cache_directory()
    return Winners(directory) if directory is not None else terminal.fail(f"No cache: {settings.NO_HOME}.")


def _entries(count: int) -> str:
    return counted(count, "entry", "entries")
