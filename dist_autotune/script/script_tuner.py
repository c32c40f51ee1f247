"""Tunes a whole program; a run lasts from one boundary to the next."""

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
from ..triton_api.interception import INTERCEPTION, PROGRAM
from ..tuner.base_tuner import BaseTuner
from ..tuner.calls import Calls
from ..tuner.report import TUNERS


class RunAbandoned(Exception):
    """A run has no end: its program has ended, or its process group."""


class ScriptTuner(BaseTuner):
    """The runs of one program. Functions that the program tunes itself lie above them, as without it.

    Nothing is tried or exchanged before the first boundary: ranks come to their first launch at different
    times, and there may be no process group yet. Nor is it after ranks have failed to agree: the program goes
    on with the agreed results, unless the mode is strict.
    """

    def __init__(self, options: Options, name: str) -> None:
        super().__init__(None, options, name)
        self.boundaries = 0  # that the program has come to, inside functions that it tunes itself too
        self.lost: Exception | None = None  # why tuning has ended before its time
        self._pid = os.getpid()
        self._run = contextlib.ExitStack()  # the run under way
        self._boundary = interception.fork_safe_lock()  # of the thread that ends a run
        self._shared = self._calls = Calls(None, options, name, is_program=True)
        # Before the group is known. One rank's disk may hold what the others' do not.
        cache = options.cache if self._is_alone() else False
        own = replace(options, is_dist=False, cache=cache, log_dir=None)
        self._own = Calls(None, own, name, is_program=True)
        TUNERS.add(self)

    @property
    def rank(self) -> int:
        state = self._shared.state or self._own.state
        return settings.process_rank() if state is None else state.function.group.rank

    @property
    def lacks_group(self) -> bool:
        """Return whether the ranks have never had a process group in which to agree."""
        return self._shared.state is None and not self._is_alone()

    def begin(self) -> None:
        """Begin the first run."""
        with self._boundary:
            self._begin_run()

    def end_run(self) -> None:
        """End the run under way: agree with the peers on its samples, and begin the next run.

        Inside a tuned function of the program's, or a capture, a run does not end.
        """
        if os.getpid() != self._pid or interception.is_capturing():
            return
        self.boundaries += 1
        if INTERCEPTION.is_within():
            return
        with self._boundary:
            try:
                if self._shared.group_has_changed():
                    self._abandon_run(RunAbandoned("another process group"))
                self._run.close()
                self._begin_run()
            except (AgreementTimeout, PeerFailed, RankMismatch) as error:
                if settings.run_mode() == "strict":
                    raise
                self.lost = error
                logging.getLogger("dist_autotune").warning(
                    "%s goes on with what is tuned: %s", self._name, error
                )
                self._shared.close()
                self._begin_run()

    def close(self, error: BaseException | None) -> None:
        """End tuning with the program, which `error` may have ended: launches are stock Triton's again.

        The run under way counts nowhere. The peers are told, as they may wait for its end.
        """
        if os.getpid() == self._pid:
            try:
                self._abandon_run(error or RunAbandoned("the program has ended"))
                self._shared.close()
            finally:
                INTERCEPTION.calls.pop(PROGRAM, None)

    def _is_alone(self) -> bool:
        """Return whether this process has no peers, nor will have."""
        if self.options.is_dist and dist.is_available() and dist.is_initialized():
            return dist.get_world_size() == 1
        return not self.options.is_dist or settings.world_size() == 1

    def _begin_run(self) -> None:
        mode, is_alone = settings.run_mode(), self._is_alone()
        if mode == "off":
            return
        if not (self.boundaries and (is_alone or dist.is_initialized())):
            # Several ranks are strict together, not each for itself.
            run = self._own.step(mode if is_alone else "cached", asks_nobody=True)
        else:
            run = self._shared.step(mode, asks_nobody=self.lost is not None)
        self._run.enter_context(run)

    def _abandon_run(self, error: BaseException) -> None:
        self._run.__exit__(type(error), error, error.__traceback__)
