"""Classes of other packages that launch autotuned kernels by a `run` of their own.

A subclass of Autotuner whose `run` ends up in that of a base class keeps it. One that prunes or benchmarks
configs is treated as `Autotuner.run` is. Any other one launches what nobody else chooses: with one warning.
A launcher that keeps the kernel of its first launch hands each launch on to the Autotuner, as it did then.
"""

from __future__ import annotations

import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from triton.runtime.autotuner import Autotuner

Run: TypeAlias = Callable[..., Any]  # an `Autotuner.run`, or its replacement

LAUNCHERS = {"flag_gems.utils.libentry": "LibEntry"}  # module -> class, which launches its `fn`
_BENCHMARKING = {"_bench", "do_bench", "prune_configs"}

# class -> its own `run`, and whether that benchmarks; None: it ends up in the `run` of a base class
_KINDS: weakref.WeakKeyDictionary[type, tuple[Run, bool | None]] = weakref.WeakKeyDictionary()
_WARNED: weakref.WeakSet[type] = weakref.WeakSet()


def replacements(runner: Callable[[Run], Run]) -> list[tuple[type, Run, Run]]:
    """Return the classes whose `run` a tuned call replaces, each with its `run` and the replacement.

    runner: makes what takes the place of a `run` that benchmarks.
    """
    found: list[tuple[type, Run, Run]] = []
    owners = type.__subclasses__(Autotuner)
    for owner in owners:
        owners += type.__subclasses__(owner)
        run = vars(owner).get("run")
        if isinstance(run, types.FunctionType):
            if owner not in _KINDS or _KINDS[owner][0] is not run:
                _KINDS[owner] = run, _kind(owner, run)
            if (benchmarks := _KINDS[owner][1]) is not None:
                found.append((owner, run, runner(run) if benchmarks else _warning_once(owner, run)))
    for module, name in LAUNCHERS.items():
        launcher = getattr(sys.modules.get(module), name, None)
        if isinstance(launcher, type) and (run := vars(launcher).get("run")) is not None:
            found.append((launcher, run, _handing_on(run)))
    return found


def keeps_its_own_cache(tuner: Autotuner) -> bool:
    """Return whether the tuner's class looks results up itself, perhaps by other keys than stock Triton."""
    return any(_KINDS[owner][1] for owner in type(tuner).__mro__ if owner in _KINDS)


def _warning_once(owner: type[Autotuner], run: Run) -> Run:
    """Return `run` with a warning, once, that it is not tuned."""

    def run_untuned(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
        if owner not in _WARNED and len(tuner.configs) > 1:
            _WARNED.add(owner)
            warnings.warn(
                f"{owner.__module__}.{owner.__qualname__} overrides Autotuner.run without super().run(): its "
                "kernels are not tuned inside tuned functions. Call super().run(*args, **kwargs) in it, or "
                "decorate the kernels with triton.autotune.",
                UserWarning,
                stacklevel=2,
            )
        return run(tuner, *args, **kwargs)

    return run_untuned


def _handing_on(run: Run) -> Run:
    """Return a `run` that hands launches on to the Autotuner under the launcher, if there is one."""

    def hand_on(launcher: Any, *args: Any, **kwargs: Any) -> Any:
        tuner = launcher.fn
        while not isinstance(tuner, Autotuner):
            if (tuner := getattr(tuner, "fn", None)) is None:
                return run(launcher, *args, **kwargs)
        if len(tuner.configs) == 1:
            return run(launcher, *args, **kwargs)
        kernel = launcher.fn.run(*args, **kwargs)
        return kernel, tuner.best_config.all_kwargs()  # as a LibEntry returns: with the constants

    return hand_on


def _kind(owner: type, run: types.FunctionType) -> bool | None:
    """Return what a `run` is by the names in it: whether it benchmarks; None: a base class has its turn."""
    wrapped = [cell.cell_contents for cell in run.__closure__ or () if cell != types.CellType()]
    codes = [inner.__code__ for inner in (run, *wrapped) if isinstance(inner, types.FunctionType)]
    names = {name for code in codes for name in _names(code)}
    bases = owner.__mro__[1:]
    stock = {id(vars(base)["run"]) for base in bases if "run" in vars(base)}
    meant = [run.__globals__.get(name) for name in names] + [getattr(owner, name, None) for name in names]
    if any(id(one) in stock for one in (*meant, *wrapped)):  # a direct reference escapes the replacement
        return True
    if "super" in names or names & {base.__name__ for base in bases}:
        return None
    return not names.isdisjoint(_BENCHMARKING)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
