"""One launch of a kernel through an Autotuner: its key, its candidates, and how it is compiled and made.

Used of the Autotuner: `configs, keys, arg_names, fn, base_fn, prune_configs, early_config_prune`, and `nargs`
around `prune_configs`; `best_config` is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import AutotunerError

from ..errors import TuningError
from . import footprint, identity

Key: TypeAlias = tuple[Any, ...]

_NO_DTYPE = object()
# str() of a dtype costs 0.2 us, and every launch needs several.
_DTYPE_TEXTS: dict[Any, str] = {d: str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)}


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


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One call of `Autotuner.run`, with its arguments."""

    tuner: Autotuner
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def key(self) -> Key:
        """Return the key that stock Triton computes; raises TuningError if it cannot be hashed."""
        key = key_of(self.tuner, self.args, self.kwargs)
        try:
            hash(key)
        except TypeError as error:
            raise TuningError(
                f"{self.tuner.base_fn.__name__}: a value of its autotune key ({', '.join(self.tuner.keys)}) "
                f"cannot be hashed ({error}), and neither can stock Triton. Pass a tuple or a number instead."
            ) from None
        return key

    def key_names(self) -> tuple[str, ...]:
        """Return the names of the key's values: arguments first, then types, as in `a.dtype`."""
        named = {**self._named(), **{k: v for k, v in self.kwargs.items() if k in self.tuner.arg_names}}
        dtypes = [f"{name}.dtype" for name, value in named.items() if hasattr(value, "dtype")]
        return *(name for name in self.tuner.keys if name in named), *dtypes

    def candidates(self) -> dict[str, Any]:
        """Return the configs left after pruning, without duplicates, by digest and in order.

        Raises stock's ValueError when the caller also passes an argument that a config sets, and
        AutotunerError naming kernel and key when pruning leaves nothing.
        """
        tuner, before = self.tuner, getattr(self.tuner, "nargs", None)
        tuner.nargs = self._named()
        try:
            # Pruning may return a generator, as stock Triton reads its result once.
            pruned = list(tuner.prune_configs(self.kwargs) if len(tuner.configs) > 1 else tuner.configs)
        except AutotunerError as error:
            raise AutotunerError(f"{self}: {error.error_message}") from None
        finally:
            tuner.nargs = before
        if not pruned:
            raise AutotunerError(f"{self}: pruning left no config to try; early_config_prune must keep one")
        passed = self.kwargs.keys() | self._named().keys()
        configs: dict[str, Any] = {}
        identity.tell_apart(pruned)
        for config in pruned:
            if conflicts := passed & config.kwargs.keys():
                raise ValueError(
                    f"Conflicting meta-parameters: {', '.join(sorted(conflicts))}."
                    " Make sure that you don't re-define auto-tuned symbols."
                )
            configs.setdefault(identity.config_digest(config), config)
        return configs

    def __str__(self) -> str:
        """Return `name[key]` for messages, as in `matmul[4096, 1024, torch.float16]`."""
        key = key_of(self.tuner, self.args, self.kwargs)
        return f"{self.tuner.base_fn.__name__}[{', '.join(map(str, key))}]"

    def constants_text(self) -> str:
        """Return the constexpr arguments that are not in the key, as text."""
        named = {**self._named(), **self.kwargs}
        parameters = inspect.signature(self.tuner.base_fn).parameters.values()
        constants = {each.name for each in parameters if "constexpr" in str(each.annotation)}
        names = sorted(constants & named.keys() - set(self.tuner.keys))
        return ", ".join(f"{name}={identity.value_text(named[name], strict=False)}" for name in names)

    def hook_arguments(self, config: Any) -> dict[str, Any]:
        return {**self._named(), **self.kwargs, **config.all_kwargs()}

    def programs(self, config: Any) -> int:
        """Return how many programs `config` would launch, as far as a grid's function tells; 0: unknown."""
        grid, parameters = self.kwargs.get("grid"), inspect.signature(self.tuner.base_fn).parameters
        if not callable(grid):
            return 0
        defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
        try:
            return footprint.product(grid({**defaults, **self.hook_arguments(config)}))
        except Exception:  # a launch with this config raises it, where it is the user's to see
            return 0

    def run_pre_hook(self, config: Any) -> None:
        """Make `config` the tuner's best and call its own hook, as a steady-state stock launch does."""
        self.tuner.best_config = config
        if config.pre_hook is not None:
            config.pre_hook(self.hook_arguments(config))

    def run(self, config: Any) -> Any:
        """Launch the kernel under the Autotuner with `config`; its hook is the caller's."""
        return self.tuner.fn.run(*self.args, **self.kwargs, **config.all_kwargs())

    def compile(self, config: Any) -> Any:
        """Compile `config` for this launch without launching; return the kernel (a future in async mode)."""
        options = {**self.kwargs, **config.all_kwargs(), "grid": self.kwargs.get("grid"), "warmup": True}
        return self.tuner.fn.run(*self.args, **options)

    def _named(self) -> dict[str, Any]:
        return dict(zip(self.tuner.arg_names, self.args, strict=False))


def kernel_of(launched: Any) -> Any:
    """Return the compiled kernel that a launch has returned; None where it returns something else."""
    return launched if hasattr(launched, "_init_handles") else None


def load_kernel(kernel: Any) -> None:
    """Load a compiled kernel on the device: where a config shows that it does not fit."""
    if hasattr(kernel, "_init_handles"):
        kernel._init_handles()  # compiling alone does not check shared memory


def keep(finalize: Callable[[Any], None], kernel: Any) -> Any:
    """Put a kernel where launches find it, unless one is there; return the one there.

    finalize: of Triton's FutureKernel. It would replace a kernel that was compiled meanwhile, whose module
    is unloaded then, though launches or CUDA graphs may still run it.
    """
    kernels, key = _place_of(finalize)
    if (there := kernels.get(key)) is not None:
        return there
    finalize(kernel)
    return kernel


def withdraw(future_kernel: Any) -> None:
    """Take a FutureKernel from where launches find it: Triton 3.7 and newer put it there uncompiled."""
    kernels, key = _place_of(future_kernel.finalize_compile)
    if kernels.get(key) is future_kernel:
        del kernels[key]


def _place_of(finalize: Callable[[Any], None]) -> tuple[dict[Any, Any], Any]:
    """Return the dictionary and the key under which launches find the kernel that `finalize` is given."""
    known = inspect.getclosurevars(finalize).nonlocals
    return known.get("kernel_cache", {}), known.get("key")


def config_texts(configs: Sequence[Any]) -> list[str]:
    """Return each config as text, made unique where Triton's own text hides a difference."""
    texts: list[str] = []
    for config in configs:
        text = str(config)
        if text in texts:
            text = f"{text}, #{identity.config_digest(config)[:8]}"
        texts.append(text)
    return texts
