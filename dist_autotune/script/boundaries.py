"""Where one run of a program ends and the next begins: after an optimizer's step, or a named function."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

from ..errors import InvalidOption
from ..launch.step_checks import check_before_step
from .import_hooks import ImportHooks

STEPS_OF_OTHERS = 16  # after so many without one of the leading optimizer, the next one leads


class Boundary(Protocol):
    """Calls `end_run` wherever a run of the program ends."""

    missing: str  # the remark when no run has ended

    def watched(self, end_run: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Watch the program in a `with` block."""


class OptimizerSteps:
    """A run ends after each step of the leading `torch.optim` optimizer: the one that steps first.

    Which one leads follows from the order of steps alone, so it is the same on all ranks.
    """

    missing = "no optimizer of torch.optim has stepped. Name what ends a run: --step module:function"

    def __init__(self) -> None:
        self._leader: Callable[[], Any] = lambda: None
        self._others = STEPS_OF_OTHERS  # steps of others since the leader's last

    @contextlib.contextmanager
    def watched(self, end_run: Callable[[], None]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:

            def register(module: ModuleType) -> None:
                def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
                    if self.count_step(optimizer):
                        end_run()

                before_step = module.register_optimizer_step_pre_hook(lambda *_: check_before_step())
                stack.callback(before_step.remove)
                stack.callback(module.register_optimizer_step_post_hook(after_step).remove)

            with ImportHooks({"torch.optim.optimizer": register}):
                yield

    def count_step(self, optimizer: Any) -> bool:
        """Return whether a run ends with this step."""
        if optimizer is not self._leader():
            self._others += 1
            if self._others <= STEPS_OF_OTHERS:
                return False
            self._leader = weakref.ref(optimizer)
        self._others = 0
        return True


class NamedCalls:
    """A run ends when a function, given as `module:function` or `module:Class.method`, has returned.

    The function is wrapped once the program has imported its module.
    """

    def __init__(self, name: str) -> None:
        found = re.fullmatch(r"([\w.]+):(\w+(?:\.\w+)*)", name)
        if found is None or found[1] == "__main__":
            raise InvalidOption(
                f"--step {name!r}: expected module:function or module:Class.method, of a module that the "
                "program imports. In the script itself, use StepTuner or contextual_autotune."
            )
        self._name, self._module, self._path = name, found[1], found[2].split(".")
        self.missing = f"{name} has not been called"
        self._under_way: list[None] = []  # one for each call under way, also of itself or on other threads

    @contextlib.contextmanager
    def watched(self, end_run: Callable[[], None]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:

            def replace(module: ModuleType) -> None:
                stack.callback(self._replace(module, end_run))

            with ImportHooks({self._module: replace}):
                yield

    def _replace(self, module: ModuleType, end_run: Callable[[], None]) -> Callable[[], None]:
        """Wrap the function; return what puts it back."""
        owner, last = module, self._path[-1]
        try:
            for part in self._path[:-1]:
                owner = getattr(owner, part)
            function = inspect.getattr_static(owner, last)
        except AttributeError:
            path = ".".join(self._path)
            raise InvalidOption(f"--step {self._name!r}: {self._module} has no {path}") from None
        is_own = last in vars(owner)
        if isinstance(function, staticmethod | classmethod):
            setattr(owner, last, type(function)(self._ending(function.__func__, end_run)))
        elif callable(function):
            setattr(owner, last, self._ending(function, end_run))
        else:
            raise InvalidOption(f"--step {self._name!r}: {function!r} is no function")
        return lambda: setattr(owner, last, function) if is_own else delattr(owner, last)

    def _ending(self, function: Callable[..., Any], end_run: Callable[[], None]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._under_way.append(None)
            try:
                result = function(*args, **kwargs)
            finally:
                self._under_way.pop()
            if not self._under_way:
                end_run()
            return result

        return call
