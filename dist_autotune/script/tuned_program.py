"""One execution of a program that is tuned. Nothing imports torch or Triton before the program does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import settings
from ..formatting import escaped
from ..options import Options
from ..tuner.report import TUNERS, Findings
from .boundaries import Boundary
from .import_hooks import ImportHooks
from .program import Program

if TYPE_CHECKING:
    from .script_tuner import ScriptTuner


class TunedProgram:
    """A program and its tuner, which is made at the first launch or at the first boundary."""

    def __init__(self, program: Program, options: Options, boundary: Boundary) -> None:
        self._program, self._options, self._boundary = program, options, boundary
        self._tuner: ScriptTuner | None = None
        self._error: BaseException | None = None  # that ended the program
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._remove_gate: Callable[[], None] = lambda: None

    @property
    def findings(self) -> list[Findings]:
        """The findings of the program first, then of the functions and loops that it tunes itself."""
        return sorted(TUNERS.findings(), key=lambda each: (each.name != self._name, each.name))

    @property
    def _name(self) -> str:
        return escaped(self._options.name or self._program.name)

    @property
    def rank(self) -> int:
        return settings.process_rank() if self._tuner is None else self._tuner.rank

    @property
    def remark(self) -> str:
        """Why less was tuned than the user may expect; empty: no reason, or the program failed."""
        if self._error is not None:
            return ""
        if self._tuner is None or not self._tuner.boundaries:
            return f"No step was tuned: {self._boundary.missing}"
        if self._tuner.lacks_group:
            return (
                f"No step was tuned: {settings.world_size()} ranks were started and have made no process "
                "group. Call torch.distributed.init_process_group, or let each rank tune alone: --no-is-dist"
            )
        return "" if self._tuner.lost is None else f"Tuning ended early: {self._tuner.lost}"

    def run(self) -> None:
        """Run the program to its end; its exceptions, SystemExit too, reach the caller."""
        TUNERS.watch()
        try:
            with (
                ImportHooks({"triton.runtime.autotuner": self._set_gate}),
                self._boundary.watched(self._end_run),
            ):
                self._program.run()
        except BaseException as error:
            self._error = None if isinstance(error, SystemExit) and not error.code else error
            raise
        finally:
            self._remove_gate()
            if self._tuner is not None:
                self._tuner.close(self._error)

    def _set_gate(self, autotuner: ModuleType) -> None:
        """Let the first launch begin the first run. Others may have wrapped the gate by then, and keep it."""
        owner, stock = autotuner.Autotuner, vars(autotuner.Autotuner)["run"]

        def gate(*args: Any, **kwargs: Any) -> Any:
            return (owner.run if self._begin_at_launch() else stock)(*args, **kwargs)

        def remove() -> None:
            if vars(owner)["run"] is gate:
                owner.run = stock

        owner.run, self._remove_gate = gate, remove

    def _begin_at_launch(self) -> bool:
        """Return whether this launch belongs to a first run that it, or one beside it, has begun.

        A launch of a forked child, or of a function that the program tunes itself, begins none.
        """
        from ..triton_api.interception import INTERCEPTION

        if self._tuner is not None or INTERCEPTION.call_here() is not None or os.getpid() != self._pid:
            return False
        with self._lock:
            if self._tuner is None:
                self._make_tuner().begin()
        return True

    def _end_run(self) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                tuner = self._tuner or self._make_tuner()
            tuner.end_run()

    def _make_tuner(self) -> ScriptTuner:
        """Make the program's tuner, which needs no gate. Under the lock: two threads may launch at once."""
        from .script_tuner import ScriptTuner

        self._remove_gate()  # set by that import, if not before
        self._tuner = ScriptTuner(self._options, self._name)
        return self._tuner
