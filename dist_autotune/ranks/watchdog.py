"""A thread that sends heartbeats while a rank compiles, and reports a rank that is stuck."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import exchange
from .courier import StoreLost
from .exchange import PATIENCE, FailedExchange

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
    """One run of the user's function, as far as it is watched."""

    watch: Watch
    sequence: int  # of the exchange at its end
    began: float
    compiled_s: float = 0.0
    is_overdue: bool = False  # and reported
    is_abandoned: bool = False  # the peers have gone on, and `follow` reports it


class Watchdog:
    """Sends heartbeats while this rank compiles, and watches the runs of the user's function.

    Its thread starts when first needed, in a forked child too, and looks once a heartbeat.
    beat: sends one. find_failure: returns how the exchange of a number has failed, if it has.
    """

    def __init__(
        self,
        rank: int,
        beat: Callable[[], None] = lambda: None,
        find_failure: Callable[[int], FailedExchange | None] = lambda sequence: None,
    ) -> None:
        self._rank, self._beat, self._find_failure = rank, beat, find_failure
        self._beating = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # Of any number of threads:
        self._tell_idle: Callable[[], None] | None = None  # while this rank is between calls of a session
        self._idle_since = 0.0
        self._compiling: list[float] = []  # when blocks that compile have begun
        self._runs: list[_Run] = []

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats while the block compiles."""
        self._start()
        began = time.monotonic()
        self._compiling.append(began)
        self._beat()
        try:
            yield
        finally:
            with self._beating:  # none is sent behind the block
                self._compiling.remove(began)
            for run in list(self._runs):
                run.compiled_s += time.monotonic() - began

    def idle(self, tell: Callable[[], None] | None) -> None:
        """Call `tell` once a heartbeat from now on, unless the next call comes soon; None: no longer."""
        self._idle_since, self._tell_idle = time.monotonic(), tell
        if tell is not None:
            self._start()

    @contextlib.contextmanager
    def watching(self, sequence: int, watch: Watch) -> Iterator[None]:
        """Watch while the block runs."""
        self._start()
        run = _Run(watch, sequence, time.monotonic())
        self._runs.append(run)
        try:
            yield
        finally:
            self._runs.remove(run)

    def follow(self, watch: Watch, reason: str, is_stuck: Callable[[], bool]) -> None:
        """Report once that this rank stays in a run that peers have left; later, if asked, end it."""

        def serve() -> None:
            time.sleep(exchange.HEARTBEAT_S)
            if not is_stuck():
                return
            finding = f"is still in {watch.what}, but {reason}"
            self._report(watch, finding, "If it waits in one of your collectives")
            until = time.monotonic() + watch.timeout_s
            while is_stuck() and not self._is_closed:
                if time.monotonic() > until:
                    self._abort(watch, is_stuck)
                    return
                time.sleep(exchange.HEARTBEAT_S)

        threading.Thread(target=serve, name="dist_autotune stuck", daemon=True).start()

    def close(self) -> None:
        """End the thread at its next look. Takes no lock: a garbage collector may call it, on any thread."""
        self._is_closed = True

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="dist_autotune watchdog", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            time.sleep(exchange.HEARTBEAT_S)
            with self._beating:
                if self._compiling and not self._is_closed:
                    self._beat()
            now = time.monotonic()
            is_idle = now - self._idle_since >= exchange.HEARTBEAT_S / 2
            if is_idle and (tell := self._tell_idle) is not None and not self._is_closed:
                tell()
            latest = now - exchange.HEARTBEAT_S
            for run in [run for run in list(self._runs) if run.began <= latest]:
                self._check_duration(run)
                if not (run.is_abandoned or self._is_closed):
                    self._check_peers(run)

    def _check_peers(self, run: _Run) -> None:
        """See whether the peers have gone on without this rank."""
        try:
            failure = self._find_failure(run.sequence)
        except StoreLost:
            return
        if failure is not None:
            run.is_abandoned = True
            reason = "its peers timed out and went on without it"
            if failure.error:
                reason = f"rank {failure.rank} has failed ({failure.error})"
            self.follow(run.watch, reason, lambda: run in self._runs)

    def _check_duration(self, run: _Run) -> None:
        """Report once that a run lasts longer than its time-out, whatever the peers do; later, maybe end it.

        Time in which this rank compiles does not count, up to `PATIENCE` times the time-out.
        """
        watch, now = run.watch, time.monotonic()
        if watch.whereabouts is None or run.is_abandoned:
            return
        lasted_s = now - run.began
        compiled_s = run.compiled_s + sum(now - began for began in list(self._compiling))
        over_s = lasted_s - min(compiled_s, (PATIENCE - 1) * watch.timeout_s) - watch.timeout_s
        if over_s > 0 and not run.is_overdue:
            run.is_overdue = True
            self._report(watch, f"has been in {watch.what} for {lasted_s:.3g} s", "If it never ends")
        elif over_s > watch.timeout_s:
            self._abort(run.watch, lambda: run in self._runs)

    def _report(self, watch: Watch, finding: str, condition: str) -> None:
        """Report a finding, the position of the run, and the next step."""
        outlook = f"if it is still there in {watch.timeout_s:g} s, its process is ended (on_stuck='abort')"
        if watch.on_stuck != "abort":
            outlook = "nothing here can release it (on_stuck='abort' would end its process)"
        try:
            where = watch.whereabouts() if watch.whereabouts is not None else ""
        except Exception as error:  # a device that cannot be asked must not end the thread
            where = f"Its position is unknown ({type(error).__name__}: {error}). "
        _tell(watch, f"Rank {self._rank} {finding}. {where}{condition}, {outlook}.")

    def _abort(self, watch: Watch, is_stuck: Callable[[], bool]) -> None:
        if watch.on_stuck != "abort":
            return
        _tell(watch, f"Rank {self._rank} ends: it is still in {watch.what} (on_stuck='abort').")
        with contextlib.suppress(Exception):  # stderr may be no file
            faulthandler.dump_traceback(sys.stderr)
        if is_stuck():
            os._exit(1)


def _tell(watch: Watch, text: str) -> None:
    """Report a text; a report that fails ends neither the thread, which heartbeats need, nor the way out."""
    try:
        watch.report(text)
    except Exception:  # the disk of the log is full, and warnings are errors
        logger.warning("%s", text, exc_info=True)
