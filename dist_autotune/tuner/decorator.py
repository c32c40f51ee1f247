"""`contextual_autotune` and the class behind it."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from triton.runtime.jit import KernelInterface

from .. import settings
from ..errors import InvalidOption
from ..options import Options, made_by
from ..repeats.arguments import refuse_iterators
from ..repeats.snapshot import check_outputs, check_preserved
from ..triton_api.interception import INTERCEPTION
from .base_tuner import BaseTuner

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")  # of the options


class ContextualAutotuner(BaseTuner, Generic[P, R]):
    """A function whose `triton.autotune` launches are tuned where they run; made by `contextual_autotune`.

    A call takes the function's arguments and returns its result. It tunes until nothing is left to try.
    """

    def __init__(self, fn: Callable[P, R], options: Options) -> None:
        if isinstance(fn, (classmethod, staticmethod, property)):
            raise InvalidOption(f"put @{type(fn).__name__} above @contextual_autotune, not below it")
        if isinstance(fn, (type, KernelInterface)) or not callable(fn):
            raise InvalidOption(
                f"contextual_autotune decorates a function or method that launches kernels, not {fn!r}"
            )
        if _is_asynchronous(_bare(fn)):
            raise InvalidOption(
                f"{fn!r} is asynchronous: its launches happen after the call has returned. "
                "Decorate the synchronous function that launches the kernels."
            )
        if options.mode == "replay" and inspect.isgeneratorfunction(_bare(fn)):
            raise InvalidOption(
                f"{fn!r} is a generator function: its launches happen after the call has returned. Decorate "
                "the function that makes one item, or return a list."
            )
        functools.update_wrapper(self, fn)
        self.fn, bare = fn, _bare(fn)
        name = str(options.name or getattr(bare, "__qualname__", type(bare).__qualname__))
        super().__init__(bare, options, name)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # called by a compiled function, and no part of its graphs
            result: R = torch.compiler.disable(self.__call__)(*args, **kwargs)
            return result
        mode = settings.run_mode()
        if mode == "off" or INTERCEPTION.is_within():
            self._join_or_leave(mode)
            return self.fn(*args, **kwargs)
        calls, thunk = self._calls or self._made_calls(), self.fn
        if args or kwargs:
            if mode == "tune" and self.options.mode == "replay" and _has_iterator(args, kwargs):
                refuse_iterators(thunk, args, kwargs)  # a settled call may meet a key that is tuned
            thunk = functools.partial(thunk, *args, **kwargs)
        return calls.call(mode, thunk)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._name}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """As functions by name; a bound method, a partial one or an object with it."""
        if isinstance(self.fn, types.MethodType) or not hasattr(self.fn, "__qualname__"):
            return type(self), (self.fn, self.options)
        return str(self.fn.__qualname__)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextualAutotuner[P, R]:
        """Return itself, as functions do, or of a copy's bound method or partial one that calls the copy."""
        fn = copy.deepcopy(self.fn, memo)
        if id(self) in memo:  # what the method is bound to holds this function
            copied: ContextualAutotuner[P, R] = memo[id(self)]
            return copied
        if fn is self.fn or (isinstance(fn, types.MethodType) and fn == self.fn):
            return self
        options = copy.copy(self.options)
        for name in ("preserve", "outputs"):
            object.__setattr__(options, name, copy.deepcopy(getattr(options, name), memo))
        return type(self)(fn, options)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class _WithOptions(Protocol[Q]):
    def __call__(
        self, fn: Callable[..., Any] | None = ..., /, *by_position: Q.args, **by_name: Q.kwargs
    ) -> Any: ...


def _with_options(kind: Callable[Q, Options]) -> Callable[[Callable[..., Any]], _WithOptions[Q]]:
    """Give a function that takes `fn` and options the signature and the help of `Options`."""

    def decorate(function: Callable[..., Any]) -> _WithOptions[Q]:
        options = inspect.signature(kind).parameters.values()
        parameters = [inspect.signature(function).parameters["fn"], *options]
        vars(function)["__signature__"] = inspect.Signature(parameters)
        _, heading, args = (inspect.getdoc(kind) or "").partition("Args:")
        function.__doc__ = f"{inspect.getdoc(function)}\n\n{heading}{args}"
        return function

    return decorate


@_with_options(Options)
def contextual_autotune(fn: Callable[..., Any] | None = None, *by_position: Any, **by_name: Any) -> Any:
    """Tune the `triton.autotune` kernels that a function launches, inside that function.

    A call runs the function with one config per kernel and key, again and again until each has its winner,
    and returns the result of the last run (`mode="replay"`); or makes one trial (`"online"`, for training).

    Raises TuningError for an option that cannot be used; see `dist_autotune.errors` for what a call raises.
    """
    options = made_by("contextual_autotune", (), *by_position, **by_name)
    check_preserved(options.preserve)
    check_outputs(options.outputs)
    if fn is None:
        return lambda function: ContextualAutotuner(function, options)
    return ContextualAutotuner(fn, options)


def _bare(fn: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _has_iterator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for value in args:
        if hasattr(type(value), "__next__"):
            return True
    return bool(kwargs) and any(hasattr(type(value), "__next__") for value in kwargs.values())


def _is_asynchronous(fn: Callable[..., Any]) -> bool:
    """Return whether `fn`, a function or an object that can be called, is an `async def`."""
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(kind(called) for kind in kinds for called in (inspect.unwrap(fn), type(fn).__call__))
