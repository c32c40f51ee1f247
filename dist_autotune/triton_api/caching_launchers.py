"""Launchers of other packages that keep the kernel of a first launch, and bypass the Autotuner from then on.

While a call of a tuned function is active, each launch of theirs goes to the Autotuner, as their first does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from triton.runtime.autotuner import Autotuner

LAUNCHERS = {"flag_gems.utils.libentry": "LibEntry"}  # module -> class; what it launches is its `fn`


def own_runs() -> list[tuple[type, Callable[..., Any]]]:
    """Return the launchers that the program has imported, each with its `run`."""
    owners = (getattr(sys.modules.get(module), name, None) for module, name in LAUNCHERS.items())
    return [
        (owner, vars(owner)["run"]) for owner in owners if isinstance(owner, type) and "run" in vars(owner)
    ]


def handing_on(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what hands a launch on to the Autotuner under the launcher; without one there, `run`."""

    def hand_on(launcher: Any, *args: Any, **kwargs: Any) -> Any:
        tuner = launcher.fn
        while not isinstance(tuner, Autotuner):
            if (tuner := getattr(tuner, "fn", None)) is None:
                return run(launcher, *args, **kwargs)
        if len(tuner.configs) == 1:
            return run(launcher, *args, **kwargs)
        kernel = launcher.fn.run(*args, **kwargs)
        return kernel, tuner.best_config.all_kwargs()  # as a LibEntry returns: with the constants

    return hand_on
