"""How far a session is, for people: a bar where stderr is a terminal, else a line every few seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from ..formatting import counted
from ..search.budget import Forecast, StepTimes

BAR_EVERY_S = 0.1
LINE_EVERY_S = 5.0
LONGEST_TITLE = 24  # characters in the bar: at 80 columns the rest needs 56


class Progress:
    """Shows a session on the first rank; drawn between runs: a thread would disturb prints and forks.

    wanted: None or True shows it, False does not. clock: seconds, for tests.
    """

    def __init__(
        self, title: str, wanted: bool | None, *, is_first: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._clock = title, clock
        self._bar: Any = None
        self._shown_s = clock()
        self._first: tuple[int, float] | None = None  # runs and time at the first update
        self._has_lines = False
        is_terminal = _stderr_is_terminal()
        self._is_shown = is_first and wanted is not False and is_terminal is not None
        if self._is_shown and is_terminal:
            self._bar = _bar()
            self._task = self._bar.add_task(f"tuning {title}"[:LONGEST_TITLE], total=None, detail="")
            self._bar.start()

    def update(self, forecast: Forecast, planned: int, step: Callable[[], StepTimes | None]) -> None:
        """Show what follows a run. planned: runs in all; step: called only when something is drawn."""
        now = self._clock()
        self._first = self._first or (forecast.runs, now)
        every_s = LINE_EVERY_S if self._bar is None else BAR_EVERY_S
        is_due = self._is_shown and now - self._shown_s >= every_s
        if is_due:
            self._shown_s = now
        if self._bar is not None:
            self._bar.update(self._task, completed=forecast.runs, total=max(planned, forecast.runs))
            if is_due:
                gain = f"{round(-times.gain_percent):+d} %" if (times := step()) is not None else ""
                compiling = f"{forecast.compiling} compiling" if forecast.compiling else ""
                contexts = f"{forecast.settled}/{forecast.contexts} contexts"
                parts = contexts, compiling or self._time_left(forecast), gain
                self._bar.update(self._task, detail="  ".join(filter(None, parts)), refresh=True)
        elif is_due:
            self._write(self._line(forecast, step()))

    def close(self, outcome: str) -> None:
        """Remove the bar; after lines, write one that says how it ended."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._has_lines:
            self._write(outcome)
        self._is_shown = False

    def _line(self, forecast: Forecast, times: StepTimes | None) -> str:
        left = max(forecast.planned_trials - forecast.trials, 0)
        parts = [
            f"{forecast.settled} of {counted(forecast.contexts, 'context')} settled",
            f"step {forecast.runs}",
            f"{counted(forecast.compiling, 'candidate')} compiling" if forecast.compiling else "",
            f"at most {counted(left, 'trial')} left",
            self._time_left(forecast),
            "" if times is None else f"so far: {times}",
        ]
        return ", ".join(filter(None, parts))

    def _time_left(self, forecast: Forecast) -> str:
        """Return the expected time left, from the runs since the first: that one compiled."""
        assert self._first is not None
        runs = forecast.runs - self._first[0]
        if runs <= 0:
            return ""
        seconds = round((self._clock() - self._first[1]) / runs * forecast.more_runs)
        return f"about {seconds // 60}:{seconds % 60:02} left"

    def _write(self, text: str) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or its reader is gone
            print(f"dist_autotune: tuning {self._title}: {text}", file=sys.stderr, flush=True)
            self._has_lines = True


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    name = TextColumn("{task.description}", markup=False)  # a name may look like markup
    detail = TextColumn("{task.fields[detail]}", markup=False)
    return Progress(
        name, BarColumn(12), MofNCompleteColumn(), TextColumn("runs"), detail,
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
