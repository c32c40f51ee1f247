"""The contexts that were launched and have no winner yet: one small file each in the cache."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ..codec import from_json, parse_json, to_json
from ..formatting import context_label
from ..regular_files import read_bounded
from .winners import SCHEMA_VERSION, WAITING, EntryKey, safe_name

_MOST_BYTES = 1 << 20


class Waiting(Struct, frozen=True):
    """A context without a winner, and who launched it."""

    title: str  # `kernel[key]`
    kernel: str
    device: str
    constants: str
    world_size: int
    function: str
    since: str  # ISO 8601, UTC: when the first process launched it
    schema: int = SCHEMA_VERSION

    def replaces(self, other: Waiting) -> bool:
        """Return whether `other` is an earlier source or an earlier set of candidates of this one."""
        return replace(self, since="") == replace(other, since="")


class WaitingContexts:
    """Those of one cache; without a directory, or one that can be written, there are none."""

    def __init__(self, directory: Path | None) -> None:
        self._cache = directory
        self._folder = None if directory is None else directory / WAITING

    def add(self, key: EntryKey, function: str) -> None:
        """Record that `function` has launched what has no winner."""
        if self._folder is None or (path := self._folder / key.file_name).exists():
            return
        title, since = context_label(key.kernel, key.key), datetime.datetime.now(datetime.UTC)
        added = Waiting(
            title, key.kernel, key.device, key.constants, key.world_size, function,
            since.isoformat(timespec="seconds"),
        )  # fmt: skip
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            for other, earlier in self._read(safe_name(key.kernel)):
                if added.replaces(earlier):
                    other.unlink(missing_ok=True)
            path.write_text(to_json(added) + "\n", "utf-8")

    def remove(self, key: EntryKey) -> None:
        """Record that it has a winner."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / key.file_name).unlink(missing_ok=True)

    def all(self) -> list[Waiting]:
        """Return those that have no entry beside them, by title."""
        assert self._cache is not None
        found = [each for path, each in self._read("*") if not (self._cache / path.name).exists()]
        return sorted(found, key=lambda each: (each.title, each.world_size, each.function))

    def _read(self, kernel: str) -> Iterator[tuple[Path, Waiting]]:
        for path in sorted(self._folder.glob(f"{kernel}-*.json")) if self._folder is not None else ():
            with contextlib.suppress(OSError, ValueError):  # half written, or of another version
                yield path, from_json(Waiting, parse_json(read_bounded(path, _MOST_BYTES), SCHEMA_VERSION))
