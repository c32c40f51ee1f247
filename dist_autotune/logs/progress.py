"""A progress bar on rank 0 while a session is under way."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

_REFRESH_S = 0.1


class Progress:
    """A rich bar, drawn between runs: a thread would disturb what the function prints, and its forks."""

    def __init__(self, title: str, wanted: bool | None, rank: int) -> None:
        self._bar: Any = None
        self._drawn = 0.0
        if is_shown(wanted, rank):
            from rich import console, progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),  # a key may look like markup
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("runs"),
                progress.TimeElapsedColumn(),
                console=console.Console(stderr=True),
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,  # the user's print() goes where it always went: into a pipe, perhaps
                redirect_stderr=False,
            )
            self._task = self._bar.add_task(f"tuning {title}", total=None)
            self._bar.start()

    def update(self, runs: int, planned: int, detail: str) -> None:
        if self._bar is None:
            return
        draws = time.monotonic() - self._drawn >= _REFRESH_S
        if draws:
            self._drawn = time.monotonic()
        total = max(planned, runs)
        self._bar.update(self._task, completed=runs, total=total, description=detail, refresh=draws)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def is_shown(wanted: bool | None, rank: int) -> bool:
    """Return whether this rank shows a bar: rank 0 as `wanted`; None: when stderr is a terminal."""
    if rank != 0 or wanted is not None:
        return rank == 0 and bool(wanted)
    with contextlib.suppress(AttributeError, ValueError):  # a program may have closed or replaced it
        return sys.stderr.isatty()
    return False
