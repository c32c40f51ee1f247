"""What a launch outside tuned calls does where stock Triton cannot time it: without a device."""

from __future__ import annotations

from typing import Any

from .interception import INTERCEPTION, Run
from .launch import Launch


def without_benchmarks(stock: Run) -> Run:
    """Return `stock`, an `Autotuner.run`, for the interpreter: it has no device to benchmark configs on.

    A key with a result is launched by `stock`. Any other one takes its first config, and stays without a
    result: a tuned call that meets it tunes it.
    """

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        launch = Launch(tuner, args, kwargs)
        if INTERCEPTION.call_here() is not None or len(tuner.configs) < 2 or launch.key() in tuner.cache:
            return stock(tuner, *args, **kwargs)
        config = next(iter(launch.candidates().values()))
        launch.run_pre_hook(config)
        return launch.run(config)

    return run
