"""What a session is about to try, on disk before it is tried; and what it takes to go on after a crash.

One file per session under way: what the ranks said of each run, this rank's own samples, what the next run
tries; its first line says what the process is doing now. Files are never shared: two processes of the same
rank number write two, and after a restart each takes up an orphan of its own.

Whatever is wrong with a file or with the directory is a `CacheWarning`, and tuning goes on without a journal.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..codec import digest
from ..errors import CacheWarning
from ..search.unfinished import Event
from .journal_file import JournalFile
from .orphans import IDLE, RUNNING, SCHEMA_VERSION, Orphan, adopt, first_line, journals_in, read_into

MAX_AGE_S = 24 * 3600.0  # what a machine measured longer ago is not comparable: clocks, drivers, neighbours


@dataclass(frozen=True)
class Try:
    """A candidate on trial."""

    candidate: str
    text: str  # kernel, key and config, for people


class Journal:
    """The journal of one tuned function on this rank; without a directory nothing is written or found.

    complain: told, as (directory, reason), what keeps it from being written.
    """

    def __init__(
        self,
        directory: Path | None,
        identity: dict[str, str],
        name: str,
        rank: int,
        complain: Callable[[Path, str], None],
    ) -> None:
        self.orphan: Orphan | None = None
        self._rank = rank
        self._identity = identity
        readable = re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:80] or "_"
        self._stem = f"{readable}-{digest(json.dumps(identity, sort_keys=True))}-rank-{rank}"
        self._file = JournalFile(directory, self._stem, complain)
        self._has_looked = False
        self._lock = threading.RLock()
        self.is_dropped = False
        self._run = 0
        self._tries: dict[str, Try] = {}
        self.mark = IDLE

    # -- what an earlier process has left ------------------------------------------------------------------

    def look(self) -> Orphan | None:
        """Return the newest orphan of this function and rank, once; delete what is too old."""
        if self._file.directory is None or self._has_looked or not self._file.is_own:
            return self.orphan
        self._has_looked = True
        for path, age_s in journals_in(self._file.directory).items():
            is_too_old = age_s > MAX_AGE_S
            is_wanted = self.orphan is None and path.name.startswith(f"{self._stem}-")
            # Others are not even looked at: they would not be had, for that moment, by those who want them.
            orphan = adopt(path) if is_too_old or is_wanted else None
            if orphan is not None and is_too_old:
                orphan.remove()
            elif orphan is not None:
                self.orphan = self._readable(orphan)
        return self.orphan

    def _readable(self, orphan: Orphan) -> Orphan | None:
        try:
            read_into(orphan, self._rank)
        except (OSError, ValueError) as error:
            orphan.remove()
            text = f"Ignored and deleted {orphan.path}: {error}. Tuning does not go on where it was left."
            warnings.warn(text, CacheWarning, stacklevel=2)
            return None
        return orphan

    # -- one session ---------------------------------------------------------------------------------------

    def begin(self, session: str, devices: str, taken_up: list[Event] | None = None) -> None:
        """Begin a session: on its own, or with what an orphan, or those of the peers, have left.

        One that follows a session of this process which was not dropped goes on in the same file.
        """
        if taken_up is not None or self.is_dropped or self._file.is_empty:
            self.discard(keeps_orphan=True)
            self.is_dropped = False
            self._file.write({"schema": SCHEMA_VERSION, "session": session, "identity": self._identity})
            for event in taken_up or ():
                self._file.write(event)
            if taken_up is not None and self.orphan is not None:
                self._file.write({"samples": self.orphan.samples, "entries": self.orphan.entries})
        line = {"session": session, "devices": devices}
        self._file.write(line if taken_up else {**line, "open": session})

    def run(self, run: int, tries: dict[str, Try]) -> None:
        """Say what the next run tries, before it begins."""
        self._run, self._tries = run, tries
        if tries:
            self._write_tries()
            self._set_mark(RUNNING)

    def launching(self, context: str, tried: Try) -> None:
        """Say that a launch of a candidate on trial begins; threads may say so at once."""
        if not self._file.is_own:  # and another thread of the parent may have had the lock at the fork
            return
        with self._lock:
            if self._tries.get(context) != tried:  # a kernel that is new in this run
                self._tries[context] = tried
                self._write_tries()
            self._set_mark(context)

    def launched(self) -> None:
        """Say that it has returned."""
        self._set_mark(RUNNING)

    @contextlib.contextmanager
    def aside(self, context: str, tried: Try) -> Iterator[None]:
        """Say that a candidate is at work, and none of those of the run, while the block runs."""
        tries, mark = self._tries, self.mark
        self._tries = {}
        self.launching(context, tried)
        try:
            yield
        finally:
            self._tries = tries
            self._write_tries()
            self._set_mark(mark)

    def ran(self) -> None:
        """Say that the run is over, in whatever way: what ends the process from here on is no candidate's."""
        if self.mark != IDLE:
            self._set_mark(IDLE)

    def failed(self) -> None:
        """Say that this rank leaves the run with an exception: that peers are killed for it blames nobody."""
        self.ran()
        if self._file.exists:
            self._file.write({"failed": self._run})

    def agreed(self, merged: dict[str, Any], own: dict[str, Any], entries: dict[str, str]) -> None:
        """Keep what the ranks said of a run and what this rank measured in it."""
        if not self._file.exists and self.orphan is not None:  # nothing is tried: only plans are compared
            self._create()
        self._file.write({"merged": merged, "own": own, "entries": entries})

    def drop(self) -> None:
        """Leave the file to the next process: the next session of this one starts anew."""
        self.is_dropped = True

    def discard(self, *, keeps_orphan: bool = False) -> None:
        """Forget everything: the search has ended, or begins anew."""
        if not self._file.is_own:
            return
        self._file.remove()
        if self.orphan is not None and not keeps_orphan:
            self.orphan.remove()
            self.orphan = None
        if self._file.directory is not None:
            with contextlib.suppress(OSError):
                self._file.directory.rmdir()  # if it is empty

    # -- what is written -----------------------------------------------------------------------------------

    def _write_tries(self) -> None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        tries = {context: vars(tried) for context, tried in self._tries.items()}
        line = {"run": self._run, "at": now, "tries": tries}
        if not self._file.exists:
            self._create()
        self._file.write(line)

    def _set_mark(self, mark: str) -> None:
        self.mark = mark
        if self._file.exists and self._file.is_own:
            with self._lock:
                self._file.overwrite_first(first_line(mark, self._run))

    def _create(self) -> None:
        """Make the file, with all that was said so far; then the orphan is no longer needed."""
        if self._file.create(first_line(self.mark, self._run)) and self.orphan is not None:
            self.orphan.remove()
            self.orphan = None
