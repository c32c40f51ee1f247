"""`contextual_autotune` and the class behind it."""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from .. import settings
from ..errors import InvalidOption
from ..options import Options
from ..search.strategies import Strategy
from ..timing.clock import Clock
from ..triton_api.interception import INTERCEPTION
from .base_tuner import BaseTuner
from .snapshot import check_outputs, check_preserved

P = ParamSpec("P")
R = TypeVar("R")


class ContextualAutotuner(BaseTuner, Generic[P, R]):
    """A function whose `triton.autotune` launches are tuned where they run; made by `contextual_autotune`.

    A call takes the function's arguments and returns its result. It tunes until nothing is left to try.
    """

    def __init__(self, fn: Callable[P, R], options: Options) -> None:
        if isinstance(fn, (classmethod, staticmethod)):
            raise InvalidOption(f"put @{type(fn).__name__} above @contextual_autotune, not below it")
        if not callable(fn):
            raise InvalidOption(f"contextual_autotune decorates a function, not {fn!r}")
        if _is_asynchronous(_bare(fn)):
            raise InvalidOption(
                f"{fn!r} is asynchronous: its launches happen after the call has returned. "
                "Decorate the synchronous function that launches the kernels."
            )
        functools.update_wrapper(self, fn)
        self.fn, bare = fn, _bare(fn)
        name = str(options.name or getattr(bare, "__qualname__", type(bare).__qualname__))
        super().__init__(bare, options, name)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if (
            torch.compiler.is_dynamo_compiling()
        ):  # a call from a compiled function, which is no part of graphs
            result: R = torch.compiler.disable(self.__call__)(*args, **kwargs)
            return result
        mode = settings.run_mode()
        if mode == "off" or INTERCEPTION.is_within():
            return self.fn(*args, **kwargs)
        calls = self._calls or self._made_calls()
        return calls.call(mode, functools.partial(self.fn, *args, **kwargs) if args or kwargs else self.fn)

    def __reduce__(self) -> str:  # as functions are copied and pickled: by name
        return str(getattr(self, "__qualname__", type(self).__qualname__))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def contextual_autotune(
    fn: Callable[..., Any] | None = None,
    is_dist: bool = False,
    n_repeat: int | None = None,
    n_warmup: int | None = None,
    *,
    mode: str = "replay",
    search: str | Strategy = "auto",
    objective: str = "kernel",
    statistic: str = "median",
    rank_reduce: str = "max",
    agree: str = "key",
    group: Any = None,
    share: bool = True,
    name: str | None = None,
    watch: bool = True,
    preserve: Sequence[Any] = (),
    cache: bool | str | os.PathLike[str] = True,
    log_dir: str | os.PathLike[str] | None = settings.DEFAULT_LOG_DIR,
    clock: Clock | None = None,
    timeout_s: float = settings.DEFAULT_TIMEOUT_S,
    on_stuck: str = "raise",
    max_runs: int | None = None,
    budget_s: float | None = None,
    compile_jobs: int | None = None,
    filler_ms: float | None = None,
    progress: bool | None = None,
    bits: str = settings.DEFAULT_BITS,
    outputs: Sequence[Any] = (),
) -> Any:
    """Tune the `triton.autotune` kernels that a function launches, inside that function.

    A call runs the function with one config per kernel and key, again and again until each has its winner,
    and returns the result of the last run (`mode="replay"`); or makes one trial (`"online"`, for training).

    Args:
        is_dist: all ranks of `group` agree on each config; every rank must call the function.
        n_repeat: measured runs per config; 5 when None. Giving it, or n_warmup, selects `exhaustive`.
        n_warmup: unmeasured runs before them; 3 when None.
        search: `exhaustive`, `racing`, `expected`, `auto`, or a function returning a flow (docs/options.md).
        objective: `kernel` judges a config by its launches, `thunk` by the time of the whole run, `graph` by
            replays of the whole run, captured into a CUDA graph (docs/search.md).
        statistic: over the samples of one rank: `median`, `mean` or `min`.
        rank_reduce: over ranks: `max` or `mean`.
        agree: contexts of ranks belong together by `key`, or as the n-th of a kernel (`ordinal`).
        group: torch.distributed process group, or a DeviceMesh of one dimension; None: the default group.
        share: False: results belong to this function alone.
        name: of the function in logs, reports and cache; None: its qualified name.
        watch: with is_dist, vote after a settled call whether some rank met a new key.
        preserve: tensors or objects with state_dict() to put back before each further run (replay).
        cache: True: the user's cache directory; a path: that directory; False: none.
        log_dir: directory of `rank-N.log` and `rank-N.jsonl`; None: no files.
        clock: how a launch is timed; None: CUDA events on a GPU, the wall clock without one.
        timeout_s: seconds that a rank waits for peers or for its device; a longer run is reported as stuck.
        on_stuck: `abort` ends the process `timeout_s` after it was reported as stuck (in a collective).
        max_runs: runs of a session, the final one included; None: 4 x what the search plans.
        budget_s: seconds since the session's first call, all included, after which the best so far wins.
        compile_jobs: candidates that a rank compiles at a time; None: one on each core of its share of the
            host, online on half of them.
        filler_ms: the longest that a trial may begin later for its kernels to be timed without the host's
            part; None: 20, online 1.
        progress: None and True show on rank 0 how far tuning is: a bar where stderr is a terminal, else a
            line every 5 s. False shows nothing.
        bits: `same`: only configs whose outputs equal those of the first config, bit for bit, on all ranks;
            `check`: which do is reported; both ban configs that do not repeat themselves (replay).
        outputs: what is compared beside the result and `preserve`: tensors or objects with state_dict().

    Raises:
        TuningError: for an option that cannot be used; see `dist_autotune.errors` for what a call raises.
    """
    options = Options(**{key: value for key, value in locals().items() if key != "fn"})
    check_preserved(options.preserve)
    check_outputs(options.outputs)
    if fn is None:
        return lambda function: ContextualAutotuner(function, options)
    return ContextualAutotuner(fn, options)


def _bare(fn: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _is_asynchronous(fn: Callable[..., Any]) -> bool:
    """Return whether `fn`, a function or an object that can be called, is an `async def`."""
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(kind(called) for kind in kinds for called in (inspect.unwrap(fn), type(fn).__call__))
