"""A bundle: winners with their evidence in one JSON file, to be carried to other machines.

A file is read whole and checked before anything of it is stored.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from ..codec import parse, to_json
from ..version import __version__
from .winners import IMPORTED, MAX_BYTES, SCHEMA_VERSION, Entry, Winners, read_bounded, replace_whole

BUNDLE_VERSION = 1  # raise it when fields beside the entries change their meaning


class Bundle(Struct, frozen=True, kw_only=True):
    """The contents of a file."""

    bundle: int
    schema: int = SCHEMA_VERSION
    package_version: str = __version__
    exported_at: str = ""  # wall clock, ISO 8601, UTC: for people
    entries: tuple[Entry, ...]


def write(path: Path, entries: Iterable[Entry], *, replaces: bool) -> None:
    """Write entries to a bundle.

    Raises FileExistsError unless it `replaces` a file that is there, ValueError for more than a bundle holds.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    bundle = Bundle(bundle=BUNDLE_VERSION, exported_at=now, entries=tuple(entries))
    content = to_json(bundle, indent=True) + "\n"
    if len(content.encode()) > MAX_BYTES:
        raise ValueError(f"{len(bundle.entries)} entries: more than a bundle's {MAX_BYTES} bytes")
    write_whole(path, content, replaces=replaces)


def write_whole(path: Path, content: str, *, replaces: bool) -> None:
    """Write a file atomically.

    Raises FileExistsError for an existing file unless it `replaces` one, IsADirectoryError for a directory,
    FileNotFoundError without a parent directory.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: {path.parent} is no directory; make it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name a file in it, such as {path / 'winners.json'}")
    if path.exists() and not replaces:
        raise FileExistsError(f"{path} is there already: --replace writes over it")
    replace_whole(path, f".{path.name}.{os.urandom(4).hex()}.tmp", content)


def read(path: Path) -> list[Entry]:
    """Return the entries of a bundle; a ValueError says what is wrong with it, and with which entry."""
    bundle = parse(read_bounded(path, MAX_BYTES), Bundle, SCHEMA_VERSION)
    if bundle.bundle != BUNDLE_VERSION:
        raise ValueError(f"not a bundle of version {BUNDLE_VERSION}: bundle={bundle.bundle!r}")
    entries: dict[str, Entry] = {}
    for number, entry in enumerate(bundle.entries):
        if entry.key.digest in entries:
            raise ValueError(f"entry {number}: a second one for {entry.title}")
        entries[entry.key.digest] = entry
    return list(entries.values())


def merge(winners: Winners, entries: Sequence[Entry], *, replaces: bool) -> tuple[int, list[Entry]]:
    """Store the entries of a bundle; return the number of new ones, and those with another winner.

    Another result that the cache has stays, unless this `replaces` it. Raises OSError if one is not stored.
    """
    stored = [winners.get(entry.key) for entry in entries]
    winners.put(*entries, replaces=replaces)
    for entry in entries:
        if winners.get(entry.key) is None:
            raise OSError(f"{entry.title} could not be stored in {winners.directory}")
        winners.record_launch(IMPORTED, entry.key)
    pairs = zip(stored, entries, strict=True)
    conflicts = [new for old, new in pairs if old is not None and old.winner != new.winner]
    return stored.count(None), conflicts
