"""The function that launches a kernel, in C, called without Triton's preparations: what it takes, by release.

    3.6    grid, stream, function, cooperative, dependent; scratch, scratch of profilers, metadata, three for
           hooks; then the kernel's arguments, one by one
    3.9    grid, stream, function, cooperative, dependent; metadata, three for hooks; scratch, scratch of
           profilers; of which kinds the kernel's arguments are, twice; then these, as one sequence

TMA descriptors are expanded by Triton itself, once. Of other releases nothing is known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import triton
from triton.runtime import _allocation
from triton.runtime.driver import driver

try:
    from triton.backends.nvidia import driver as nvidia
except ImportError:  # Triton was built without it
    nvidia = None

FORMAT_OF_3_6 = "iiiKKppOOOOOO"  # as its launchers parse what is before the kernel's arguments
IS_3_9 = triton.__version__.startswith("3.9.")

Launch = Callable[[int, tuple[Any, ...]], None]


def bare_launch(
    compiled: Any, grid: tuple[int, int, int], first: tuple[Any, ...], last: tuple[Any, ...]
) -> Launch | None:
    """Return `launch(stream, middle)`, which launches a compiled kernel without hooks; None if unknown.

    The kernel's arguments are `first`, `middle` and `last`; all TMA descriptors are in `first`.
    """
    launcher = compiled.run
    if nvidia is None or type(launcher) is not nvidia.CudaLauncher or launcher.profile_scratch_size:
        return None
    signature = list(compiled.src.signature.items())
    if any(map(_is_descriptor, signature[len(first) :])):
        return None
    of_first = dict(signature[: len(first)])
    meta = getattr(compiled.metadata, "tensordesc_meta", None)
    if getattr(nvidia, "_BASE_ARGS_FORMAT", None) == FORMAT_OF_3_6:
        before = (None,) * len(FORMAT_OF_3_6)
        expand = nvidia.wrap_handle_tensordesc(lambda *given: given[len(before) :], of_first, meta)
        return _launch_of_3_6(compiled, grid, expand(*before, *first), last)
    if IS_3_9 and not launcher.gsan_enabled:
        expand = nvidia.wrap_handle_tensordesc(lambda *given: given[-1], of_first, meta)
        return _launch_of_3_9(compiled, grid, tuple(expand(first)), last)
    return None


def _launch_of_3_6(
    compiled: Any, grid: tuple[int, int, int], first: tuple[Any, ...], last: tuple[Any, ...]
) -> Launch:
    launch = compiled.run.launch
    if any(map(_is_descriptor, compiled.src.signature.items())):
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    function, scratch = _function(compiled), _scratch(compiled, grid)
    before = (None, compiled.packed_metadata, None, None, None, *first)
    return lambda stream, middle: launch(*grid, stream, *function, scratch(stream), *before, *middle, *last)


def _launch_of_3_9(
    compiled: Any, grid: tuple[int, int, int], first: tuple[Any, ...], last: tuple[Any, ...]
) -> Launch:
    launch, launcher = driver.active.utils.launch, compiled.run
    function, scratch = _function(compiled), _scratch(compiled, grid)
    before = (*function, compiled.packed_metadata, None, None, None)
    kinds = (None, launcher.arg_annotations, launcher.kernel_signature)
    return lambda stream, middle: launch(
        *grid, stream, *before, scratch(stream), *kinds, (*first, *middle, *last)
    )


def _function(compiled: Any) -> tuple[Any, ...]:
    return compiled.function, compiled.run.launch_cooperative_grid, compiled.run.launch_pdl


def _scratch(compiled: Any, grid: tuple[int, int, int]) -> Callable[[int], Any]:
    """Return what allocates the scratch memory of a launch on a stream, if the kernel needs any."""
    launcher = compiled.run
    size = grid[0] * grid[1] * grid[2] * launcher.num_ctas * launcher.global_scratch_size
    return functools.partial(_allocate if size else _nothing, size, launcher.global_scratch_align)


def _allocate(size: int, alignment: int, stream: int) -> Any:
    """Return scratch memory of the allocator that is set now, as launches ask for it."""
    return _allocation._allocator.get()(size, alignment, stream)


def _nothing(size: int, alignment: int, stream: int) -> None:
    return None


def _is_descriptor(argument: tuple[Any, Any]) -> bool:
    _name, kind = argument
    return str(kind).startswith("tensordesc")
