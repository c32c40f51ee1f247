"""`StepTuner`: tunes a loop that has no function to decorate."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import settings
from ..errors import InvalidOption, TuningError
from ..launch.step_checks import check_before_step
from ..options import OF_REPEATED_RUNS, made_by
from ..triton_api.interception import INTERCEPTION
from .base_tuner import BaseTuner


class StepTuner(BaseTuner):
    """Tunes the `triton.autotune` launches of a loop's steps where they run: `with tuner.step(): ...`.

    Takes the options of `contextual_autotune`; without `name` it is called after the file that makes it. Each
    step is one run with `mode="online"`, and computes the right result with every config on trial. With
    is_dist, all ranks of the group make the same number of steps.

    Raises:
        TuningError: for an option that cannot be used.
    """

    def __init__(self, **options: Any) -> None:
        if options.setdefault("mode", "online") != "online":
            raise InvalidOption(
                f"mode={options['mode']!r}: a step cannot be repeated, so StepTuner is always 'online'. "
                "Leave mode= out, or decorate a function that can be repeated."
            )
        try:
            checked = made_by("StepTuner", OF_REPEATED_RUNS, **options)
        except TypeError as error:
            raise InvalidOption(str(error)) from None
        super().__init__(None, checked, checked.name or _name_of_steps(sys._getframe(1), self))

    def __getstate__(self) -> dict[str, Any]:  # a copy tunes for itself
        return {name: value for name, value in vars(self).items() if name != "_calls"}

    def __deepcopy__(self, memo: dict[int, Any]) -> StepTuner:  # with the same group and clock
        return copy.copy(self)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Make the block one run. Its exceptions reach the caller; a later step makes that run again.

        A step inside a tuned function, or inside another tuner's step, is a part of that run. Failures of
        kernels that wait for peers are raised before an optimizer of torch.optim steps.

        Raises TuningError for a step inside a step of the same tuner, and for a block that ends on another
        thread than it began on; that run counts nowhere.
        """
        mode = settings.run_mode()
        if mode == "off" or INTERCEPTION.is_within():
            self._check_not_within_itself()
            self._join_or_leave(mode)
            yield
            return
        opener = threading.current_thread()
        with self._made_calls().step(mode):
            hook = register_optimizer_step_pre_hook(lambda *_: check_before_step())
            try:
                yield
                self._check_closed_by(opener)
            finally:
                hook.remove()

    def _check_not_within_itself(self) -> None:
        around, calls = INTERCEPTION.call_around(), self._calls
        if around is None or calls is None or calls.state is None:
            return
        if around.launcher.function is calls.state.function:
            raise TuningError(
                f"a step of {self._name} begins inside a step of {self._name}: a step is one run. "
                "End the outer one first: where gradients are accumulated, one step holds all of a batch. "
                "For another loop inside, such as an evaluation, make another StepTuner."
            )

    def _check_closed_by(self, opener: threading.Thread) -> None:
        closer = threading.current_thread()
        if closer is not opener:
            raise TuningError(
                f"a step of {self._name} was opened on thread {opener.name} and closed on thread "
                f"{closer.name}: open and close a step on one thread, the one that runs the loop"
            )


def _name_of_steps(frame: FrameType | None, tuner: StepTuner) -> str:
    """Return the file that has made the tuner, such as `train.py`; at a prompt, `step`."""
    while frame is not None and frame.f_locals.get("self") is tuner:
        frame = frame.f_back
    file = "" if frame is None else os.path.basename(frame.f_code.co_filename)
    return "step" if not file or file.startswith("<") else file
