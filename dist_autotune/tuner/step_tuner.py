"""`StepTuner`: tunes a loop that has no function to decorate."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from .. import settings
from ..errors import InvalidOption, TuningError
from ..options import Options
from .base_tuner import BaseTuner


class StepTuner(BaseTuner):
    """Tunes the `triton.autotune` launches of a loop's steps where they run: `with tuner.step(): ...`.

    Takes the options of `contextual_autotune`. Each step is one run with `mode="online"`: what it computes is
    right, whatever config is on trial. With is_dist, all ranks of the group make the same number of steps.

    Raises:
        TuningError: for an option that cannot be used.
    """

    def __init__(self, **options: Any) -> None:
        if options.setdefault("mode", "online") != "online":
            raise InvalidOption(f"mode={options['mode']!r}: a step cannot be repeated; StepTuner is 'online'")
        try:
            checked = Options(**options)
        except TypeError as error:
            raise InvalidOption(f"StepTuner: {error}; it takes the options of contextual_autotune") from None
        super().__init__(None, checked, checked.name or "step")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Make the block one run. What it raises reaches the caller; a later step makes that run again.

        A step inside a tuned function, or inside another step, is a part of that run.

        Raises TuningError where the block ends on another thread than it began on; that run counts nowhere.
        """
        mode = settings.run_mode()
        if mode == "off":
            yield
            return
        opener = threading.current_thread()
        with self._turn() as is_own:
            if is_own:
                with self._made_calls().step(mode):
                    yield
                    self._check_closed_by(opener)
            else:
                yield

    def _check_closed_by(self, opener: threading.Thread) -> None:
        closer = threading.current_thread()
        if closer is not opener:
            raise TuningError(
                f"a step of {self._name} was opened on thread {opener.name} and closed on thread "
                f"{closer.name}: open and close a step on one thread, the one that runs the loop"
            )
