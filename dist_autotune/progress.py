"""A progress bar on rank 0 while a session is under way."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """A rich bar of the runs made; silent when `shown` is false."""

    def __init__(self, title: str, *, shown: bool) -> None:
        self._bar: Any = None
        if shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("runs"),
            )
            self._bar = Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(f"tuning {title}", total=None)
            self._bar.start()

    def update(self, runs: int, planned: int, detail: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=runs, total=max(planned, runs), description=detail)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def is_shown(wanted: bool | None, rank: int) -> bool:
    """Return whether this rank shows a bar: rank 0 when stderr is a terminal, unless told otherwise."""
    return rank == 0 and (sys.stderr.isatty() if wanted is None else wanted)
