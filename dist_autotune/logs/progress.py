"""The progress of a session on stderr: a bar on a terminal, else a few lines."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ..formatting import counted, format_ms
from ..search.budget import Forecast, StepTimes

BAR_EVERY_S = 0.1
LINES = 4  # of a session, about equally far apart, before the one that says how it ended
LONGEST_TITLE = 18  # characters in the bar: at 80 columns the rest needs 62
RECENT_RUNS = 32  # from whose time the time left is estimated: earlier ones compiled
LEAST_RUNS = 4  # fewer say nothing of the time left


class Progress:
    """Shows a session on the first rank; drawn between runs: a thread would disturb prints and forks.

    wanted: None or True shows it, False does not. clock: seconds, for tests.
    """

    def __init__(
        self, title: str, wanted: bool | None, *, is_first: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._clock = title, clock
        self._bar: Any = None
        self._pid = os.getpid()  # a forked child leaves the bar to its parent
        self._shown_s = clock()
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_RUNS)  # runs made, and when
        self._done = 0.0  # of the bar, which never goes back
        self._lines = 0  # written
        is_terminal = _stderr_is_terminal()
        self._is_shown = is_first and wanted is not False and is_terminal is not None
        if self._is_shown and is_terminal:
            self._bar = _bar()
            self._task = self._bar.add_task(f"tuning {title}"[:LONGEST_TITLE], total=1.0, detail="")
            self._bar.start()
            weakref.finalize(self, _stop, self._bar, self._pid)  # and as the process ends

    def update(self, forecast: Forecast, step: Callable[[], StepTimes | None]) -> None:
        """Show the progress after a run. step: returns the times so far; called only to draw them."""
        now = self._clock()
        self._recent.append((forecast.runs, now))
        self._done = max(self._done, forecast.done)
        if self._bar is not None:
            if now - self._shown_s >= BAR_EVERY_S:
                self._shown_s = now
                best = "" if (times := step()) is None else f"{format_ms(times.after_ms)} ms"
                gain = "" if times is None else f" ({round(-times.gain_percent):+d} %)"
                compiling = f"{forecast.compiling} compiling" if forecast.compiling else ""
                timed = f"{forecast.timed}/{forecast.candidates} timed"
                parts = timed, best + gain, compiling or self._time_left(forecast)
                detail = "  ".join(filter(None, parts))
                self._bar.start()
                self._bar.update(self._task, completed=self._done, detail=detail, refresh=True)
        elif self._is_shown and forecast.contexts and self._done * LINES >= self._lines < LINES:
            self._lines = int(self._done * LINES)
            self._write(self._line(forecast, step()))

    def pause(self) -> None:
        """Remove the bar, which hides the cursor, until a later update."""
        _stop(self._bar, self._pid)

    def close(self, outcome: str) -> None:
        """Fill and remove the bar; after lines, write one that says how it ended."""
        if self._bar is not None:
            how = outcome.partition(" after ")[0]
            done = 1.0 if how == "settled" else self._done
            self._bar.update(self._task, completed=done, detail=how, refresh=True)
            self._bar.stop()
            self._bar = None
        elif self._lines:
            self._write(outcome)
        self._is_shown = False

    def _line(self, forecast: Forecast, times: StepTimes | None) -> str:
        parts = [
            f"{forecast.settled} of {counted(forecast.contexts, 'context')} settled",
            f"run {forecast.runs}",
            f"{counted(forecast.compiling, 'candidate')} compiling" if forecast.compiling else "",
            f"{forecast.timed} of {counted(forecast.candidates, 'candidate')} timed",
            self._runs_left(forecast),
            self._time_left(forecast),
            "" if times is None else f"so far: {times}",
        ]
        return ", ".join(filter(None, parts))

    def _runs_left(self, forecast: Forecast) -> str:
        if forecast.settled == forecast.contexts:
            return "comparing winners with first configs"
        return f"about {counted(forecast.more_runs, 'run')} to go"

    def _time_left(self, forecast: Forecast) -> str:
        """Return the time left at the pace of the last runs: the first ones compiled; "": not known."""
        if forecast.settled == forecast.contexts:
            return ""
        (first_run, first_s), (last_run, last_s) = self._recent[0], self._recent[-1]
        if last_run - first_run < LEAST_RUNS:
            return ""
        seconds = round(forecast.more_runs * (last_s - first_s) / (last_run - first_run))
        return f"{seconds // 60}:{seconds % 60:02} left"

    def _write(self, text: str) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or its reader is gone
            print(f"dist_autotune: tuning {self._title}: {text}", file=sys.stderr, flush=True)
            self._lines += 1


def _stop(bar: Any, pid: int) -> None:
    if bar is not None and os.getpid() == pid:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            bar.stop()


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    name = TextColumn("{task.description}", markup=False)  # a name may look like markup
    detail = TextColumn("{task.fields[detail]}", markup=False)
    return Progress(
        name, BarColumn(8), detail,
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,  # the user's print() goes where it always went: into a pipe, if stdout is one
        redirect_stderr=False,
    )  # fmt: skip


def _stderr_is_terminal() -> bool | None:
    """Return whether stderr is a terminal; None: there is none, or it is closed."""
    with contextlib.suppress(AttributeError, ValueError):  # a program may have replaced it
        return None if sys.stderr is None or getattr(sys.stderr, "closed", False) else sys.stderr.isatty()
    return False
