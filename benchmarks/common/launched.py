"""Which configs a call launches, seen from outside; and results put where Triton's autotuner looks for them.

Several tuned functions may launch one kernel with different configs in one process, each its own. Calls
outside of them launch what `Autotuner.cache` holds: `Held` puts results there before such a call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner


@dataclass(frozen=True, order=True)
class Launched:
    """A kernel and the text of the config that it was launched with."""

    kernel: str
    config: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.config}"


def autotuners(modules: Iterable[ModuleType] = ()) -> list[Autotuner]:
    """Return each autotuned kernel that a loaded module of dist_autotune.kernels, or one of these, holds."""
    ours = [module for name, module in sys.modules.items() if name.startswith("dist_autotune.kernels")]
    held = [value for module in [*ours, *modules] for value in vars(module).values()]
    found = {id(value): value for value in held if isinstance(value, Autotuner)}
    return sorted(found.values(), key=name_of)


def name_of(tuner: Autotuner) -> str:
    return str(tuner.base_fn.__name__)


class Held:
    """What `Autotuner.cache` of some kernels holds now."""

    def __init__(self, tuners: Iterable[Autotuner]) -> None:
        self._results = [(tuner, dict(tuner.cache)) for tuner in tuners]

    def put_back(self) -> None:
        """Let the kernels have these results and no others. Called before timed calls: a microsecond."""
        for tuner, results in self._results:
            tuner.cache.clear()
            tuner.cache.update(results)

    def with_config(self, kernel: str, config: str) -> Held:
        """Return the same with another config for every key of one kernel; raises ValueError without one."""
        changed = Held(())
        changed._results = [(tuner, dict(results)) for tuner, results in self._results]
        of_kernel = [(tuner, results) for tuner, results in changed._results if name_of(tuner) == kernel]
        chosen = [found for tuner, _ in of_kernel for found in tuner.configs if str(found) == config]
        if len(of_kernel) != 1 or len(chosen) != 1:
            raise ValueError(f"{kernel} has {len(chosen)} configs {config!r}: one is needed")
        of_kernel[0][1].update(dict.fromkeys(of_kernel[0][1], chosen[0]))
        return changed


class Observer:
    """Sees what calls launch of these kernels, whichever way a launch takes.

    A launch through Triton passes `fn.run` below the autotuner, where its arguments tell the config. One that
    was prepared before (`PreparedLaunch`) passes Triton's hook alone, which is told the loaded
    function: the config is known if some launch of it that was seen took the first way.
    """

    def __init__(self, tuners: Iterable[Autotuner]) -> None:
        self.tuners = list(tuners)
        self._loaded: dict[Any, Launched] = {}

    def launches_of(self, call: Callable[[], object]) -> tuple[Launched, ...]:
        """Make the call; return what it launched, without repetitions."""
        seen: set[Launched] = set()

        def note(metadata: Any) -> None:
            launched = self._loaded.get(metadata.get().get("function"))
            if launched is not None:
                seen.add(launched)

        hooks = triton.knobs.runtime.launch_enter_hook
        with contextlib.ExitStack() as stack:
            for tuner in self.tuners:
                stack.enter_context(self._noting(tuner, seen))
            hooks.add(note)
            stack.callback(hooks.remove, note)
            call()
        return tuple(sorted(seen))

    def clear(self) -> None:
        """Let `Autotuner.cache` of all kernels be empty, as in a process that has launched nothing."""
        for tuner in self.tuners:
            tuner.cache.clear()

    @contextlib.contextmanager
    def _noting(self, tuner: Autotuner, seen: set[Launched]) -> Iterator[None]:
        kernel = tuner.fn
        before, run = vars(kernel).get("run"), kernel.run

        def noting(*args: Any, **kwargs: Any) -> Any:
            compiled = run(*args, **kwargs)
            if not kwargs.get("warmup"):
                launched = Launched(name_of(tuner), _config_of(tuner, kwargs))
                seen.add(launched)
                if getattr(compiled, "function", None) is not None:  # the interpreter loads nothing
                    self._loaded[compiled.function] = launched
            return compiled

        kernel.run = noting
        try:
            yield
        finally:
            del kernel.run
            if before is not None:
                kernel.run = before


def _config_of(tuner: Autotuner, arguments: dict[str, Any]) -> str:
    """Return the text of the config whose options are among the arguments of a launch."""

    def fits(config: Any) -> bool:
        options = config.all_kwargs()
        return all(name in arguments and arguments[name] == value for name, value in options.items())

    fitting = [config for config in tuner.configs if fits(config)]
    if not fitting:
        return "none of its configs"
    return str(max(fitting, key=lambda config: len(config.all_kwargs())))
