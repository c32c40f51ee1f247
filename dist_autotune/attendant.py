"""A thread that acts for a rank whose own thread is busy: with compiling, or in the user's function."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .board import BoardLost, End
from .line import HubLost, HubSilent, Line


@dataclass(frozen=True)
class Watch:
    """One run of the user's function, and what to do when the peers have gone on without it."""

    sequence: int  # of the exchange at the end of the run
    what: str
    timeout_s: float
    on_stuck: str
    tell: Callable[[str], None]
    began: float


class Attendant:
    """Beats while this rank compiles; watches whether peers have failed while it runs the user's function.

    The thread starts when first needed and looks once a heartbeat, so shorter calls cost it nothing.
    """

    def __init__(self, rank: int, heartbeat_s: float, new_line: Callable[[], Line | None]) -> None:
        self._rank = rank
        self._heartbeat_s = heartbeat_s
        self._new_line = new_line
        self._thread: threading.Thread | None = None
        self._beats_at: int | None = None
        self._watch: Watch | None = None
        self._told: Watch | None = None
        self._told_at = 0.0

    @contextlib.contextmanager
    def beating(self, sequence: int) -> Iterator[None]:
        """Send heartbeats for an exchange while the block runs."""
        self._start()
        self._beats_at = sequence
        try:
            yield
        finally:
            self._beats_at = None

    @contextlib.contextmanager
    def watching(
        self, sequence: int, what: str, timeout_s: float, on_stuck: str, tell: Callable[[str], None]
    ) -> Iterator[None]:
        """Watch while the block runs; see `Agreement.running`."""
        self._start()
        self._watch = Watch(sequence, what, timeout_s, on_stuck, tell, time.monotonic())
        try:
            yield
        finally:
            self._watch = self._told = None

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._attend, name="dist_autotune attendant", daemon=True)
            self._thread.start()

    def _attend(self) -> None:
        line: Line | None = None
        while True:
            time.sleep(self._heartbeat_s)
            beats_at, watch = self._beats_at, self._watch
            if watch is not None and time.monotonic() - watch.began < self._heartbeat_s:
                watch = None
            if beats_at is None and watch is None:
                continue
            try:
                line = line or self._new_line()
                if line is not None and beats_at is not None:
                    line.tell("beat", beats_at)
                if line is not None and watch is not None:
                    self._look(watch, line)
            except (BoardLost, HubLost, HubSilent):
                line = None

    def _look(self, watch: Watch, line: Line) -> None:
        """Say once that the peers have gone on without this rank; later, if so asked, end the process."""
        if watch is not self._told:
            reply = line.receive(line.send("look", watch.sequence), self._heartbeat_s)
            if reply is None or reply["end"] is None or self._watch is not watch:
                return
            self._told, self._told_at = watch, time.monotonic()
            watch.tell(self._diagnosis(watch, reply["end"]))
        elif watch.on_stuck == "abort" and time.monotonic() - self._told_at > watch.timeout_s:
            watch.tell(f"Rank {self._rank} is ended: it is still in {watch.what} (on_stuck='abort').")
            with contextlib.suppress(Exception):  # stderr may be no file
                faulthandler.dump_traceback(sys.stderr)
            if self._watch is watch:
                os._exit(1)

    def _diagnosis(self, watch: Watch, end: End) -> str:
        if "failed" in end:
            what = f"rank {end['failed']} has failed ({end['error']})"
        else:
            what = "the peers have waited too long and gone on without it"
        if watch.on_stuck == "abort":
            then = f"if it is still there in {watch.timeout_s:g} s, its process is ended (on_stuck='abort')."
        else:
            then = "nothing here can release it (on_stuck='abort' would end its process)."
        return (
            f"Rank {self._rank} is still in {watch.what}, but {what}. If it waits for a peer in a collective "
            f"of its own, {then}"
        )
