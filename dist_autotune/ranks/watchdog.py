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

from .client import Client, HubLost, HubSilent
from .store import End, StoreLost

HEARTBEAT_S = 1.0
PATIENCE = 10  # a rank that compiles extends its deadline at most this many times


@dataclass(frozen=True)
class Watch:
    """One run of the user's function, and what to do when the peers have gone on without it."""

    sequence: int  # of the exchange at the end of the run
    what: str
    timeout_s: float
    on_stuck: str
    tell: Callable[[str], None]
    began: float
    whereabouts: Callable[[], str] | None = None  # what the run is at; None: it may take as long as it likes


class Watchdog:
    """Beats while this rank compiles; watches a run of the user's function: what becomes of it, and of peers.

    The thread starts when first needed and looks once a heartbeat, so shorter calls cost it nothing. A forked
    child has no such thread and starts its own.
    """

    def __init__(self, rank: int, heartbeat_s: float, new_line: Callable[[], Client | None]) -> None:
        self._rank = rank
        self._heartbeat_s = heartbeat_s
        self._new_line = new_line
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._beats_at: int | None = None
        self._watch: Watch | None = None
        self._told: Watch | None = None
        self._told_at = 0.0
        self._missed: Watch | None = None  # the run that was told to take too long
        self._compiling_since: float | None = None
        self._compiled_s = 0.0  # in the run under way

    @contextlib.contextmanager
    def beating(self, sequence: int) -> Iterator[None]:
        """Send heartbeats for an exchange while the block runs."""
        self._start()
        began = time.monotonic()
        self._beats_at, self._compiling_since = sequence, began
        try:
            yield
        finally:
            self._beats_at = self._compiling_since = None
            self._compiled_s += time.monotonic() - began

    @contextlib.contextmanager
    def watching(
        self,
        sequence: int,
        what: str,
        timeout_s: float,
        on_stuck: str,
        tell: Callable[[str], None],
        whereabouts: Callable[[], str] | None = None,
    ) -> Iterator[None]:
        """Watch while the block runs; see `RankGroup.running`."""
        self._start()
        self._compiled_s = 0.0
        self._watch = Watch(sequence, what, timeout_s, on_stuck, tell, time.monotonic(), whereabouts)
        try:
            yield
        finally:
            self._watch = self._told = self._missed = None

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._attend, name="dist_autotune attendant", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread at its next look. Takes no lock: a garbage collector may call it, on any thread."""
        self._is_closed = True

    def _attend(self) -> None:
        line: Client | None = None
        while True:
            time.sleep(self._heartbeat_s)
            if self._is_closed:
                break
            beats_at, watch = self._beats_at, self._watch
            if watch is not None and time.monotonic() - watch.began < self._heartbeat_s:
                watch = None
            if beats_at is None and watch is None:
                continue
            if watch is not None:
                self._look_at_own(watch)
            try:
                line = line or self._new_line()
                if line is not None and beats_at is not None:
                    line.tell("beat", beats_at)
                if line is not None and watch is not None:
                    self._look(watch, line)
            except (StoreLost, HubLost, HubSilent):
                line = None
        if line is not None:
            line.close()

    def _look(self, watch: Watch, line: Client) -> None:
        """Say once that the peers have gone on without this rank; later, if so asked, end the process."""
        if watch is not self._told:
            reply = line.receive(line.send("look", watch.sequence), self._heartbeat_s)
            if reply is None or reply["end"] is None or self._watch is not watch:
                return
            self._told, self._told_at = watch, time.monotonic()
            watch.tell(self._diagnosis(watch, reply["end"]))
        elif watch.on_stuck == "abort" and time.monotonic() - self._told_at > watch.timeout_s:
            self._abort(watch)

    def _look_at_own(self, watch: Watch) -> None:
        """Say once that a run takes longer than its time-out, whatever the peers do; later, if asked, end it.

        Time in which this rank compiles does not count, up to `PATIENCE` times the time-out.
        """
        if watch.whereabouts is None or watch is self._told:
            return
        now, since = time.monotonic(), self._compiling_since
        compiled_s = self._compiled_s + (0.0 if since is None else now - since)
        over_s = now - watch.began - min(compiled_s, (PATIENCE - 1) * watch.timeout_s) - watch.timeout_s
        if over_s > 0 and watch is not self._missed:
            self._missed = watch
            watch.tell(
                f"Rank {self._rank} has been in {watch.what} for {now - watch.began:.3g} s. "
                f"{_whereabouts(watch)}If it never ends, {self._then(watch)}"
            )
        elif over_s > watch.timeout_s and watch.on_stuck == "abort":
            self._abort(watch)

    def _abort(self, watch: Watch) -> None:
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
        return (
            f"Rank {self._rank} is still in {watch.what}, but {what}. {_whereabouts(watch)}"
            f"If it waits for a peer in a collective of its own, {self._then(watch)}"
        )

    @staticmethod
    def _then(watch: Watch) -> str:
        if watch.on_stuck == "abort":
            return f"if it is still there in {watch.timeout_s:g} s, its process is ended (on_stuck='abort')."
        return "nothing here can release it (on_stuck='abort' would end its process)."


def _whereabouts(watch: Watch) -> str:
    """Return what the run is at, as sentences. A device that cannot be asked must not end the thread."""
    if watch.whereabouts is None:
        return ""
    try:
        return watch.whereabouts()
    except Exception as error:
        return f"What it is at cannot be told ({type(error).__name__}: {error}). "
