"""A thread that sends heartbeats while a rank compiles, and reports a rank that is stuck."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import PeerFailed, TuningError
from . import exchange
from .courier import StoreLost
from .exchange import PATIENCE

logger = logging.getLogger("dist_autotune")


@dataclass(frozen=True)
class Watch:
    """How one run is watched: its name, its limit, and who hears that it is stuck."""

    what: str  # names the run
    timeout_s: float
    on_stuck: str  # "abort": end the process another `timeout_s` after the report
    report: Callable[[str], None]
    whereabouts: Callable[[], str] | None = None  # the position of the run; None: no limit


@dataclass(eq=False)
class _Run:
    """A run of the user's function that is watched."""

    watch: Watch
    is_under_way: Callable[[], bool]
    find_failure: Callable[[], TuningError | None] = lambda: None  # of the exchange at its end
    reason: str = ""  # why peers have gone on without it
    lasted_s: float = -1.0  # a tenth of the time in which this rank compiles counts; below 0: has just begun
    end_at: float = 0.0  # when it is ended; 0: it is not reported


class Watchdog:
    """Sends heartbeats while this rank compiles, and watches the runs of the user's function.

    Its thread starts when first needed, in a forked child too, and looks once a heartbeat.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._beating = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # Of any number of threads:
        self._idle: dict[Callable[[], None], float] = {}  # between calls of a session: since when
        self._compiling: list[Callable[[], None]] = []  # a heartbeat for each block
        self._runs: list[_Run] = []

    @contextlib.contextmanager
    def beating(self, beat: Callable[[], None]) -> Iterator[None]:
        """Call `beat`, which sends a heartbeat, while the block compiles."""
        self._start()
        with self._beating:
            self._compiling.append(beat)
        beat()
        try:
            yield
        finally:
            with self._beating:  # none is sent after the block
                self._compiling.remove(beat)

    def idle(self, tell: Callable[[], None], *, is_idle: bool) -> None:
        """Call `tell` once a heartbeat from now on, unless the next call comes soon; else no longer."""
        with self._beating:  # it is not under way when this returns
            self.forget(tell)
            if is_idle:
                self._idle[tell] = time.monotonic()
        if is_idle:
            self._start()

    def forget(self, tell: Callable[[], None]) -> None:
        """Call `tell` no longer. Takes no lock: a garbage collector may call it."""
        self._idle.pop(tell, None)

    @contextlib.contextmanager
    def watching(
        self, watch: Watch, find_failure: Callable[[], TuningError | None] = lambda: None
    ) -> Iterator[None]:
        """Watch while the block runs. find_failure: returns how the exchange at its end has failed, if so."""
        run = _Run(watch, lambda: run in self._runs, find_failure)
        try:
            self._runs.append(run)
            self._start()  # a Ctrl-C may come while the thread starts
            yield
        finally:
            with contextlib.suppress(ValueError):
                self._runs.remove(run)

    def follow(self, watch: Watch, reason: str, is_stuck: Callable[[], bool]) -> None:
        """Report once that this rank stays in a run that peers have left; later, if asked, end it."""
        self._runs.append(_Run(watch, is_stuck, reason=reason))
        self._start()

    def close(self) -> None:
        """End the thread at its next look. Takes no lock: a garbage collector may call it, on any thread."""
        self._is_closed = True

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="dist_autotune watchdog", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        latest = time.monotonic()
        while not self._is_closed:
            time.sleep(exchange.HEARTBEAT_S)
            before, latest = latest, time.monotonic()
            self._beat(latest)
            self._look_at_runs(latest - before)

    # Functions of their own, so that the thread holds no run or group that has ended while it sleeps.
    def _beat(self, now: float) -> None:
        with self._beating:
            since_before = now - exchange.HEARTBEAT_S / 2
            idle = [tell for tell, since in [*self._idle.items()] if since <= since_before]
            for tell in () if self._is_closed else (*self._compiling, *idle):
                tell()

    def _look_at_runs(self, passed_s: float) -> None:
        for run in list(self._runs):
            if run.lasted_s < 0:
                run.lasted_s = 0.0
            elif not self._is_closed:
                run.lasted_s += passed_s / (PATIENCE if self._compiling else 1)
                self._look_at(run)

    def _look_at(self, run: _Run) -> None:
        """Report once that a run's peers have gone on, or that it lasts too long; later, if asked, end it."""
        watch, had_reason = run.watch, run.reason
        if not run.is_under_way():
            with contextlib.suppress(ValueError):  # its block has ended meanwhile
                self._runs.remove(run)
            return
        run.reason = run.reason or self._reason(run)
        if run.reason and not (had_reason and run.end_at):
            finding = f"is still in {watch.what}, but {run.reason}"
            self._report(run, finding, "If it waits in one of your collectives")
        elif not run.end_at and watch.whereabouts is not None and run.lasted_s > watch.timeout_s:
            finding = f"has been in {watch.what} for {run.lasted_s:.3g} s"
            self._report(run, finding, "If it never ends")
        elif run.end_at and time.monotonic() > run.end_at:
            self._abort(run)

    def _reason(self, run: _Run) -> str:
        """Return why the peers have gone on without this rank; "": they have not."""
        try:
            failure = run.find_failure()
        except StoreLost:
            return ""
        if isinstance(failure, PeerFailed):
            return f"rank {failure.rank} has failed ({failure.error})"
        return "" if failure is None else "its peers timed out and went on without it"

    def _report(self, run: _Run, finding: str, condition: str) -> None:
        """Report a finding, the position of the run, and the next step."""
        watch = run.watch
        outlook = f"if it is still there in {watch.timeout_s:g} s, its process is ended (on_stuck='abort')"
        if watch.on_stuck != "abort":
            outlook = "nothing here can release it (on_stuck='abort' would end its process)"
        try:
            where = watch.whereabouts() if watch.whereabouts is not None else ""
        except Exception as error:  # a device that cannot be asked must not end the thread
            where = f"Its position is unknown ({type(error).__name__}: {error}). "
        _tell(watch, f"Rank {self._rank} {finding}. {where}{condition}, {outlook}.")
        run.end_at = time.monotonic() + watch.timeout_s if watch.on_stuck == "abort" else math.inf

    def _abort(self, run: _Run) -> None:
        watch = run.watch
        _tell(watch, f"Rank {self._rank} ends: it is still in {watch.what} (on_stuck='abort').")
        with contextlib.suppress(Exception):  # stderr may be no file
            faulthandler.dump_traceback(sys.stderr)
        if run.is_under_way():
            os._exit(1)


def _tell(watch: Watch, text: str) -> None:
    """Report a text; a report that fails ends neither the thread, which heartbeats need, nor the way out."""
    try:
        watch.report(text)
    except Exception:  # the disk of the log is full, and warnings are errors
        logger.warning("%s", text, exc_info=True)
