"""Where one run of a program ends and the next begins: after an optimizer's step, or a named function."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any, Protocol

from ..errors import InvalidOption
from ..launch.step_checks import check_before_step
from .import_hooks import ImportHooks

NO_BACKWARD = -1  # in torch's numbers of backward passes
SERIES_OF_OTHERS = 16  # after so many without a step of the leading optimizer, the next one leads


class Boundary(Protocol):
    """Calls `end_run` wherever a run of the program ends."""

    missing: str  # the remark when no run has ended

    def watched(self, end_run: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Watch the program in a `with` block."""


class OptimizerSteps:
    """A run ends with the last step of the leading `torch.optim` optimizer in a training step.

    Steps without a forward pass between them are a series: those of one training step. The optimizer that
    steps first leads; with which of its steps a series ends is learnt from earlier ones. All follows from the
    order of steps, so it is the same on ranks whose other optimizers differ. Steps in a backward pass end the
    run after that.
    """

    missing = "no optimizer of torch.optim has stepped. Name what ends a run: --step module:function"

    def __init__(self) -> None:
        self._leader: Callable[[], Any] = lambda: None
        self._leading_steps = 0  # of the leader in this series
        self._lengths: deque[int] = deque(maxlen=2)  # the leader's steps in earlier series
        self._series_of_others = 0  # since the leader's last step
        self._has_ended = False  # a run, in this series

    @contextlib.contextmanager
    def watched(self, end_run: Callable[[], None]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:

            def register(module: ModuleType) -> None:
                steps = _StepHooks(self, end_run)
                stack.callback(module.register_optimizer_step_pre_hook(steps.before).remove)
                stack.callback(module.register_optimizer_step_post_hook(steps.after).remove)

            with ImportHooks({"torch.optim.optimizer": register}):
                yield

    def begin_series(self) -> None:
        """Begin the steps of a training step."""
        if self._leading_steps:
            self._lengths.append(self._leading_steps)
        else:
            self._series_of_others += 1
        self._leading_steps, self._has_ended = 0, False

    def count_step(self, optimizer: Any) -> bool:
        """Return whether a run ends with this step."""
        if optimizer is not self._leader():
            if self._leader() is not None and self._series_of_others < SERIES_OF_OTHERS:
                return False
            self._leader, self._leading_steps = weakref.ref(optimizer), 0
            self._lengths.clear()
        self._series_of_others = 0
        self._leading_steps += 1
        if self._has_ended or self._leading_steps < min(self._lengths, default=1):
            return False
        self._has_ended = True
        return True


class _StepHooks:
    """Finds the series of steps, by the work of autograd between them."""

    def __init__(self, steps: OptimizerSteps, end_run: Callable[[], None]) -> None:
        import torch

        self._autograd, self._backward = torch._C, torch.autograd.Variable._execution_engine
        self._steps, self._end_run = steps, end_run
        self._at_start = self._recorded()  # while it is that: no forward pass tells series apart
        self._forward = -1  # how far autograd had recorded operations before the last step
        self._backwards = set[int]()  # backward passes, the outer one and those in it, that have had steps
        self._ends = False

    def before(self, *_: Any) -> None:
        check_before_step()
        if self._backwards and self._autograd._current_graph_task_id() == NO_BACKWARD:  # only inner ones
            self._forward, self._ends = -1, False
            self._backwards.clear()
        recorded = self._recorded()
        if not self._backwards and (recorded != self._forward or recorded == self._at_start):
            self._steps.begin_series()
        self._forward = recorded  # a closure's forward pass inside the step is one between it and the next

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        ends, backward = self._steps.count_step(optimizer), self._autograd._current_graph_task_id()
        if backward != NO_BACKWARD:
            self._ends |= ends
            if backward not in self._backwards:
                self._backwards.add(backward)
                self._backward.queue_callback(self._behind_backward)
        elif ends:
            self._end_run()

    def _behind_backward(self) -> None:
        if _is_inner_backward():
            return
        ends, self._ends, self._forward = self._ends, False, -1
        self._backwards.clear()
        if ends:
            self._end_run()

    def _recorded(self) -> int:
        """Return how many operations autograd has recorded on this thread."""
        return int(self._autograd._autograd._get_sequence_nr())


def _is_inner_backward() -> bool:
    """Return whether the backward pass that ends now runs inside an operation of another one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_qualname != "BackwardCFunction.apply":
        frame = frame.f_back
    return frame is not None


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
        self.missing = (
            f"the program imported no module {self._module}, which --step {name} names. Name one that it "
            "imports; in the script itself, use StepTuner or contextual_autotune"
        )
        self._under_way: list[None] = []  # one for each call under way, also of itself or on other threads

    @contextlib.contextmanager
    def watched(self, end_run: Callable[[], None]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:

            def replace(module: ModuleType) -> None:
                self.missing = f"{self._name} has not been called"
                stack.callback(self._replace(module, end_run))

            with ImportHooks({self._module: replace}):
                yield

    def _replace(self, module: ModuleType, end_run: Callable[[], None]) -> Callable[[], None]:
        """Wrap the function; return a function that puts it back."""
        owner, last = module, self._path[-1]
        try:
            for part in self._path[:-1]:
                owner = getattr(owner, part)
            function = inspect.getattr_static(owner, last)
        except AttributeError:
            path = ".".join(self._path)
            raise InvalidOption(
                f"--step {self._name!r}: the module {self._module} has no {path}; name a function or method "
                "of it"
            ) from None
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
