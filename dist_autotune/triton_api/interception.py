"""The only module that knows Triton's Autotuner: replaces its `run`, launches, and writes results back.

Used of it: `configs, keys, arg_names, cache, fn, base_fn, prune_configs, early_config_prune`, and
`nargs` around `prune_configs`; `best_config` and `configs_timings` are written in stock types.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from triton import knobs
from triton.runtime import _async_compile
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import AutotunerError

from . import identity, subclasses
from .active_call import ActiveCall
from .identity import KernelSource

Key: TypeAlias = tuple[Any, ...]
Run: TypeAlias = Callable[..., Any]  # what may stand as `Autotuner.run`
# (the `run` that stood there before, the kernel, its positional and keyword arguments) -> what launch returns
Handler: TypeAlias = Callable[[Callable[..., Any], Autotuner, tuple[Any, ...], dict[str, Any]], Any]

_IS_CAPTURING = torch.cuda.is_current_stream_capturing
_NO_DTYPE = object()
# str() of a dtype costs 0.2 us, and every launch needs several.
_DTYPE_TEXTS: dict[Any, str] = {d: str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)}


class Interception:
    """Puts a handler in place of `Autotuner.run` while a decorated call is active.

    There is one place to patch, so there is one active call: others wait for `turn`. A forked child
    finds the stock function back in place and the turn free.
    """

    def __init__(self) -> None:
        self.turn = ActiveCall()
        self.active = False
        self.tuning = False  # a launch may be a trial
        self.chooser: Callable[..., Any] | None = None  # answers `tunable` during the active call
        self._replaced: Sequence[tuple[type[Autotuner], Run]] = ()  # classes, and their `run` before
        self._forks_watched = False

    def installed(
        self, runner: Callable[[Run], Run], chooser: Callable[..., Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Return what replaces `Autotuner.run` until the block ends, however it ends.

        `runner` is given the function that stands there and returns the one to put in its place;
        `chooser` answers `tunable`.
        """
        return _Installed(self, runner, chooser)

    def install(self, runner: Callable[[Run], Run], chooser: Callable[..., Any]) -> None:
        if not self._forks_watched:
            os.register_at_fork(after_in_child=self._leave_to_parent)
            self._forks_watched = True
        # Before anything is replaced: a Ctrl-C may come between any two lines.
        own = subclasses.own_runs()
        stock = vars(Autotuner)["run"]
        self._replaced = [(Autotuner, stock), *[(owner, before) for owner, before, _ in own]]
        self.chooser = chooser
        Autotuner.run = runner(stock)
        for owner, before, benchmarks in own:
            owner.run = runner(before) if benchmarks else subclasses.told(owner, before)
        self.active = True

    def uninstall(self) -> None:
        """Put back what was replaced, if anything is."""
        for owner, before in self._replaced:
            owner.run = before
        self._replaced, self.active, self.chooser = (), False, None

    def restore(self) -> None:
        """Be as between calls."""
        self.uninstall()
        self.tuning = False

    def _leave_to_parent(self) -> None:
        self.restore()
        self.turn.leave_to_parent()


class _Installed:
    """A block of `Interception`; no generator, whose end could come when another call is active."""

    def __init__(
        self, interception: Interception, runner: Callable[[Run], Run], chooser: Callable[..., Any]
    ) -> None:
        self._interception, self._runner, self._chooser = interception, runner, chooser

    def __enter__(self) -> None:
        self._interception.install(self._runner, self._chooser)

    def __exit__(self, *exception: object) -> None:
        self._interception.uninstall()


INTERCEPTION = Interception()


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter (TRITON_INTERPRET=1)."""
    return bool(knobs.runtime.interpret)


def is_capturing() -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    predicate = torch.cuda.is_current_stream_capturing
    # Torch's own raises where there is no CUDA; another one, put there to pretend a capture, is believed.
    return (predicate is not _IS_CAPTURING or torch.cuda.is_initialized()) and predicate()


def is_async_compiling() -> bool:
    """Return whether launches only queue compilations (Triton's AsyncCompileMode)."""
    return _async_compile.active_mode.get() is not None


def source_of(tuner: Autotuner) -> KernelSource:
    return identity.kernel_source(tuner.base_fn)


def key_of(tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """Return the key that stock Triton computes for this launch."""
    names = tuner.arg_names
    named = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name in names:
            named[name] = value
    key = [named[name] for name in tuner.keys if name in named]
    for value in named.values():
        dtype = getattr(value, "dtype", _NO_DTYPE)
        if dtype is not _NO_DTYPE:
            key.append(_DTYPE_TEXTS.get(dtype) or str(dtype))
    return tuple(key)


def candidates_of(tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the configs left after pruning, without duplicates, by digest and in order.

    Raises stock's ValueError when the caller also passes an argument that a config sets, and
    AutotunerError naming kernel and key when pruning leaves nothing.
    """
    before = getattr(tuner, "nargs", None)
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        pruned = tuner.prune_configs(kwargs) if len(tuner.configs) > 1 else tuner.configs
    except AutotunerError as error:
        raise AutotunerError(
            f"{describe(tuner, key_of(tuner, args, kwargs))}: {error.error_message}"
        ) from None
    finally:
        tuner.nargs = before
    if not pruned:
        raise AutotunerError(f"{describe(tuner, key_of(tuner, args, kwargs))}: pruning left no config to try")
    passed = kwargs.keys() | set(tuner.arg_names[: len(args)])
    configs: dict[str, Any] = {}
    for config in pruned:
        conflicts = passed & config.kwargs.keys()
        if conflicts:
            raise ValueError(
                f"Conflicting meta-parameters: {', '.join(sorted(conflicts))}."
                " Make sure that you don't re-define auto-tuned symbols."
            )
        configs.setdefault(identity.candidate_digest(config.all_kwargs()), config)
    return configs


def constants_of(tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the constexpr arguments of the launch that are not in the key, as text."""
    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    return identity.constants_text(tuner.base_fn, named, set(tuner.keys))


def describe(tuner: Autotuner, key: Key) -> str:
    """Return `name[key]` for messages, as in `matmul[4096, 1024, torch.float16]`."""
    return f"{tuner.base_fn.__name__}[{', '.join(map(str, key))}]"


def run_pre_hook(tuner: Autotuner, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make `config` the tuner's best and call its own hook, as a steady-state stock launch does."""
    tuner.best_config = config
    if config.pre_hook is not None:
        config.pre_hook(hook_arguments(tuner, config, args, kwargs))


def hook_arguments(
    tuner: Autotuner, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return what the `pre_hook` of `config` is called with."""
    return {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()}


def launch(tuner: Autotuner, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Launch the kernel under `tuner` with `config`; hooks are the caller's."""
    return tuner.fn.run(*args, **kwargs, **config.all_kwargs())


def compiled(tuner: Autotuner, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compile `config` for this launch without launching; return the kernel (a future in async mode)."""
    rest = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
    return tuner.fn.run(*args, grid=kwargs.get("grid"), warmup=True, **rest, **config.all_kwargs())


def finished(kernel: Any) -> Any:
    """Return the compiled kernel behind what `compiled` returned; raises what the compiler raised."""
    return kernel.result() if hasattr(kernel, "result") else kernel


def load(kernel: Any) -> None:
    """Load a compiled kernel on the device: where a config shows that it does not fit."""
    kernel = finished(kernel)
    if hasattr(kernel, "_init_handles"):
        kernel._init_handles()  # compiling alone does not check shared memory


def publish(
    tuner: Autotuner, key: Key, config: Any, timings: Iterable[tuple[Any, float]], seconds: float
) -> None:
    """Write a result where stock Triton keeps it, so that launches elsewhere use it.

    Stock timings are (median, 20 %, 80 %) of one benchmark; the agreed time stands for all three.
    """
    tuner.cache[key] = config
    tuner.best_config = config
    with contextlib.suppress(TypeError):  # a config that holds a list cannot be a key, in stock neither
        tuner.configs_timings = {candidate: [ms, ms, ms] for candidate, ms in timings}
    tuner.bench_time = seconds


def announce(tuner: Autotuner, key: Key, *, cache_hit: bool) -> None:
    """Tell of a published result whom stock Triton tells: readers of stdout, and the listener."""
    if knobs.autotuning.print and not cache_hit:
        print(
            f"Triton autotuning for function {tuner.base_fn.__name__},\nwith key as {key},\n"
            f"finished after {tuner.bench_time:.2f}s,\nbest config selected: {tuner.best_config};"
        )
    listener = getattr(knobs.autotuning, "listener", None)  # Triton 3.8 and later
    if listener is not None:
        listener(
            fn=_jit_function(tuner),
            key=key,
            best_config=tuner.best_config,
            configs_timings=getattr(tuner, "configs_timings", {}),
            duration=None if cache_hit else tuner.bench_time,
            cache_hit=cache_hit,
        )


def _jit_function(tuner: Autotuner) -> Any:
    """Return the `@jit` function under heuristics and the like."""
    function = tuner.fn
    while not inspect.isfunction(function.fn):
        function = function.fn
    return function


def texts_of(configs: Sequence[Any]) -> list[str]:
    """Return each config as text, made unique where Triton's own text hides a difference."""
    texts: list[str] = []
    for config in configs:
        text = str(config)
        if text in texts:
            text = f"{text}, #{identity.candidate_digest(config.all_kwargs())[:8]}"
        texts.append(text)
    return texts
