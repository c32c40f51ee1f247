"""Launches outside tuned calls where stock Triton cannot benchmark: without a device."""

from __future__ import annotations

import functools
from typing import Any

from .interception import Run
from .launch import Launch


def without_benchmarks(stock: Run) -> Run:
    """Return `stock`, an `Autotuner.run`, for the interpreter: there may be no device to benchmark on.

    Where stock finds none, before it launches anything, the launch takes its first config. The key stays
    without a result: a tuned call that meets it tunes it.
    """

    @functools.wraps(stock)
    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(tuner, *args, **kwargs)
        except RuntimeError as error:
            if "active drivers" not in str(error):
                raise
        launch = Launch(tuner, args, kwargs)
        config = next(iter(launch.candidates().values()))
        launch.run_pre_hook(config)
        return launch.run(config)

    return run
