"""A launch of which all but a few arguments are known: made ready once, repeated with those few.

    Triton's own way     asks for device and stream, collects what hooks may want to hear, calls them, encodes
                         each TMA descriptor, looks for scratch memory, launches
    prepared             asks for device and stream, launches with what the own way made of the rest before

The function that launches is the same, and so is what the kernel gets. The own way is taken where that
function is not known (`bare_launch`), and while hooks are set: a profiler sees every launch.
"""

from __future__ import annotations

from typing import Any

from triton import knobs
from triton.runtime.driver import driver

from .bare_launch import bare_launch


class PreparedLaunch:
    """Launches one compiled kernel on one grid, on the current stream; called with its middle arguments.

    first, last: what comes before and behind them in every launch. TMA descriptors are among the first, and
    not to be changed; that their memory is there is the caller's to see to, at each launch.
    """

    def __init__(
        self, compiled: Any, grid: tuple[int, int, int], first: tuple[Any, ...], last: tuple[Any, ...]
    ) -> None:
        self._own_way = compiled[grid]
        self._first, self._last = first, last
        self._driver = driver.active
        self._bare = bare_launch(compiled, grid, first, last)

    def __call__(self, *middle: Any) -> None:
        bare, driver = self._bare, self._driver
        if bare is None or _are_watched():
            self._own_way(*self._first, *middle, *self._last)
            return
        bare(driver.get_current_stream(driver.get_current_device()), middle)


def _are_watched() -> bool:
    """Return whether somebody is to be told of launches."""
    return _is_set(knobs.runtime.launch_enter_hook) or _is_set(knobs.runtime.launch_exit_hook)


def _is_set(hook: Any) -> bool:
    """Return whether there is such a hook: a chain, unless it is empty, or what somebody put in its place."""
    return bool(hook.calls) if isinstance(hook, knobs.HookChain) else hook is not None
