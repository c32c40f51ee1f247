"""A bare launch: Triton's launcher in C, called without Triton's preparations and without hooks.

It gives the kernel what Triton's own way gives. Releases whose launcher is not known have none:

    both   grid, stream, function, cooperative, dependent
    3.6    scratch, scratch of profilers; metadata, three for hooks; the kernel's arguments, one by one
    3.9    metadata, three for hooks; scratch, scratch of profilers; arguments' kinds, twice; then one tuple
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
from triton.runtime.driver import driver

from . import loading

try:
    from triton.backends.nvidia import driver as nvidia
except ImportError:  # Triton was built without it
    nvidia = None

FORMAT_OF_3_6 = "iiiKKppOOOOOO"  # as its launchers parse what is before the kernel's arguments
IS_3_9 = triton.__version__.startswith("3.9.")

Launch = Callable[[int, Sequence[Any]], None]  # on a stream, with all arguments but the last ones
Expand = Callable[[Any], Sequence[Any]]  # from a descriptor to what the launcher is given for it


class BareLaunch(NamedTuple):
    """Launches a compiled kernel without hooks; `expand` encodes the descriptors, its first arguments."""

    launch: Launch
    expand: tuple[Expand, ...]


def bare_launch(
    compiled: Any, grid: tuple[int, int, int], descriptors: int, last: tuple[Any, ...]
) -> BareLaunch | None:
    """Return how to launch a compiled kernel without hooks; None if unknown.

    descriptors: how many of the kernel's first arguments are TMA descriptors; there are no others. last: its
    last arguments, which are the same in all launches.
    """
    launcher = compiled.run
    if nvidia is None or type(launcher) is not nvidia.CudaLauncher or launcher.profile_scratch_size:
        return None
    signature = list(compiled.src.signature.items())
    if any(map(_is_descriptor, signature[descriptors:])):
        return None
    meta = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * descriptors
    of_each = list(zip(signature[:descriptors], meta, strict=True))
    if getattr(nvidia, "_BASE_ARGS_FORMAT", None) == FORMAT_OF_3_6:
        return BareLaunch(
            _launch_of_3_6(compiled, grid, last), tuple(_expand_of_3_6(*each) for each in of_each)
        )
    if IS_3_9 and not launcher.gsan_enabled:
        return BareLaunch(
            _launch_of_3_9(compiled, grid, last), tuple(_expand_of_3_9(*each) for each in of_each)
        )
    return None


def _expand_of_3_6(kind: tuple[Any, Any], meta: Any) -> Expand:
    before = (None,) * len(FORMAT_OF_3_6)
    wrapped = nvidia.wrap_handle_tensordesc(lambda *given: given[len(before) :], dict([kind]), [meta])
    return lambda descriptor: wrapped(*before, descriptor)


def _expand_of_3_9(kind: tuple[Any, Any], meta: Any) -> Expand:
    wrapped = nvidia.wrap_handle_tensordesc(lambda *given: given[-1], dict([kind]), [meta])
    return lambda descriptor: wrapped((descriptor,))


def _launch_of_3_6(compiled: Any, grid: tuple[int, int, int], last: tuple[Any, ...]) -> Launch:
    launch = compiled.run.launch
    if any(map(_is_descriptor, compiled.src.signature.items())):
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    function, scratch = _function(compiled), _scratch(compiled, grid)
    before = (None, compiled.packed_metadata, None, None, None)
    return lambda stream, arguments: launch(
        *grid, stream, *function, scratch and scratch(stream), *before, *arguments, *last
    )


def _launch_of_3_9(compiled: Any, grid: tuple[int, int, int], last: tuple[Any, ...]) -> Launch:
    launch, launcher = driver.active.utils.launch, compiled.run
    function, scratch = _function(compiled), _scratch(compiled, grid)
    before = (*function, compiled.packed_metadata, None, None, None)
    kinds = (None, launcher.arg_annotations, launcher.kernel_signature)
    return lambda stream, arguments: launch(
        *grid, stream, *before, scratch and scratch(stream), *kinds, (*arguments, *last)
    )


def _function(compiled: Any) -> tuple[Any, ...]:
    return compiled.function, compiled.run.launch_cooperative_grid, compiled.run.launch_pdl


def _scratch(compiled: Any, grid: tuple[int, int, int]) -> Callable[[int], Any] | None:
    """Return what allocates the scratch memory of a launch on a stream; None if the kernel needs none.

    It is of our allocator, which the own way finds in its context: see `loading.launch`.
    """
    launcher = compiled.run
    size = grid[0] * grid[1] * grid[2] * launcher.num_ctas * launcher.global_scratch_size
    if not size:
        return None
    return lambda stream: loading.allocate_scratch(size, launcher.global_scratch_align, stream)


def _is_descriptor(argument: tuple[Any, Any]) -> bool:
    _name, kind = argument
    return str(kind).startswith("tensordesc")
