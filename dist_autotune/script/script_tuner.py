"""Tunes a whole program: a run is what lies between two boundaries."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace

import torch.distributed as dist

from .. import settings
from ..errors import AgreementTimeout, PeerFailed, RankMismatch
from ..options import Options
from ..triton_api import interception
from ..triton_api.interception import PROGRAM
from ..tuner.calls import Calls
from ..tuner.tuned import Tuned


class RunAbandoned(Exception):
    """A run has no end: its program has ended, or its process group."""


class ScriptTuner(Tuned):
    """The runs of one program. Functions that the program tunes itself lie above them, as without it.

    Nothing is tried before the first boundary, and nobody is asked: ranks come to their first launch at
    different times, and there may be no process group yet. Launches take what is known, else the first
    config. So it is again after ranks have failed to agree: the program goes on without them, unless the mode
    is strict.
    """

    def __init__(self, options: Options, name: str) -> None:
        super().__init__(None, options, name)
        self.boundaries = 0  # that the program has come to, inside functions that it tunes itself too
        self.lost: Exception | None = None  # why tuning has ended before its time
        self._pid = os.getpid()
        self._run = contextlib.ExitStack()  # the run under way
        self._calls = self._tried = Calls(None, options, name, self._log_dir, PROGRAM)
        cache = options.cache if self._is_alone() else False
        alone = replace(options, is_dist=False, cache=cache, log_dir=None, progress=False)
        self._untried = Calls(None, alone, name, None, PROGRAM)

    @property
    def rank(self) -> int:
        state = self._tried.state or self._untried.state
        return settings.process_rank() if state is None else state.function.group.rank

    def begin(self) -> None:
        """Begin the first run."""
        with self._turn():
            self._begin_run(self._untried)

    def end_run(self) -> None:
        """Take up what the run under way has measured, agree with the peers, and begin the next run.

        Inside a tuned function of the program's, or a capture, a run does not end.
        """
        if os.getpid() != self._pid or interception.is_capturing():
            return
        self.boundaries += 1
        with self._turn() as is_own:
            if not is_own:
                return
            try:
                if self._tried.group_has_changed():
                    self._abandon_run(RunAbandoned("another process group"))
                self._run.close()
                self._begin_run(self._tried if self._may_try() else self._untried)
            except (AgreementTimeout, PeerFailed, RankMismatch) as error:
                if settings.run_mode() == "strict":
                    raise
                self.lost = error
                logging.getLogger("dist_autotune").warning("%s goes on untuned: %s", self._name, error)
                self._tried.close()
                self._begin_run(self._untried)

    def close(self, error: BaseException | None) -> None:
        """End with the program, which `error` has ended, and put back what was replaced.

        The run under way is nobody's; the peers hear of it, as they may wait for its end.
        """
        if os.getpid() == self._pid:
            try:
                self._abandon_run(error or RunAbandoned("the program has ended"))
                self._tried.close()
            finally:
                PROGRAM.restore()

    def _is_alone(self) -> bool:
        """Return whether this process has no peers, nor will have."""
        if self.options.is_dist and dist.is_available() and dist.is_initialized():
            return dist.get_world_size() == 1
        return not self.options.is_dist or settings.world_size() == 1

    def _may_try(self) -> bool:
        return self.lost is None and (self._is_alone() or dist.is_initialized())

    def _begin_run(self, calls: Calls) -> None:
        mode = settings.run_mode()
        if mode != "off":
            tries_nothing = calls is self._untried and not (mode == "strict" and self._is_alone())
            self._run.enter_context(calls.step("cached" if tries_nothing else mode))

    def _abandon_run(self, error: BaseException) -> None:
        self._run.__exit__(type(error), error, error.__traceback__)
