"""That benchmarks which time several plans of one kernel launch each plan's own config, and see which it was.

The compiler and the tuner are real, the device is pretended: what reaches the launcher is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import triton
from launch_path import LaunchingDevice, launching
from settled_cases import BY_POINTERS, BY_TMA, BY_TMA_OTHERS, SUMS, Caller

from benchmarks.common.launched import Launched, Observer
from dist_autotune import contextual_autotune
from dist_autotune.compilation import preflight as compiling
from dist_autotune.kernels.gemm_rs import plain as gemm_rs
from dist_autotune.kernels.gemm_rs.plain import gemm_reduce_scatter
from dist_autotune.kernels.launches.settled import TunedLaunch

CONFIGS = [BY_TMA, BY_TMA_OTHERS, BY_POINTERS]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchingDevice]:
    monkeypatch.setattr(compiling, "current_device", lambda: 0)
    with launching(monkeypatch, gemm_rs, gemm_reduce_scatter, CONFIGS) as made:
        yield made


def picks(place: int) -> Callable[..., Any]:
    """Return a search that tries and picks the candidate in this place."""

    def search(candidates: Any, **options: Any) -> Any:
        yield place
        return place

    return search


def plan(observer: Observer, caller: Caller, place: int) -> Callable[[], None]:
    """Return a tuned function, settled on the candidate in this place."""
    options = {"search": picks(place), "log_dir": None, "cache": False, "progress": False}
    function = contextual_autotune(caller.call, **options)
    observer.clear()
    function()
    assert function.settled
    return function


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows whenever a launch is not made the short way."""
    asked: list[int] = []
    ask = TunedLaunch._ask
    monkeypatch.setattr(TunedLaunch, "_ask", lambda *given: asked.append(1) or ask(*given))
    return asked


def test_what_a_call_launches_is_seen_also_where_the_launch_was_prepared_before(device, asked) -> None:
    observer, caller = Observer([gemm_reduce_scatter]), SUMS.make(1)
    plans = {place: plan(observer, caller, place) for place in (1, 2)}
    seen = {place: Launched("gemm_reduce_scatter", str(CONFIGS[place])) for place in plans}
    for place, call in plans.items():
        assert observer.launches_of(call) == (seen[place],)
        call()
        before = len(asked)
        assert observer.launches_of(call) == (seen[place],)
        assert len(asked) == before  # the short way, which passes no autotuner
    assert "run" not in vars(gemm_reduce_scatter.fn)  # nothing stays
    assert not triton.knobs.runtime.launch_enter_hook.calls
